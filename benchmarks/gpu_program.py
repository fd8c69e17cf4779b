"""What a program compiled for GPU launches, computes and moves, from its HLO text.

Of each kernel: how often it is launched, its products, the bytes that it has to read
and to write, and the least time that these take. The cache is not counted, nor that
products of small matrices are slower than the rate: a bound to compare plans with.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gpu_chips import Chip
from hlo_program import (
    bytes_of,
    Computation,
    count_trips,
    dimensions,
    Instruction,
    Program,
)


LAUNCH_SECONDS = 2e-6
PRODUCTS = ("cublas", "mosaic")


class Work(NamedTuple):
    """Of one kernel, or of several."""

    launches: float = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> "Work":
        return Work(*(number * a for a in self))


class Exchange(NamedTuple):
    """A collective, and the time that products take between its start and its end."""

    kind: str
    bytes: int
    seconds: float  # that it takes itself, on a link of its own
    products: float


#: Arithmetic of a kernel that is no library's, from the shapes of its operands.
Flops = Callable[[list[str]], float]


def work_by_kind(
    program: Program, chip: Chip, flops_of_kernel: Flops
) -> dict[str, Work]:
    """What a program launches, by kind: "products", "elementwise", and collectives."""
    total: dict[str, Work] = collections.defaultdict(Work)
    for kind, work in _works(program, program["ENTRY"], chip, flops_of_kernel):
        total[kind] = total[kind].plus(work)
    return dict(total)


def _works(
    program: Program, computation: Computation, chip: Chip, flops: Flops
) -> Iterator[tuple[str, Work]]:
    for instruction in computation.values():
        if instruction.opcode == "while":
            trips = count_trips(program, {}, computation, instruction)
            (body,) = instruction.called("body")
            for kind, work in _works(program, program[body], chip, flops):
                yield kind, work.times(trips)
        elif kind := _kind(instruction):
            yield kind, _work(program, computation, instruction, chip, flops)


def _kind(instruction: Instruction) -> str:
    """The kind of a kernel; "" for what is none."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        target = instruction.attribute("custom_call_target")
        return "products" if any(name in target for name in PRODUCTS) else "other"
    if opcode.startswith(("all-", "reduce-scatter", "collective-")):
        return "" if opcode.endswith("-done") else opcode.removesuffix("-start")
    return "elementwise" if opcode in ("fusion", "copy", "reduce", "transpose") else ""


def _work(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    chip: Chip,
    flops_of_kernel: Flops,
) -> Work:
    operands = [computation[name].shape for name in instruction.operands]
    if instruction.opcode == "fusion":
        (callee,) = instruction.called("calls")
        moved = _bytes_of_fusion(program[callee])
    else:
        moved = sum(map(bytes_of, dict.fromkeys(operands))) + bytes_of(
            instruction.shape
        )
    flops = 0.0
    if _kind(instruction) == "products":
        is_library = "cublas" in instruction.attribute("custom_call_target")
        if is_library:
            flops = _gemm_flops(instruction, operands)
        else:
            flops = flops_of_kernel(operands)
    seconds = max(flops / chip.products, moved / chip.copies) + LAUNCH_SECONDS
    return Work(1, flops, moved, seconds)


def _gemm_flops(instruction: Instruction, operands: list[str]) -> float:
    axes = re.search(
        r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes
    )
    assert axes is not None
    contracted = [
        dimensions(operands[0])[int(axis)] for axis in re.findall(r"\d+", axes[1])
    ]
    return 2.0 * math.prod(dimensions(instruction.shape) + contracted)


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
    whole = bytes_of(computation[name].shape)
    users = list(_users(computation, name))
    cuts = ("slice", "dynamic-slice", "gather")
    if not users:
        return 0
    if all(user.opcode in cuts for user, _ in users):
        return min(whole, sum(bytes_of(user.shape) for user, _ in users))
    in_place = all(
        user.opcode == "dynamic-update-slice" and user.operands[0] == via
        for user, via in users
    )
    return 0 if in_place else whole


def _users(computation: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Through bitcasts: who uses a value, and under which name."""
    for other, node in computation.items():
        if name in node.operands:
            if node.opcode == "bitcast":
                yield from _users(computation, other)
            else:
                yield node, name


def exchanges(program: Program, chip: Chip, flops_of_kernel: Flops) -> list[Exchange]:
    """The collectives of a scheduled program, each with what hides it."""
    entry = program["ENTRY"]
    names, found = list(entry), []
    for i, node in enumerate(entry.values()):
        started = re.fullmatch(
            r"(all-\w+(?:-\w+)?|reduce-scatter|collective-\w+)-done", node.opcode
        )
        if not started:
            continue
        start = names.index(node.operands[0])
        between = [entry[n] for n in names[start + 1 : i]]
        products = sum(
            _work(program, entry, x, chip, flops_of_kernel).seconds
            for x in between
            if _kind(x) == "products"
        )
        size = bytes_of(node.shape)
        found.append(Exchange(started[1], size, size / chip.link, products))
    return found


def share_beside_products(found: list[Exchange]) -> float | None:
    """The share of the exchanged bytes that travel while products run."""
    total = sum(x.bytes for x in found)
    return sum(x.bytes for x in found if x.products) / total if total else None


def share_hidden(found: list[Exchange]) -> float | None:
    """The share of the time of exchanges for which these products last."""
    total = sum(x.seconds for x in found)
    return sum(min(x.seconds, x.products) for x in found) / total if total else None


def sum_of(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())
