"""Lists names of the package with two meanings: types and modules.

python .ci/names.py

A type or a module has a name of its own. Functions may share one: `init` is one word.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


PACKAGE = Path(__file__).parent.parent / "muonclip_jax"


def main() -> int:
    places = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name != "__init__.py":
            path = str(file.relative_to(PACKAGE.parent))
            places[file.stem.strip("_")].append(path)
            for name, line in types_of(file):
                places[name.strip("_")].append(f"{path}:{line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    for name, where in twice.items():
        print(f"{name} has several meanings: {', '.join(where)}")
    return 1 if twice else 0


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
