"""Parses optimized HLO text, and counts the trips of its loops."""

import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    shape: str
    opcode: str
    inside: str  # the parentheses: operands, a constant, or a parameter's number
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return _names(self.inside)

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute gives: one, or some in braces."""
        found = re.search(rf"\b{attribute}=({{.*?}}|%[^\s,]+)", self.attributes)
        return _names(found[1]) if found else []

    def attribute(self, name: str) -> str:
        """The value of an attribute, without braces; `""` if there is none."""
        found = re.search(rf"\b{name}=(?:{{(.*?)}}|([^\s,]+))", self.attributes)
        return (found[1] or found[2] or "") if found else ""


Computation = dict[str, Instruction]
Program = dict[str, Computation]


def parse(text: str) -> Program:
    """Returns the computations by name; the one that runs is `"ENTRY"`."""
    program: Program = {}
    computation: Computation = {}
    instruction = re.compile(r"\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(.*)")
    for line in text.splitlines():
        if start := re.match(r"(?:(ENTRY) )?%(\S+) \(.*\{$", line):
            computation = program[start[1] or start[2]] = {}
        elif found := instruction.match(line):
            root, name, *parts = found.groups()
            computation[name] = Instruction(*parts, is_root=root is not None)
    return program


def count_trips(
    program: Program,
    given: Mapping[str, int],
    computation: Computation,
    loop: Instruction,
) -> int:
    """Returns how often the body of a `while` runs.

    The compiler for TPU does not note it, so the loop is run, reduced to what its
    condition reads. `given` has the numbers for loops where that depends on data, by
    the `jax.named_scope` they are in.

    **Raises:** `ValueError` if it depends on data and is not given.
    """
    if known := re.search(r'"known_trip_count":{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    name = re.search(r'op_name="([^"]*)"', loop.attributes)
    scopes = [scope for scope in given if name and f"/{scope}/" in f"/{name[1]}/"]
    if scopes:
        return given[max(scopes, key=len)]  # the innermost
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    state = _value(program, computation, loop.operands[0], [])
    trips = 0
    while running := _result(program, condition, [state]):
        state = _result(program, body, [state])
        trips += 1
    if running is None:
        raise ValueError(f"the number of trips of the loop over {body} depends on data")
    return trips


def dimensions(shape: str) -> list[int]:
    """Sizes of an array, such as `f32[2,3]{1,0}`."""
    return [int(n) for n in re.findall(r"\d+", shape.split("[")[1].split("]")[0])]


def bytes_of(shape: str) -> int:
    """Of an array, or of all of a tuple."""
    arrays = re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", shape)
    return sum(
        math.prod(int(n) for n in sizes.split(",") if n) * int(bits or 8) // 8
        for bits, sizes in arrays
    )


def _result(program: Program, name: str, arguments: list[Any]) -> Any:
    root = next(name for name, node in program[name].items() if node.is_root)
    return _value(program, program[name], root, arguments)


def _value(
    program: Program, computation: Computation, name: str, arguments: list[Any]
) -> Any:
    """Evaluates integers and tuples of them; anything else is None."""
    node = computation[name]
    if not node.shape.startswith("(") and dimensions(node.shape):
        return None
    if node.opcode == "parameter":
        return arguments[int(node.inside)] if arguments else None
    if node.opcode == "constant":
        return int(node.inside) if re.fullmatch(r"-?\d+", node.inside) else None
    operands = [_value(program, computation, n, arguments) for n in node.operands]
    match node.opcode:
        case "tuple":
            return operands
        case "get-tuple-element":
            return operands[0] and operands[0][int(node.attribute("index"))]
        case "copy" | "copy-start" | "copy-done" | "bitcast":
            return operands[0]
        case "fusion" | "call":
            (callee,) = node.called("calls") or node.called("to_apply")
            return _result(program, callee, operands)
        case "add" | "compare":
            function = getattr(operator, node.attribute("direction").lower() or "add")
            return None if None in operands else function(*operands)
    return None


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)
