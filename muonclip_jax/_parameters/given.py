"""Settings for parameters as users give them: patterns, trees, prefixes."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._matrices.axes import is_axes
from .._options import shown
from . import paths
from .paths import Path, PathedTree, show


#: The entry of a leaf whose axes are to be found automatically after all.
AUTOMATIC = "auto"


def check_no_number(name: str, given: Any, tree: PathedTree | None = None) -> None:
    """Raises for one number in place of a tree: what a function has become.

    `optax.inject_hyperparams` calls it with the step, which has no leaves to speak of.
    """
    is_number = isinstance(given, bool | int | float) or paths.is_array(given)
    if is_number and (tree is None or tree.paths != ((),)):
        raise ValueError(
            f"{name} must be a tree or a function of the params, got {shown(given)}. "
            "optax.inject_hyperparams calls every function as a schedule, unless it is "
            f"given static_args=({name!r},)"
        )


def is_patterns(entries: Any, tree: PathedTree) -> bool:
    """Distinguishes patterns from a tree, or a prefix of one, with params' keys."""
    is_named = isinstance(entries, Mapping) and all(isinstance(x, str) for x in entries)
    if not is_named or not entries:
        return False
    # A mapping of names is patterns of paths, or a tree whose first keys are modules. A
    # key that is no module's and is written as a pattern shows patterns. If no key is a
    # module's, the error of patterns is clearer. Keys that are leaves, but not all of
    # them, are patterns, since a tree has an entry for each.
    params = tree.rebuilt()
    keys = {*params} if isinstance(params, Mapping) else {p[0] for p in tree.paths if p}
    others = [key for key in entries if key not in keys]
    is_written_so = any(re.search(r"[*?\[/]", key) for key in others)
    is_of_leaves = {tuple(key.split("/")) for key in entries} <= {*tree.paths}
    is_part = is_of_leaves and not keys <= entries.keys()
    return is_written_so or is_part or len(others) == len(entries)


def by_pattern(
    patterns: Mapping[str, Any], tree_paths: Sequence[Path]
) -> dict[Path, Any]:
    """Returns the entry of each path that patterns match, of the longest of them.

    A pattern matches a path or the beginning of one, a module; `*` stands for slashes
    too. A name as it is written matches itself, brackets and all.

    **Raises:** `ValueError` for entries of another kind, and for patterns that match
    nothing.
    """
    for pattern, entry in patterns.items():
        is_numbers = entry is None or is_axes(entry)
        if not is_numbers and not (isinstance(entry, str) and entry == AUTOMATIC):
            raise ValueError(
                f"dimension_numbers of '{pattern}' is {entry!r}; expected "
                "optax.contrib.MuonDimensionNumbers, mc.MatrixAxes, None for AdamW, or "
                "'auto'"
            )
    entry_of: dict[Path, Any] = {}
    unused = dict.fromkeys(patterns)
    for path in tree_paths:
        # The whole path and every module around it: a pattern of a module is one of all
        # its leaves. Names are compared first, since `fnmatch` reads the brackets of
        # `layers[0]` as a set of letters.
        starts = ["/".join(path[:n]) for n in range(len(path), 0, -1)]
        hits = [
            pattern
            for pattern in patterns
            if any(x == pattern or fnmatch.fnmatchcase(x, pattern) for x in starts)
        ]
        if hits:
            entry_of[path] = patterns[max(hits, key=len)]
            unused = dict.fromkeys(x for x in unused if x not in hits)
    if unused:
        example = show(next(iter([*entry_of, *tree_paths]), ()))
        raise ValueError(
            "dimension_numbers: no parameter matches "
            f"{', '.join(map(repr, unused))}. Patterns match whole paths, such as "
            f"{example!r}; '*' stands for any characters, including slashes"
        )
    return entry_of


def broadcast(
    prefix: Any,
    tree: PathedTree,
    *,
    name: str,
    is_entry: Callable[[Any], bool],
    expected: str,
    remedy: str = "",
) -> list[Any]:
    """Returns for every leaf the entry at its path, or else at a module above it.

    Paths rather than tree structure, since `nnx.Optimizer` hands `init` a state and
    `update` plain dicts. `name`, `expected` and `remedy` are for the messages.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or paths.is_masked(x) or is_entry(x)

    spec = paths.flatten(prefix, is_leaf=is_leaf)
    entries = dict(spec.rows())
    for path, entry in entries.items():
        if not is_leaf(entry):
            got = shown(entry) if paths.is_array(entry) else repr(entry)
            raise ValueError(
                f"{name} at '{show(path)}' is {got}; it must be {expected} or None"
            )
    # A `None` may also be a parameter that is absent, such as the bias of a layer
    # without one.
    leaf_at, leaf_entries, missing = tree.by_path(), [], []
    unused = [path for path, entry in entries.items() if entry is not None]
    used: set[Path] = set()
    for path in tree.paths:
        starts = [path[:n] for n in range(len(path) + 1) if path[:n] in entries]
        used.update(starts)
        leaf_entries.append(entries[starts[-1]] if starts else None)
        # A mask may hide a module as a whole, and entries are below it.
        missing += [] if starts or leaf_at.hides(path) else [path]
    if missing:
        raise ValueError(f"{name} has no entry for {paths.show_all(missing)}{remedy}")
    unused = [x for x in unused if x not in used and not leaf_at.hides(x)]
    if tree.paths and unused:
        raise ValueError(
            f"{name} names {paths.show_all(unused)}, but no parameter has such a path"
        )
    return leaf_entries
