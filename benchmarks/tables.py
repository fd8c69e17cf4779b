"""Tables in Markdown on the screen, and with all digits in a JSON file."""

import argparse
import json
from collections.abc import Iterable, Mapping
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
    """Prints its rows as they come."""

    def __init__(self, title: str, columns: Mapping[str, str]):
        self.title, self.columns = title, dict(columns)
        self.rows: list[tuple[Cell, ...]] = []
        print(f"\n{title}\n")
        _print_row(columns)
        _print_row(["---"] * len(columns))

    def add(self, *cells: Cell) -> None:
        formats = self.columns.values()
        _print_row([_show(*pair) for pair in zip(cells, formats, strict=True)])
        self.rows.append(cells)


class Report:
    """The tables of one run, with where they come from."""

    def __init__(self, args: argparse.Namespace):
        self._file = args.json
        self._arguments = {name: value for name, value in vars(args).items() if value}
        self._environment = environment()
        self._tables: list[Table] = []
        print(self._environment)

    def table(self, title: str, columns: Mapping[str, str]) -> Table:
        """Starts a table; `columns` are headings and formats, as `.2f`."""
        self._tables.append(Table(title, columns))
        return self._tables[-1]

    def write(self) -> None:
        """Writes the file of `--json`, if there is one."""
        if not self._file:
            return
        content = {
            "environment": self._environment,
            "arguments": self._arguments,
            "tables": [
                {"title": t.title, "columns": list(t.columns), "rows": t.rows}
                for t in self._tables
            ],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(content, indent=1, default=str))


def _show(cell: Cell, form: str) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else format(cell, form)


def _print_row(cells: Iterable[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
