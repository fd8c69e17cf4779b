"""Which kernels take the time of training steps, from what JAX's profiler keeps."""

import collections
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from language_models import drawn

from .training import batch, Model, shapes_and_loss, UPDATE


STEPS, MOST, ALL = 3, 40, "all kernels"
KERNELS = {"kernels": "", "calls": "", "ms": ".3f", "in the update, ms": ".3f"}
#: Instructions that are events on a CPU, and contain others.
OUTER = ("while", "call", "conditional")


class Kernels(NamedTuple):
    """One row of the table."""

    name: str
    calls: int | None = None
    ms: float | None = None
    in_update: float | None = None  # where the instructions are known


class Event(NamedTuple):
    """One kernel that ran."""

    name: str
    start: float  # ns, like the duration
    duration: float
    instruction: str | None  # of the compiled program


def profiled(model: Model, compiled: Any, init: Any) -> Iterator[Kernels]:
    """Runs some steps, the first one without the profiler."""
    params = drawn(shapes_and_loss(model)[0])
    carry, tokens = (params, init(params)), batch(model, 0)
    *carry, _, _ = jax.block_until_ready(compiled(*carry, tokens))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                *carry, _, _ = compiled(*carry, tokens)
            jax.block_until_ready(carry)
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = events_of(jax.profiler.ProfileData.from_file(str(file)))
    if not events:
        raise ValueError("the profiler has seen no kernel")
    yield from rows(events, updating(compiled.as_text()))


def events_of(profile: Any) -> list[Event]:
    """On GPU those of its streams; elsewhere all that name an instruction."""
    planes = list(profile.planes)
    gpus = [plane for plane in planes if "/device:GPU" in plane.name]
    found = []
    for line in (line for plane in gpus or planes for line in plane.lines):
        # Other lines of a GPU show the same time again, by instructions and modules.
        if gpus and not line.name.startswith("Stream"):
            continue
        for event in line.events:
            instruction = dict(event.stats).get("hlo_op")
            if gpus or (instruction and not event.name.startswith(OUTER)):
                times = event.start_ns, event.duration_ns
                found.append(Event(event.name, *times, instruction))
    return found


def updating(program: str) -> set[str]:
    """The instructions of a compiled program that are the optimizer's."""
    scoped = re.compile(rf'%?([\w.-]+) = .*op_name="[^"]*/{UPDATE}/')
    return {match[1] for match in map(scoped.search, program.splitlines()) if match}


def rows(events: Sequence[Event], update: set[str]) -> Iterator[Kernels]:
    """The sums of all, then of each name without its numbers, the longest first."""
    whole = max(e.start + e.duration for e in events) - min(e.start for e in events)
    yield Kernels(f"{STEPS} steps, from the first kernel to the last", ms=whole / 1e6)
    yield Kernels("while one kernel runs, or several", ms=busy(events) / 1e6)
    yield summed(ALL, events, update)
    by_name = collections.defaultdict(list)
    for event in events:
        by_name[re.sub(r"[._]\d+(?=[._]|$)", "", event.name)].append(event)
    longest = sorted(by_name, key=lambda x: -sum(e.duration for e in by_name[x]))
    for name in longest[:MOST]:
        yield summed(name[:90].replace("|", "/"), by_name[name], update)
    if rest := [e for name in longest[MOST:] for e in by_name[name]]:
        yield summed(f"{len(longest) - MOST} other names", rest, update)


def summed(name: str, events: Sequence[Event], update: set[str]) -> Kernels:
    def ms(some: Iterable[Event]) -> float:
        return sum(e.duration for e in some) / 1e6

    known = [e for e in events if e.instruction]
    in_update = ms(e for e in known if e.instruction in update) if known else None
    return Kernels(name, len(events), ms(events), in_update)


def busy(events: Iterable[Event]) -> float:
    """The time that the events cover: they overlap where there are several streams."""
    total, covered = 0.0, -float("inf")
    for event in sorted(events, key=lambda e: e.start):
        end = event.start + event.duration
        total += max(0.0, end - max(event.start, covered))
        covered = max(covered, end)
    return total
