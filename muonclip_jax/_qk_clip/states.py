"""States of transformations, found and checked in the state of an optimizer."""

from typing import Any

import jax


def states_in(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """The parts of an optimizer's state that are of a kind, the outermost of each."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def check_kind(state: Any, kind: type) -> None:
    """Raises for a state that another set-up of the optimizer made."""
    if not isinstance(state, kind):
        raise ValueError(
            f"expected a {kind.__name__}, got a {type(state).__name__}: the state was "
            "made by another set-up of the optimizer. Call init of this one, or load "
            "the state into what it returns"
        )
