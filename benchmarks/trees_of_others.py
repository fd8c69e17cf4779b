"""Which parameters of models by others Muon finds, against an expert's verdicts.

    python benchmarks/trees_of_others.py

A leaf is right if its axes are those of the verdict, or of one that is as good. It is
asked about if the error lists it, so that the user has to say, and else it is wrong.
The trees in `tests/data/trees` hold names, shapes and dtypes, and no weights; most of
them were at hand when the rules were written.
"""

import collections
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from tables import parser, Report

import muonclip_jax as mc


FOLDER = Path(__file__).parent.parent / "tests" / "data" / "trees"
COLUMNS = ("leaves", "right", "asked", "wrong")

#: Inputs and outputs as sets of axes from the front, or `None` for AdamW.
Sides = tuple[frozenset[int], frozenset[int]] | None
Leaf = Mapping[str, Any]


def read_models() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def build(leaves: Sequence[Leaf], hidden: frozenset[int] = frozenset()) -> Any:
    """The tree of abstract parameters; `optax.masked` hides some."""
    tree: dict[str, Any] = {}
    for i, leaf in enumerate(leaves):
        node = tree
        for key in leaf["path"][:-1]:
            node = node.setdefault(key, {})
        param = jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"])
        node[leaf["path"][-1]] = optax.MaskedNode() if i in hidden else param
    return tree


def look_up(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def is_right(leaf: Leaf, answer: Any) -> bool:
    shape = leaf["shape"]
    found = _sides(answer, shape)
    verdicts = [_sides(v, shape) for v in (leaf["want"], *leaf["alternatives"])]
    return any(_agree(found, verdict, shape) for verdict in verdicts)


def is_listed(leaf: Leaf, message: str) -> bool:
    """Whether an error lists a leaf."""
    line = f"  {'/'.join(leaf['path'])} {tuple(leaf['shape'])}"
    return any(each.startswith(line) for each in message.splitlines())


def count(leaves: Sequence[Leaf]) -> collections.Counter[str]:
    asked = _asked(leaves)
    numbers = mc.flax_dimension_numbers(build(leaves, asked))
    counts = collections.Counter(leaves=len(leaves), asked=len(asked))
    for i, leaf in enumerate(leaves):
        if i not in asked:
            right = is_right(leaf, look_up(numbers, leaf["path"]))
            counts["right" if right else "wrong"] += 1
    return counts


def _asked(leaves: Sequence[Leaf]) -> frozenset[int]:
    try:
        mc.flax_dimension_numbers(build(leaves))
    except ValueError as error:
        message = str(error)
        return frozenset(i for i, x in enumerate(leaves) if is_listed(x, message))
    return frozenset()


def _sides(answer: Any, shape: Sequence[int]) -> Sides:
    """Axes of size 1 do not matter."""
    if answer is None or answer == "adamw":
        return None
    if isinstance(answer, dict):
        answer = answer["reduction"], answer["output"]
    both = [[axes] if isinstance(axes, int) else axes for axes in answer]
    inputs, outputs = (
        frozenset(a % len(shape) for a in axes if shape[a] != 1) for axes in both
    )
    return inputs, outputs


def _agree(answer: Sides, verdict: Sides, shape: Sequence[int]) -> bool:
    """Which side of a square matrix is the input does not matter either."""
    if answer is None or verdict is None:
        return answer == verdict
    fan_in, fan_out = (math.prod(shape[a] for a in axes) for axes in verdict)
    return answer == verdict or (answer == verdict[::-1] and fan_in == fan_out)


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    totals: dict[str, collections.Counter[str]] = {}
    for model in read_models():
        of_framework = totals.setdefault(model["framework"], collections.Counter())
        of_framework.update(models=1, **count(model["leaves"]))
    totals["all"] = sum(totals.values(), collections.Counter())
    columns = {"framework": "", **dict.fromkeys(("models", *COLUMNS), "d")}
    table = report.table("Leaves by names and shapes", columns)
    for name, of in totals.items():
        table.add(name, of["models"], *(of[column] for column in COLUMNS))
    report.write()


if __name__ == "__main__":
    main()
