"""A tree of settings for parameters, or a prefix of one, spread over the leaves."""

from collections.abc import Callable
from typing import Any

from . import paths


def broadcast(
    prefix: Any,
    tree: paths.PathedTree,
    *,
    name: str,
    is_entry: Callable[[Any], bool],
    expected: str,
    remedy: str = "",
) -> list[Any]:
    """Gives every leaf the entry whose path begins its own.

    Paths rather than tree structure, since `nnx.Optimizer` hands `init` a state and
    `update` plain dicts. The rest is for the messages: what the user calls the tree,
    what an entry may be besides `None`, and what to do about entries that are missing.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or paths.is_masked(x) or is_entry(x)

    spec = paths.flatten(prefix, is_leaf=is_leaf)
    for path, entry in zip(spec.paths, spec.leaves, strict=True):
        if not is_leaf(entry):
            raise ValueError(
                f"{name} at '{paths.show(path)}' is {entry!r}; it must be {expected} "
                "or None"
            )
    entries = dict(zip(spec.paths, spec.leaves, strict=True))
    leaf_at = tree.by_path()
    used, found, missing = set(), [], []
    for path in tree.paths:
        starts = [path[:n] for n in range(len(path) + 1) if path[:n] in entries]
        used.update(starts)
        found.append(entries[starts[-1]] if starts else None)
        # A mask may hide a module as one, and its entries are then below.
        missing += [] if starts or leaf_at.hides(path) else [path]
    if missing:
        raise ValueError(f"{name} has no entry for {paths.show_all(missing)}{remedy}")
    # A `None` may also be a parameter that is absent, such as the bias of a layer
    # without one.
    unused = [
        path
        for path, entry in entries.items()
        if entry is not None and path not in used and not leaf_at.hides(path)
    ]
    if tree.paths and unused:
        raise ValueError(
            f"{name} names {paths.show_all(unused)}, but no parameter has such a path"
        )
    return found
