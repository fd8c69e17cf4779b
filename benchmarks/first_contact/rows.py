"""Rows of the tables; one that raises says so, and those after it go on."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tables import Table


class Compared(NamedTuple):
    """Right if the error is at most the bound."""

    error: float
    bound: float


def worst(found: Iterable[Compared]) -> Compared:
    """For its bound; what is not right, NaN too, before all that is."""

    def share(x: Compared) -> float:
        return x.error / x.bound if x.error <= x.bound else math.inf

    return max(found, key=share)


Outcome = Compared | str  # what was found, where nothing is compared
Checks = Mapping[str, Callable[[], Outcome]]


class Timed(NamedTuple):
    """Of two sides; in place of the peer's time there may be what it raised."""

    name: str
    ours: float | None = None  # ms
    peer: float | str | None = None
    times_faster: float | None = None
    share_of_peak: float | None = None


Parts = Mapping[str, Callable[[], Iterable[Timed]]]

RIGHT = {"check": "", "outcome": "", "error": ".1e", "bound": ".1e"}
FAST = {
    "time": "",
    "ours, ms": ".4g",
    "peer, ms": ".4g",
    "times faster": ".2f",
    "share of peak": ".0%",
}
FAILED = "FAILED"


def add_checks(table: Table, checks: Checks) -> int:
    """Adds a row for each, and returns how many failed."""
    outcomes = [_add_check(table, name, run) for name, run in checks.items()]
    return outcomes.count(FAILED)


def _add_check(table: Table, name: str, run: Callable[[], Outcome]) -> str:
    try:
        found = run()
    except Exception as error:
        table.add(name, f"{FAILED}: {first_line(error)}", None, None)
        return FAILED
    if isinstance(found, str):
        table.add(name, found, None, None)
        return found
    outcome = "ok" if found.error <= found.bound else FAILED  # also where it is NaN
    table.add(name, outcome, *found)
    return outcome


def add_rows(
    table: Table,
    parts: Mapping[str, Callable[[], Iterable[tuple[Any, ...]]]],
    row: Callable[[str], tuple[Any, ...]],
    end: float,
) -> None:
    """Adds the rows of each part; begins none after the time `end`.

    `row` makes one that has a name alone.
    """
    for name, rows in parts.items():
        if time.perf_counter() > end:
            table.add(*row(f"{name}: left out, the time is up"))
            continue
        try:
            for cells in rows():
                table.add(*cells)
        except Exception as error:
            table.add(*row(f"{name}: {FAILED}: {first_line(error)}"))


def first_line(error: Exception) -> str:
    """Its type and the beginning of what it says, fit for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}".replace("|", "/")
