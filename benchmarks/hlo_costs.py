"""Reads what a program costs one device from its optimized HLO text.

`cost_analysis` counts the body of a loop once, however often it runs, and knows neither
the collectives nor the cycles that the TPU compiler estimates for each operation.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from hlo_program import (
    bytes_of,
    Computation,
    count_trips,
    dimensions,
    Instruction,
    parse,
    Program,
)


#: A send goes to another slice of a TPU.
KINDS = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|send"


#: What one link of a TPU v5p carries in a cycle, each way: 100 GB/s at 1.75 GHz.
LINK = 57


@dataclass(frozen=True)
class Traffic:
    """How often collectives of one kind run, and how often of these in loops.

    The bytes are the larger of what goes into and what comes out of one device. Those
    that are sent while something else runs, between the start and the end of a
    collective in the schedule, are hidden, and the others exposed.
    """

    count: int = 0
    bytes: int = 0
    in_loops: int = 0
    exposed: int = field(default=0, compare=False)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.count + other.count,
            self.bytes + other.bytes,
            self.in_loops + other.in_loops,
            self.exposed + other.exposed,
        )

    def repeated(self, trips: int) -> "Traffic":
        count, exposed = trips * self.count, trips * self.exposed
        return Traffic(count, trips * self.bytes, count, exposed)

    def during(self, cycles: int, rate: float) -> "Traffic":
        """The same, of what is sent while something else runs for so many cycles.

        `rate` is in bytes a cycle.
        """
        exposed = max(0, self.bytes - math.floor(cycles * rate))
        return dataclasses.replace(self, exposed=exposed)


@dataclass(frozen=True)
class Costs:
    """Costs of one run on one device, loops multiplied out.

    `flops` are those of matrix products and convolutions. `cycles` add up the
    compiler's estimates; it makes none for collectives, for copies in the background
    and for custom kernels.
    """

    flops: int = 0
    cycles: int = 0
    collectives: Mapping[str, Traffic] = field(default_factory=dict)

    def __add__(self, other: "Costs") -> "Costs":
        collectives = dict(self.collectives)
        for kind, traffic in other.collectives.items():
            collectives[kind] = collectives.get(kind, Traffic()) + traffic
        return Costs(self.flops + other.flops, self.cycles + other.cycles, collectives)

    def repeated(self, trips: int) -> "Costs":
        collectives = {k: v.repeated(trips) for k, v in self.collectives.items()}
        return Costs(trips * self.flops, trips * self.cycles, collectives)

    def during(self, cycles: int, rate: float) -> "Costs":
        """The same, of a collective while something else runs for so many cycles."""
        collectives = {k: v.during(cycles, rate) for k, v in self.collectives.items()}
        return dataclasses.replace(self, collectives=collectives)

    @property
    def exposed(self) -> float | None:
        """The share of the bytes that are sent while nothing else runs."""
        total = sum(traffic.bytes for traffic in self.collectives.values())
        exposed = sum(traffic.exposed for traffic in self.collectives.values())
        return exposed / total if total else None


class Context(NamedTuple):
    """A program, and what is known of its loops."""

    program: Program
    trips: Mapping[str, int]
    sides: Sequence[int]


def hlo_costs(
    text: str,
    trips: Mapping[str, int] = MappingProxyType({}),
    sides: Sequence[int] = (4, 4, 4),
) -> Costs:
    """Returns the costs of a compiled program; `text` is `compiled.as_text()`.

    `trips` says how often a loop runs whose number of trips depends on data, by the
    `jax.named_scope` that it is in, and `sides` how many chips of a TPU there are along
    each, the first first.

    **Raises:** `ValueError` for such a loop if it is not in `trips`.
    """
    program = parse(text)
    return _costs(Context(program, trips, sides), program["ENTRY"])


def _costs(context: Context, computation: Computation) -> Costs:
    costs = {
        name: _instruction_costs(context, computation, instruction)
        for name, instruction in computation.items()
    }
    for name, instruction in computation.items():
        if re.fullmatch(f"({KINDS})(-start)?|async-start", instruction.opcode):
            cycles = sum(costs[x].cycles for x in _meanwhile(computation, name))
            rate = bytes_per_cycle(_group_size(instruction), context.sides)
            costs[name] = costs[name].during(cycles, rate)
    return _sum(costs.values())


def bytes_per_cycle(devices: int, sides: Sequence[int]) -> float:
    """What each of some neighbors can send in an exchange of all with all.

    Half of a ring of `n` sends half of its bytes over the two links to either side, so
    that each has `8 / n` links to itself, and two at most: in the longest direction.
    """
    longest, rest = 1, devices
    for side in sides:
        longest, rest = max(longest, min(side, rest)), rest // side
    return LINK * min(2, 8 / longest)


def _group_size(collective: Instruction) -> int:
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", collective.attributes)
    if counted:
        return int(counted[1])
    first = collective.attribute("replica_groups").lstrip("{")
    return first.count(",") + 1


def _meanwhile(computation: Computation, start: str) -> list[str]:
    """What stands between start and end of a collective: nothing if it waits."""
    names = [*computation]
    names = names[names.index(start) + 1 :]
    end = computation[start].opcode.removesuffix("-start") + "-done"
    for i, name in enumerate(names):
        if computation[name].opcode == end and start in computation[name].operands:
            return names[:i]
    return []


def _sum(costs: Iterable[Costs]) -> Costs:
    return sum(costs, Costs())


def _instruction_costs(
    context: Context, computation: Computation, instruction: Instruction
) -> Costs:
    called = _called_costs(context, computation, instruction)
    operands = [computation[name].shape for name in instruction.operands]
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    # The estimate of a fusion covers what it calls.
    cycles = int(estimate[1]) - called.cycles if estimate else 0
    own = Costs(_flops(instruction, operands), cycles, _traffic(instruction, operands))
    return called + own


def _called_costs(
    context: Context, computation: Computation, instruction: Instruction
) -> Costs:
    def costs(*attributes: str) -> list[Costs]:
        names = [n for attribute in attributes for n in instruction.called(attribute)]
        return [_costs(context, context.program[name]) for name in names]

    match instruction.opcode:
        case "while":
            trips = count_trips(
                context.program, context.trips, computation, instruction
            )
            return _sum(costs("condition", "body")).repeated(trips)
        case "conditional":
            branches = ("branch_computations", "true_computation", "false_computation")
            return max(costs(*branches), key=_expense)
        case "fusion" | "call" | "async-start":
            return _sum(costs("calls", "to_apply"))
    return Costs()


def _expense(costs: Costs) -> tuple[int, int, int]:
    size = sum(traffic.bytes for traffic in costs.collectives.values())
    return costs.cycles, costs.flops, size


def _traffic(instruction: Instruction, operands: list[str]) -> dict[str, Traffic]:
    found = re.fullmatch(f"({KINDS})(-start)?", instruction.opcode)
    if not found:
        return {}
    results = [bytes_of(part) for part in _parts(instruction.shape)]
    # A start has inputs and outputs among its results: ((inputs), (outputs), context).
    out = max(results) if found[2] else sum(results)
    return {found[1]: Traffic(1, max(out, sum(map(bytes_of, operands))))}


def _parts(shape: str) -> list[str]:
    """Splits a tuple at its top level; an array is one part."""
    shape = re.sub(r"{[^}]*}", "", shape)
    return re.findall(r"\([^()]+\)|\w+\[[^]]*\]", shape.removeprefix("("))


def _flops(instruction: Instruction, operands: list[str]) -> int:
    if instruction.opcode == "dot":
        axes = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
        contracted = [dimensions(operands[0])[int(axis)] for axis in axes]
        return 2 * math.prod(dimensions(instruction.shape) + contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands)
    return 0


def _convolution_flops(instruction: Instruction, operands: list[str]) -> int:
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    image, kernel, output = (
        dict(zip(axes, dimensions(shape), strict=True))
        for axes, shape in zip(labels, [*operands, instruction.shape], strict=True)
    )
    window = re.findall(r"(\w+)=(\S+)", instruction.attribute("window"))
    flops = 2 * kernel["i"] * output["b"] * output["f"]
    for axis in sorted(image.keys() - {"b", "f"}):
        settings = {key: value.split("x")[int(axis)] for key, value in window}
        flops *= _pairs(image[axis], kernel[axis], output[axis], settings)
    return flops


def _pairs(image: int, kernel: int, output: int, window: Mapping[str, str]) -> int:
    """Counts the pairs of output and kernel positions that meet an entry of the image.

    On TPU a batch of products is a convolution over the batch, dilated such that each
    output meets one entry of the kernel.
    """
    stride, spacing, dilation = (
        int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    start = np.arange(output) * stride - int(window.get("pad", "0").split("_")[0])
    pairs = 0
    for offset in range(0, kernel * dilation, dilation):
        entry, between = np.divmod(start + offset, spacing)
        pairs += int(np.sum((between == 0) & (entry >= 0) & (entry < image)))
    return pairs
