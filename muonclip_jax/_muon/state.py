"""State that lies as the params do, wherever that is known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.typing import DTypeLike

from .._mesh.zeros import Sizes, zeros_like_params
from .leaves import Leaves


class StatePart(NamedTuple):
    """A part of the state of one leaf: an array of its shape but for some sizes."""

    dtype: DTypeLike
    sizes: Sizes


def zeros_like(
    params: optax.Params, leaves: Leaves, *dtypes: DTypeLike | None
) -> list[Any]:
    """A tree of zeros like the params for each dtype.

    Remembers how the params lie, for updates that cannot see it.
    """
    tree, owners = leaves.tree, leaves.tree.of(params)
    placement = leaves.placement(owners)
    leaves.layouts.remember(tree.paths, owners, placement)
    return [
        tree.unflatten(zeros_like_params(owners, placement, [dtype] * len(owners)))
        for dtype in dtypes
    ]


def zero_parts(
    params: optax.Params, leaves: Leaves, parts: Sequence[tuple[int, StatePart]]
) -> list[jax.Array]:
    """Zeros for parts of the leaves with these numbers."""
    owners = leaves.tree.of(params)
    placement = leaves.placement(owners)
    if placement is not None:
        specs = tuple(placement.specs[i] for i, _ in parts)
        placement = placement._replace(specs=specs)
    return zeros_like_params(
        [owners[i] for i, _ in parts],
        placement,
        [part.dtype for _, part in parts],
        [part.sizes for _, part in parts],
    )
