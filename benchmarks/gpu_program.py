"""What a program compiled for GPU launches, computes and moves, from its HLO text.

Of each kernel: how often it is launched, its products, the bytes that it has to read
and to write, and the least time that these take. The cache is not counted, nor that
products of small matrices are slower than the rate: a bound to compare plans with.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from gpu_chips import Rates
from hlo_costs import KINDS as COLLECTIVES
from hlo_program import (
    bytes_of,
    Computation,
    count_trips,
    dimensions,
    Instruction,
    Program,
)


#: Of these only what their result is cut to is computed.
ELEMENTWISE = ("convert", "multiply", "add", "subtract", "compare", "select")


class Kernel(NamedTuple):
    """One launch."""

    kind: str  # "products", "elementwise", "other", or that of a collective
    flops: float
    bytes: int

    def seconds(self, rates: Rates) -> float:
        """The least time."""
        busy = max(self.flops / rates.products, self.bytes / rates.copies)
        return busy + rates.launch


class Work(NamedTuple):
    """That of some kernels together."""

    launches: float = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: "Work", times: int = 1) -> "Work":
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


def work_by_kind(program: Program, rates: Rates) -> dict[str, Work]:
    """The work of a program, by the kind of kernel."""
    total: dict[str, Work] = collections.defaultdict(Work)
    for kernel, times in _launches(program, program["ENTRY"]):
        work = Work(1, kernel.flops, kernel.bytes, kernel.seconds(rates))
        total[kernel.kind] = total[kernel.kind].plus(work, times)
    return dict(total)


def _launches(
    program: Program, computation: Computation
) -> Iterator[tuple[Kernel, int]]:
    """The kernels of a computation, and how often each is launched."""
    for instruction in computation.values():
        if instruction.opcode == "while":
            trips = count_trips(program, {}, computation, instruction)
            (body,) = instruction.called("body")
            for kernel, times in _launches(program, program[body]):
                yield kernel, trips * times
        elif kernel := _kernel(program, computation, instruction):
            yield kernel, 1


def _kernel(
    program: Program, computation: Computation, instruction: Instruction
) -> Kernel | None:
    """None for an instruction that launches nothing."""
    operands = _operands(computation, instruction)
    moved = sum(map(bytes_of, [*dict.fromkeys(operands), instruction.shape]))
    opcode = instruction.opcode
    if opcode == "fusion":
        (callee,) = (program[name] for name in instruction.called("calls"))
        # A product may write its part of a stack by itself, as a fusion with an update.
        flops = sum(_flops(node, _operands(callee, node)) for node in callee.values())
        kind = "products" if flops else "elementwise"
        return Kernel(kind, flops, _bytes_of_fusion(callee))
    if opcode in ("copy", "reduce", "transpose"):
        return Kernel("elementwise", 0.0, moved)
    if collective := re.fullmatch(f"({COLLECTIVES})(-start)?", opcode):
        return Kernel(collective[1], 0.0, moved)
    if opcode == "custom-call":
        flops = _flops(instruction, operands)
        return Kernel("products" if flops else "other", flops, moved)
    return None


def between_products(program: Program) -> int:
    """Elementwise kernels, as they are written, that read nothing but products.

    And whose results enter a product.
    """
    count = 0
    for computation in program.values():
        products = set()
        for name, node in computation.items():
            own = _operands(computation, node)
            if node.opcode == "custom-call" and _flops(node, own):
                products.add(name)
            elif node.opcode in ("get-tuple-element", "bitcast"):
                products |= {name} if node.operands[0] in products else set()
        multiplied = {
            operand
            for name in products
            if computation[name].opcode == "custom-call"
            for operand in computation[name].operands
        }
        count += sum(
            node.opcode == "fusion"
            and name in multiplied
            and products.issuperset(node.operands)
            for name, node in computation.items()
        )
    return count


def _operands(computation: Computation, instruction: Instruction) -> list[str]:
    return [computation[name].shape for name in instruction.operands]


def _flops(instruction: Instruction, operands: list[str]) -> float:
    if instruction.opcode != "custom-call":
        return 0.0
    target = instruction.attribute("custom_call_target")
    return _gemm_flops(instruction, operands) if "cublas" in target else 0.0


def _gemm_flops(gemm: Instruction, operands: list[str]) -> float:
    axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', gemm.attributes)
    assert axes is not None
    contracted = [
        dimensions(operands[0])[int(axis)] for axis in re.findall(r"\d+", axes[1])
    ]
    return 2.0 * math.prod(dimensions(gemm.shape) + contracted)


def _bytes_of_fusion(computation: Computation) -> int:
    root = next(node for node in computation.values() if node.is_root)
    roots = (
        [computation[n] for n in root.operands] if root.opcode == "tuple" else [root]
    )
    written = sum(bytes_of(_written(computation, node)) for node in roots)
    names = [name for name, node in computation.items() if node.opcode == "parameter"]
    return written + sum(_read(computation, name) for name in names)


def _written(computation: Computation, node: Instruction) -> str:
    """The shape of what is written: of an update in place no more than the update."""
    while node.opcode == "bitcast":
        node = computation[node.operands[0]]
    if node.opcode == "dynamic-update-slice":
        return computation[node.operands[1]].shape
    return node.shape


def _read(computation: Computation, name: str) -> int:
    """Of a parameter that is only cut, no more than the pieces."""
    whole = computation[name].shape
    entries = max(1, math.prod(dimensions(whole)))
    return bytes_of(whole) * _entries_read(computation, name) // entries


def _entries_read(computation: Computation, name: str) -> int:
    size = dimensions(computation[name].shape)
    total = 0
    for user, via in _users(computation, name):
        if user.opcode in ("slice", "dynamic-slice", "gather"):
            total += math.prod(dimensions(user.shape))
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == via:
            continue  # in place
        elif user.opcode in ELEMENTWISE and dimensions(user.shape) == size:
            # Only as much as its result is cut to, if that is all that becomes of it.
            found = next(key for key, node in computation.items() if node is user)
            total += (
                math.prod(size) if user.is_root else _entries_read(computation, found)
            )
        else:
            total += math.prod(size)
    return min(math.prod(size), total)


def _users(computation: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Through bitcasts: who uses a value, and under which name."""
    for other, node in computation.items():
        if name in node.operands:
            if node.opcode == "bitcast":
                yield from _users(computation, other)
            else:
                yield node, name


def exchanged_bytes(program: Program) -> int:
    """The bytes that the collectives of a scheduled program send."""
    done = re.compile(f"({COLLECTIVES})-done")
    nodes = program["ENTRY"].values()
    return sum(bytes_of(node.shape) for node in nodes if done.fullmatch(node.opcode))
