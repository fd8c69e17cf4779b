"""The question about leaves that nothing determines, and the ways to answer it."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .paths import is_masked, Path, PathedTree, show
from .verdict import Verdict


#: The argument for a transformation that sees only a part of the params.
BEFORE_THE_MASK = "dimension_numbers=mc.flax_dimension_numbers(params)"

_FEW = 3  # leaves that are alike and listed one by one


def question(
    tree: PathedTree, verdicts: Mapping[Path, Verdict], asked: Collection[Path]
) -> str:
    """Returns the message: it leads to a reading first, then to a mapping to paste."""
    message = [
        "cannot decide which axes of these leaves form matrices:",
        *_grouped(tree, {path: verdicts[path] for path in asked}),
    ]
    sources = {verdicts[path].source for path in asked}
    if "named" in sources and any(map(is_masked, tree.leaves)):
        message.append(
            "A mask hides leaves that may decide this. Decide on all params: "
            f"{BEFORE_THE_MASK}."
        )
    if "named" in sources:
        message.append(
            "Let the loss decide: model=mc.read_model(loss, params, *batch)."
        )
    if "unread" in sources:
        message.append(
            "The reading that model= gives does not show how these leaves are used. If "
            "another function uses them, read that one, or one that runs both."
        )
    message += [
        "Or give dimension_numbers. This mapping is a guess to check: reduction axes, "
        "then output axes; all other axes are a stack of matrices; None is AdamW. The "
        "axes of leaves that no pattern matches are still found automatically:",
        "",
        "from optax.contrib import MuonDimensionNumbers",
        "dimension_numbers = "
        + write_patterns({p: verdicts[p].numbers for p in asked}, tree.paths),
    ]
    if unsure := {path: x for path, x in verdicts.items() if not x.is_sure}:
        message += ["", "Decided with little evidence:", *_grouped(tree, unsure)]
    return "\n".join(message)


def _grouped(tree: PathedTree, verdicts: Mapping[Path, Verdict]) -> list[str]:
    """Returns a line per leaf, or for many that differ in the number of their layer."""
    shape = {path: str(getattr(leaf, "shape", "")) for path, leaf in tree.rows()}
    groups: dict[Any, list[Path]] = {}
    for path, x in verdicts.items():
        reasons = [x.use] * bool(x.use) + [x.kind] * (x.is_known or x.kind != "open")
        kind = ": ".join(reasons)
        key = _starred("/".join(path)), shape[path], kind, x.is_known, x.numbers
        groups.setdefault(key, []).append(path)
    lines = []
    for (pattern, size, kind, is_known, numbers), alike in groups.items():
        by = "adamw for " if numbers is None else "muon for "
        start, end = (
            (by, f": {kind}?") if is_known else ("", f": {kind}" if kind else "")
        )
        is_many = len(alike) > _FEW
        more = f" and {len(alike) - 1} more like {pattern}" if is_many else ""
        shown = alike[:1] if is_many else alike
        lines += [f"  {start}{show(path)} {size}{more}{end}" for path in shown]
    return lines


def write_patterns(guesses: Mapping[Path, Any], tree_paths: Iterable[Path]) -> str:
    """Writes Python code of a mapping from these leaves, and no other, to numbers.

    A star stands for the number of a module, where all that it matches are alike.
    """
    # A set of one letter is how `fnmatch` escapes what it would read as a pattern.
    escaped = {x: re.sub(r"([*?\[])", r"[\1]", "/".join(x)) for x in guesses}
    starred = {x: _starred(name) for x, name in escaped.items()}
    others = ["/".join(path) for path in tree_paths if path not in guesses]
    alike: dict[str, set[Any]] = {}
    for path, x in guesses.items():
        alike.setdefault(starred[path], set()).add(x)
    mixed = {x for x, y in alike.items() if len(y) > 1 or fnmatch.filter(others, x)}
    entries = {
        escaped[path] if starred[path] in mixed else starred[path]: x
        for path, x in guesses.items()
    }
    shown = {
        key: x and f"MuonDimensionNumbers({x.reduction_axis}, {x.output_axis})"
        for key, x in entries.items()
    }
    lines = [f'    "{key}": {x},' for key, x in shown.items()]
    return "\n".join(["{", *lines, "}"])


def _starred(path: str) -> str:
    return re.sub(r"\d+(?=/)", "*", path)
