"""Functions of arrays that explicit axes of a mesh shard.

With explicit axes every array has a sharding in its type, and a result without an
obvious one, such as that of a product along a sharded side, is an error. So the axes
are made automatic around such a function, or its arrays are gathered before it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def explicit_spec(x: Any) -> PartitionSpec:
    """The spec of an array by explicit axes; None along all others."""
    return jax.typeof(x).sharding.spec


def on_automatic_axes(
    function: Callable[..., Any], *arguments: Any, results: Any
) -> Any:
    """`function(*arguments)`, sharded inside by XLA; `results` are its specs."""
    # Some arguments may have no mesh: a traced scale, positions made by an arange.
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*arguments)
    # Specs alone would be looked up in the mesh that is set, and none need be.
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    automatic = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=placed
    )
    return automatic(*arguments)


def on_whole_leaves(function: Callable[[Any], list], leaves: list) -> list:
    """`function(leaves)` of whole leaves, by every device; results sharded as those."""
    if not any(jax.typeof(x).sharding.mesh.explicit_axes for x in leaves):
        return function(leaves)
    specs = [explicit_spec(x) for x in leaves]
    results = function([resharded(x, PartitionSpec()) for x in leaves])
    return [resharded(x, spec) for x, spec in zip(results, specs, strict=True)]


def on_whole_matrices(
    function: Callable[[Any, jax.Array], jax.Array], argument: Any, x: jax.Array
) -> jax.Array:
    """`function(argument, x)` for `(..., m, n)`; devices keep the stacks they have.

    Matrices of a stack need nothing of each other, so only their own axes are gathered.
    """
    spec, mesh = explicit_spec(x), jax.typeof(x).sharding.mesh
    *stack, _, _ = [*spec, *[None] * (x.ndim - len(spec))]
    cuts = PartitionSpec(*stack)
    # In shard_map a device works on its part of the stack. On automatic axes XLA would
    # gather it where a loop over batches slices the axis of the stack.
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in stack if axes]
    if named:
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(), cuts),
            out_specs=cuts,
            axis_names={name for names in named for name in names},
            check_vma=False,  # not every kernel inside says what its results vary over
        )
    return resharded(function(argument, resharded(x, cuts)), spec)


def resharded(
    x: jax.Array, spec: PartitionSpec, like: jax.Array | None = None
) -> jax.Array:
    """An array as explicit axes cut it by `spec`, on its own mesh or that of `like`."""
    own = jax.typeof(x).sharding
    # Without explicit axes there may be no mesh at all to name.
    if not any(own.spec) and not any(spec):
        return x
    mesh = own.mesh if like is None else jax.typeof(like).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))
