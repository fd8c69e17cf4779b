"""Lists names of the package with two meanings, or with none.

python .ci/names.py

A type or a module has a name of its own. Functions may share one: `init` is one word.
A variable says what it holds; those of `EMPTY` held a hundred different things.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


PACKAGE = Path(__file__).parent.parent / "muonclip_jax"
EMPTY = {"found", "met", "own", "said"}


def main() -> int:
    places, empty = defaultdict(list), []
    for file in sorted(PACKAGE.rglob("*.py")):
        empty += [f"{file.relative_to(PACKAGE.parent)}:{x}" for x in empty_names(file)]
        if file.name != "__init__.py":
            path = str(file.relative_to(PACKAGE.parent))
            places[file.stem.strip("_")].append(path)
            for name, line in types_of(file):
                places[name.strip("_")].append(f"{path}:{line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    for name, where in twice.items():
        print(f"{name} has several meanings: {', '.join(where)}")
    for place in empty:
        print(f"{place} does not say what it holds")
    return 1 if twice or empty else 0


def empty_names(file: Path) -> Iterator[str]:
    """Variables, arguments and fields of a name in `EMPTY`, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                if name in EMPTY:
                    yield f"{node.lineno} {name}"


def types_of(file: Path) -> Iterator[tuple[str, int]]:
    """Classes, and capitalized names of types that a module assigns."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            # Constants are written in capitals throughout.
            if name.strip("_")[:1].isupper() and not name.isupper():
                yield name, node.lineno


if __name__ == "__main__":
    sys.exit(main())
