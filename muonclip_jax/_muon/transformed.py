"""What `jax.vmap` and `jax.grad` make of orthogonalization on a mesh.

Its exchanges and its loops of unknown length know neither.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._matrices.view import MatrixView
from .._newton_schulz.explicit_axes import on_whole_leaves
from .._newton_schulz.solver import Solver
from .one_device import orthogonalize_on_one_device


Views = Sequence[MatrixView]
Specs = Sequence[PartitionSpec] | None
Route = Callable[[Solver, list[jax.Array]], list[jax.Array]]


def transformable(
    route: Callable[..., list[jax.Array]], views: Views, specs: Specs
) -> Route:
    """`route(solver, leaves, views=..., specs=...)`, with a derivative and batches.

    A batch is one more axis of matrices. The derivative is that of one device, in a
    program that the compiler partitions.
    """
    on_one_device = functools.partial(orthogonalize_on_one_device, views=views)

    def whole(solver, leaves):
        return on_whole_leaves(functools.partial(on_one_device, solver), leaves)

    @jax.custom_batching.custom_vmap
    def function(solver, leaves):
        try:
            return route(solver, leaves, views=views, specs=specs)
        except NameError as error:
            if "unbound axis" not in str(error):
                raise
            # `vmap` over what an explicit axis cuts takes that axis of the mesh away,
            # and the devices along it hold different runs.
            return whole(solver, leaves)

    @function.def_vmap
    def batched(count, in_batched, solver, leaves):
        solver_batched, leaves_batched = in_batched
        if any(jax.tree.leaves(solver_batched)):
            axes = jax.tree.map(lambda x: 0 if x else None, in_batched)
            results = jax.vmap(on_one_device, axes)(solver, leaves)
            return results, [True] * len(results)
        stacked = [
            x if is_batched else jnp.broadcast_to(x, (count, *x.shape))
            for x, is_batched in zip(leaves, leaves_batched, strict=True)
        ]
        in_stacks = [_in_stack(view, count) for view in views]
        cuts = specs and [
            PartitionSpec(_first_cut(x), *spec)
            for x, spec in zip(stacked, specs, strict=True)
        ]
        results = transformable(route, in_stacks, cuts)(solver, stacked)
        return results, [True] * len(results)

    return differentiable(function, whole)


def differentiable(function: Route, on_one_device: Route) -> Route:
    """`function(solver, leaves)` with the derivative of what one device does."""
    result = jax.custom_jvp(lambda solver, leaves: function(solver, leaves))

    @result.defjvp
    def derivative(primals, tangents):
        solver, leaves = primals
        _, directions = jax.jvp(
            functools.partial(on_one_device, solver), (leaves,), (tangents[1],)
        )
        return result(solver, leaves), directions

    return result


def _in_stack(view: MatrixView, count: int) -> MatrixView:
    axes = {
        name: tuple(axis + 1 for axis in getattr(view, name))
        for name in ("batch", "reduction", "output")
    }
    axes["batch"] = (0, *axes["batch"])
    return dataclasses.replace(view, **axes, shape=(count, *view.shape))


def _first_cut(x: Any) -> Any:
    """How explicit axes cut the first axis."""
    return jax.typeof(x).sharding.spec[0]
