"""Tables in Markdown on the screen, with all digits in a JSON file, and on pages.

    python benchmarks/tables.py          # writes the tables of all pages from results
    python benchmarks/tables.py --check  # names the pages that differ, and fails

A page has a table between two comments. The first names a file of
`benchmarks/results`, the table in it and, where it is not all of the table, how its
rows begin, as a pattern, and the columns. Cells and names are joined by a semicolon:

    <!-- table accelerator_h100 Fast rows="GPT-2.*;" columns="time; ours, ms" -->
    <!-- end of table -->

`<!-- tables of reading -->` begins what `benchmarks/reading_libraries.py` prints.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from environment import environment


HERE = Path(__file__).parent
RESULTS = HERE / "results"
BETWEEN = re.compile(
    r"^(<!-- (tables? .*?) -->\n).*?^(<!-- end of table -->)$", re.DOTALL | re.MULTILINE
)

Cell = str | float | None


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="a file for the tables")
    return parser


class Table:
    """Rows under headings; `columns` may give each a format, as `.2f`."""

    def __init__(
        self,
        columns: Mapping[str, str] | Iterable[str],
        rows: Iterable[Sequence[Cell]] = (),
        caption: str = "",
    ):
        is_mapping = isinstance(columns, Mapping)
        self.columns = dict(columns) if is_mapping else dict.fromkeys(columns, "")
        self.rows, self.caption = [tuple(row) for row in rows], caption

    def add(self, *cells: Cell) -> None:
        self.rows.append(cells)

    def head(self) -> str:
        rows = "\n".join(map(_line, (self.columns, ["---"] * len(self.columns))))
        return f"{self.caption}\n\n{rows}" if self.caption else rows

    def line(self, cells: Sequence[Cell]) -> str:
        formats = self.columns.values()
        return _line(_show(*pair) for pair in zip(cells, formats, strict=True))

    def markdown(self) -> str:
        return "\n".join([self.head(), *map(self.line, self.rows)])

    def part(self, rows: str = "", columns: str = "") -> "Table":
        """The rows that begin as the pattern says, and the named columns of them.

        **Raises:** `ValueError` if there is no such row or column.
        """
        names = columns.split("; ") if columns else list(self.columns)
        if unknown := set(names) - set(self.columns):
            raise ValueError(f"no column {unknown}; there are {list(self.columns)}")
        places = [list(self.columns).index(name) for name in names]
        chosen = [x for x in self.rows if re.match(rows, "; ".join(map(str, x)))]
        if not chosen:
            raise ValueError(f"no row begins with {rows!r}")
        formats = {name: self.columns[name] for name in names}
        return Table(formats, [[row[i] for i in places] for row in chosen])


class PrintedTable(Table):
    """Prints and writes its rows as they come: a run that is killed has its rows."""

    def __init__(
        self, columns: Mapping[str, str], caption: str, write: Callable[[], None]
    ):
        super().__init__(columns, caption=caption)
        self._write = write
        print(f"\n{self.head()}", flush=True)

    def add(self, *cells: Cell) -> None:
        super().add(*cells)
        print(self.line(cells), flush=True)
        self._write()


class Report:
    """The tables of one run, with where they come from."""

    def __init__(self, args: argparse.Namespace):
        self._file = args.json
        self._arguments = {name: value for name, value in vars(args).items() if value}
        self._environment = environment()
        self._tables: list[Table] = []
        print(self._environment)

    def table(self, title: str, columns: Mapping[str, str]) -> Table:
        """Starts a table that prints its rows as they come."""
        self._tables.append(PrintedTable(columns, title, self.write))
        return self._tables[-1]

    def write(self) -> None:
        """Writes the file of `--json`, if there is one."""
        if not self._file:
            return
        content = {
            "environment": self._environment,
            "arguments": self._arguments,
            "tables": [
                {"title": t.caption, "columns": t.columns, "rows": t.rows}
                for t in self._tables
            ],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(content, indent=1, default=str))


def kept(name: str, title: str) -> Table:
    """A table of a file of results.

    **Raises:** `ValueError` if the file has no such table.
    """
    tables = json.loads((RESULTS / f"{name}.json").read_text())["tables"]
    for table in tables:
        if table["title"] == title:
            return Table(table["columns"], table["rows"])
    raise ValueError(f"{name} has {[t['title'] for t in tables]}, and no {title!r}")


def with_tables(page: str) -> str:
    """The page with all tables from results."""

    def renewed(match: re.Match[str]) -> str:
        return f"{match[1]}\n{named(match[2])}\n\n{match[3]}"

    return BETWEEN.sub(renewed, page)


def named(comment: str) -> str:
    """The tables that a comment names."""
    if comment == "tables of reading":
        from reading import kept as of_reading

        return of_reading.page()
    _, name, title, *options = shlex.split(comment)
    part = dict(option.split("=", 1) for option in options)
    return kept(name, title).part(**part).markdown()


def pages() -> list[Path]:
    root = HERE.parent
    folders = (HERE, HERE / "reading", root / "docs")
    found = [file for folder in folders for file in folder.glob("*.md")]
    return [root / "README.md", *sorted(found)]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--check", action="store_true", help="write nothing")
    args = options.parse_args()
    found = {page: page.read_text() for page in pages()}
    stale = [page for page, text in found.items() if with_tables(text) != text]
    for page in stale:
        print(f"{page}: tables are not those of results" * args.check or page)
        if not args.check:
            page.write_text(with_tables(found[page]))
    sys.exit(bool(stale) and args.check)


def _show(cell: Cell, form: str) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else format(cell, form)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
