"""Matrices that explicit axes of a mesh cut, put together and cut again.

A product of cut sides has no sharding of its own, which is an error there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def on_whole_leaves(function: Callable[[Any], list], leaves: list) -> list:
    """Applies a function from leaves to as many to whole ones, and cuts the results."""
    shardings = [jax.typeof(x).sharding for x in leaves]
    results = function([_lay(x, PartitionSpec()) for x in leaves])
    return [_lay(x, s.spec) for x, s in zip(results, shardings, strict=True)]


def on_automatic_axes(function: Callable[[Any], list], leaves: list) -> list:
    """Applies a function from leaves to as many where XLA shards what is explicit.

    Results are sharded as the leaves are.
    """
    shardings = [jax.typeof(x).sharding for x in leaves]
    mesh = next((s.mesh for s in shardings if s.mesh.explicit_axes), None)
    if mesh is None:
        return function(leaves)
    automatic: Any = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=shardings
    )
    return automatic(leaves)


def on_whole_matrices(
    function: Callable[[Any, jax.Array], jax.Array], argument: Any, x: jax.Array
) -> jax.Array:
    """`function(argument, x)` for `(..., m, n)`; devices keep the stacks they have."""
    sharding = jax.typeof(x).sharding
    *stack, _, _ = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    cuts = PartitionSpec(*stack)
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in stack if axes]
    if named:
        function = jax.shard_map(
            function,
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(), cuts),
            out_specs=cuts,
            axis_names={name for names in named for name in names},
            check_vma=False,
        )
    return _lay(function(argument, _lay(x, cuts)), sharding.spec)


def _lay(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    own = jax.typeof(x).sharding
    if not any(own.spec) and not any(spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(own.mesh, spec))
