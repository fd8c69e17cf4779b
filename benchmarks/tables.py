"""Tables in Markdown on the screen, and with all digits in a JSON file."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from environment import environment


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
                {"title": t.caption, "columns": list(t.columns), "rows": t.rows}
                for t in self._tables
            ],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(content, indent=1, default=str))


def _show(cell: Cell, form: str) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else format(cell, form)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
