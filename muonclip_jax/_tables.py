"""Tables of leaves: text in columns, and HTML in a notebook."""

import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


Row = Sequence[str]

# The part of a path that may count layers or experts: `3`, `layer_3`, `h3`.
_INDEX = re.compile(r"(.*?)(\d+)")
# A digit right after a word counts only if so many differ in it: `w1`, `w2` and `w3` of
# a gated layer are three things.
_MANY = 4


class Table(str):
    """A table, then text in blocks; a notebook shows the table as HTML."""

    # A string that keeps its cells, since `print`, logs and files take it as it is.
    rows: Sequence[Row]
    below: str

    @classmethod
    def of(cls, rows: Sequence[Row], blocks: Iterable[Sequence[str]] = ()) -> "Table":
        """Sets rows in columns, the first row their names, and lines in blocks."""
        below = "\n\n".join("\n".join(lines) for lines in blocks if lines)
        table = cls("\n\n".join(filter(None, ("\n".join(aligned(rows)), below))))
        table.rows, table.below = rows, below
        return table

    def _repr_html_(self) -> str:
        cells = [[html.escape(cell) for cell in row] for row in self.rows]
        head, *body = ("</td><td>".join(row) for row in cells)
        body = "".join(f"<tr><td>{row}</td></tr>" for row in body)
        head = head.replace("td>", "th>")
        return (
            f"<table><thead><tr><th>{head}</th></tr></thead><tbody>{body}</tbody>"
            f"</table><pre>{html.escape(self.below)}</pre>"
        )


def leaf_table(
    rows: Sequence[Row], blocks: Iterable[Sequence[str]], *, model: Any, collapse: bool
) -> Table:
    """A row for each leaf below their names; then blocks, and attention left alone.

    With a reading, the last blocks list attention that QK-Clip cannot scale, with the
    reason, and attention that it does not act on, or say that there is no attention.
    """
    shown = collapsed if collapse else list
    left_alone: list[list[str]] = []
    if model is not None:
        # Readings of one's own need not have the second.
        not_clipped = getattr(model, "not_clipped", ())
        for heading, lines in (
            ("QK-Clip cannot scale the logits of", model.refused),
            (
                "QK-Clip does not act on attention without a softmax "
                "or with a frozen query and key",
                not_clipped,
            ),
        ):
            # The path of a layer is the first word.
            listed = shown([line.partition(" ") for line in lines])
            left_alone += [[heading, *map("".join, listed)]] if listed else []
        if not left_alone and not model.attention:
            left_alone = [["no attention was found"]]
    return Table.of([rows[0], *shown(rows[1:])], [*blocks, *left_alone])


def aligned(rows: Sequence[Row]) -> list[str]:
    """Lines in which the columns of all rows start alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def collapsed(rows: Sequence[Row]) -> list[Row]:
    """Joins rows whose paths, their first cells, differ in an index: `blocks/0-11`."""
    # Experts within a layer first, then layers, whose rows are alike by then.
    rows = list(rows)
    depth = max((path.count("/") + 1 for path, *_ in rows), default=0)
    for place in reversed(range(depth)):
        rows = _collapsed_at(rows, place)
    return rows


def _collapsed_at(rows: Sequence[Row], place: int) -> list[Row]:
    cut = [_cut(path, place) for path, *_ in rows]
    counted: dict[str, set[str]] = {}
    for before, number, _ in cut:
        counted.setdefault(before, set()).add(number)
    numbers_of: dict[tuple[str, ...], list[int]] = {}
    for (before, number, after), (path, *cells) in zip(cut, rows, strict=True):
        is_counter = before[-1:] in ("", "/", "_") or len(counted[before]) >= _MANY
        if number and is_counter:
            numbers_of.setdefault((before, after, *cells), []).append(int(number))
        else:
            numbers_of[path, "", *cells] = []
    joined: list[Row] = []
    for (before, after, *cells), numbers in numbers_of.items():
        # Runs without a gap: number minus position is the same for all of one.
        runs: dict[int, list[int]] = {}
        for i, number in enumerate(sorted(numbers)):
            runs.setdefault(number - i, []).append(number)
        spans = [f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs.values()]
        joined += [(before + span + after, *cells) for span in spans or [""]]
    return joined


def _cut(path: str, place: int) -> tuple[str, str, str]:
    """A path before the number that ends one of its parts, the number, and the rest."""
    parts = path.split("/")
    match = _INDEX.fullmatch(parts[place]) if place < len(parts) else None
    if not match:
        return path, "", ""
    before = "/".join([*parts[:place], match[1]])
    return before, match[2], "/".join(["", *parts[place + 1 :]])


def totals(
    columns: tuple[str, str],
    leaves: Iterable[tuple[str, int, int]],
    groups: Sequence[str],
    everything: str,
    shown: Callable[[int], str] = str,
) -> list[str]:
    """Parameters of each group and their share, and the sum of something else.

    `leaves` are the group of each, its parameters and that number.
    """
    sums = {name: (0, 0) for name in (*groups, everything)}
    for group, n, m in leaves:
        for name in (group, everything):
            sums[name] = sums[name][0] + n, sums[name][1] + m
    whole = max(sums[everything][0], 1)
    rows = [(columns[0], "parameters", "share", columns[1])]
    rows += [
        (name, f"{n:,}", f"{100 * n / whole:.0f} %", shown(m))
        for name, (n, m) in sums.items()
    ]
    return aligned(rows)
