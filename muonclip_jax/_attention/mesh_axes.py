"""Axes of a mesh: manual ones that arrays vary over, and how explicit ones shard."""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from .._explicit_axes import explicit_spec
from .._jax_versions import manual_axes, varying


def vary_as(tree: Any, like: Any) -> Any:
    """Typed as varying over every manual axis that an array of `like` varies over.

    A loop carries arrays of one type. Transposed, this sums the gradient of what was
    the same on all devices.
    """
    axes = {axis for x in jax.tree.leaves(like) for axis in manual_axes(x)}
    return jax.tree.map(lambda x: varying(x, tuple(sorted(axes))), tree)


class Layout(NamedTuple):
    """How explicit axes shard results: as the query's axes of the same meaning."""

    output: PartitionSpec  # (batch..., length, heads, value_dim)
    log_total: PartitionSpec  # (batch..., heads, length)
    statistic: PartitionSpec  # (heads,)


def layout_of(query: jax.Array) -> Layout:
    *batch, length, heads, _ = explicit_spec(query)
    return Layout(
        PartitionSpec(*batch, length, heads, None),
        PartitionSpec(*batch, heads, length),
        PartitionSpec(heads),
    )
