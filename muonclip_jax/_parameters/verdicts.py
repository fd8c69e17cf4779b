"""What each leaf of a tree is found to be, and the error where nothing tells."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from . import names, paths
from .leaf_rules import Ambiguous, LeafRules, Verdict
from .module_stacks import ModuleStacks
from .patterns import AUTOMATIC, by_pattern, write_patterns
from .spelled import spell, Spelled
from .stack_axes import IN_FRONT, StackAxes


#: What to say to a transformation that sees but a part of the params.
BEFORE_THE_MASK = "dimension_numbers=mc.flax_dimension_numbers(params)"


def find_verdicts(
    tree: paths.PathedTree,
    *,
    per_head: bool = False,
    stack_axes: StackAxes = IN_FRONT,
    patterns: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """One for each leaf: what a pattern says, or else the evidence in the tree.

    **Raises:** `ValueError` that lists the leaves of which neither tells.
    """
    rules = _Rules(tree, per_head, stack_axes)
    given = by_pattern(patterns, tree.paths) if patterns else {}
    found: dict[int, Verdict] = {}
    open_leaves: dict[int, Ambiguous] = {}
    for i, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        if paths.is_masked(leaf):
            found[i] = Verdict(None, "hidden")
        elif given.get(path, AUTOMATIC) != AUTOMATIC:
            found[i] = Verdict(given[path], "given")
        elif not jnp.issubdtype(leaf.dtype, jnp.inexact):
            found[i] = Verdict(None, "no floats")
        else:
            try:
                found[i] = rules.verdict(path)
            except Ambiguous as error:
                open_leaves[i] = error
    if open_leaves:
        raise ValueError(_message(tree, found, open_leaves))
    return [found[i] for i in range(len(tree.paths))]


def find_evidence(tree: paths.PathedTree) -> list[Verdict | None]:
    """For each leaf what names and shapes say, whatever is given; `None` if nothing."""
    rules = _Rules(tree, per_head=False, stack_axes=IN_FRONT)

    def evidence(path: paths.Path, leaf: Any) -> Verdict | None:
        if paths.is_masked(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return None
        try:
            return rules.verdict(path)
        except Ambiguous:
            return None

    return list(map(evidence, tree.paths, tree.leaves))


def spelled_leaves(
    stacks: ModuleStacks, leaf_paths: Iterable[paths.Path]
) -> dict[paths.Path, Spelled]:
    """Every leaf as Flax would have it, one layer of a stack, by its own path."""
    leaf_paths = list(leaf_paths)
    axes = {p: stacks.of(p).others(len(stacks.shape(p))) for p in leaf_paths}
    stacked = {path for path in leaf_paths if stacks.of(path).depth}
    return spell({path: stacks.layer(path) for path in leaf_paths}, axes, stacked)


class _Rules:
    """The rules for one tree, and the stacks that were found in it."""

    def __init__(self, tree: paths.PathedTree, per_head: bool, stack_axes: StackAxes):
        leaf_at = tree.by_path()
        self._stacks = ModuleStacks(stack_axes, leaf_at)
        # A mask of matrices hides vectors, and heads beside them.
        hidden = (path for path, x in leaf_at.items() if paths.is_masked(x))
        self._rules = LeafRules(
            spelled_leaves(self._stacks, leaf_at),
            per_head=per_head,
            is_whole=not any(map(names.is_vector, hidden)),
        )

    def verdict(self, path: paths.Path) -> Verdict:
        found, stack = self._rules.verdict(path), self._stacks.of(path)
        if not stack.depth or found.numbers is None:
            return found
        sizes = " x ".join(map(str, stack.sizes(self._stacks.shape(path))))
        return found._replace(
            why=f"{found.why}; stack of {sizes} at axis {stack.start}"
        )


def _message(
    tree: paths.PathedTree,
    found: Mapping[int, Verdict],
    open_leaves: Mapping[int, Ambiguous],
) -> str:
    listing = [_line(tree, i) for i in open_leaves]
    guesses = {tree.paths[i]: error.guess for i, error in open_leaves.items()}
    unsure = [
        f"{'adamw' if verdict.numbers is None else 'muon'} for {_line(tree, i)}: "
        f"{verdict.why}"
        for i, verdict in found.items()
        if not verdict.is_sure
    ]
    is_masked = any(map(paths.is_masked, tree.leaves))
    mask = [
        f"A mask hides leaves that may tell. Decide on all params: {BEFORE_THE_MASK}. "
        "Or say it here:"
    ]
    aside = ["Decided with little evidence:", *_indented(unsure)] if unsure else []
    return "\n".join(
        [
            "cannot tell which axes of these leaves form matrices:",
            *_indented(listing),
            *(mask if is_masked else []),
            "Say it by dimension_numbers. This mapping is a guess to check: reduction "
            "axes, then output axes; all other axes are a stack of matrices; None is "
            "AdamW. Leaves that no pattern matches are found as before:",
            "",
            "from optax.contrib import MuonDimensionNumbers",
            f"dimension_numbers = {write_patterns(guesses, tree.paths)}",
            *([""] if aside else []),
            *aside,
        ]
    )


def _line(tree: paths.PathedTree, i: int) -> str:
    return f"{paths.show(tree.paths[i])} {tuple(tree.leaves[i].shape)}"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
