"""The rows that readings have left, and the page of them in Markdown."""

import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import Table


RESULTS = Path(__file__).parent / "results"
COUNTS = ("leaves", "right", "wrong", "unknown", "layers", "expected", "refused")
FORMATS = {
    "model": "",
    **dict.fromkeys(COUNTS, ".0f"),
    **dict.fromkeys(("value", "gradients", "softmax", "clip"), ".0e"),
    "seconds": ".2f",
}


def cells(row: Mapping[str, Any]) -> list[Any]:
    return [row.get(name) for name in FORMATS]


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(FORMATS, [cells(row) for row in rows])


def totals() -> collections.Counter[str]:
    """Sums over all models of all groups."""
    found: collections.Counter[str] = collections.Counter()
    for group in groups():
        for row in group["rows"]:
            found.update({name: row.get(name, 0) for name in COUNTS})
            failed = any(line.startswith("failed") for line in row["lines"])
            found.update(models=1, failed=failed)
    return found


def groups() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]


def page() -> str:
    """A table for each group, the totals, and a line on all that is not right."""
    parts, notes = [], []
    for group in groups():
        parts += [f"**{group['libraries']}** ({group['environment']})"]
        parts += [table_of(group["rows"]).markdown()]
        for row in group["rows"]:
            notes += [f"- {row['model']}: {' '.join(x.split())}" for x in row["lines"]]
    of_all = totals()
    parts += ["**Totals**", Table(of_all, [list(map(str, of_all.values()))]).markdown()]
    parts += ["**What is unknown, wrong, refused or failed**", "\n".join(notes)]
    return "\n\n".join(parts)
