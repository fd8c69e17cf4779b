"""Orthogonalizes leaves of matrices, wherever they are: four ways, one choice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import explicit_spec, on_automatic_axes, on_whole_leaves
from .._layout.layout import Layout, on_whole_blocks
from .._layout.shardings import Place
from .._matrices.pieces import divide
from .._matrices.stacks import MatrixView, plan_stacks, zero_after
from .._mesh.by_constraint import orthogonalize_by_constraint
from .._mesh.on_mesh import orthogonalize_by_replicas, orthogonalize_on_mesh
from .._newton_schulz.solver import Solver


def orthogonalize(
    solver: Solver,
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    layout: Layout,
) -> list[jax.Array]:
    """Orthogonalizes every leaf that has a view; others pass through.

    Matrices of one shape share a stack, whichever leaves they come from. On a mesh its
    devices share the work, and so do replicas along mapped axes and devices that hold
    blocks of leaves inside `jax.shard_map`. Results are float32 or wider.
    """
    # One program for each place, compiled under `jit` of its own: an eager update, and
    # the same leaves in another transformation, find it again.
    results = list(leaves)
    for place, chosen in layout.places(leaves, [view is not None for view in views]):
        found = _at_one_place(
            solver,
            [leaves[i] for i in chosen],
            tuple(views[i] for i in chosen),
            place,
        )
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
    return results


@functools.partial(jax.jit, static_argnames=("views", "place"))
def _at_one_place(
    solver: Solver,
    leaves: list[jax.Array],
    views: tuple[MatrixView, ...],
    place: Place,
) -> list[jax.Array]:
    """Orthogonalizes leaves of one place by the route for its kind."""

    def alone(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        """Whole leaves on every device by itself."""
        on_device = functools.partial(on_one_device, solver, views=views)
        # With automatic axes, or none, `on_whole_leaves` changes nothing.
        whole = functools.partial(on_whole_leaves, on_device)
        if place.kind == "manual":
            return on_whole_blocks(whole, place.specs, leaves)
        return whole(leaves)

    def together(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        if place.kind == "mesh":
            # Blocks are sent to the owners of matrices by a plan, in two exchanges a
            # stack.
            return orthogonalize_on_mesh(
                solver, leaves, views=views, mesh=place.mesh, specs=place.specs
            )
        if place.kind == "unknown":
            # Only the compiler knows where blocks are, so it has to send them.
            return orthogonalize_by_constraint(
                solver, leaves, views=views, mesh=place.mesh
            )
        # Devices of mapped axes are replicas, or hold blocks.
        by_replicas = functools.partial(
            orthogonalize_by_replicas, views=views, cuts=place.specs, axes=place.axes
        )
        specs = [explicit_spec(x) for x in leaves]
        return on_automatic_axes(by_replicas, solver, leaves, results=specs)

    if place.kind == "one device":
        return solver.on_its_platform(alone, leaves)
    # Derivatives go through the plain program: exchanges and loops of a length known at
    # run time have none.
    return solver.on_its_platform(_differentiable(together, alone), leaves)


def on_one_device(
    solver: Solver, leaves: Sequence[jax.Array], *, views: Sequence[MatrixView]
) -> list[jax.Array]:
    """Orthogonalizes leaves where every matrix is at hand, stack by stack."""
    pieces = divide(leaves, views)
    leaves, views = pieces.arrays, pieces.views
    platform = solver.platform
    if platform.turns_tall and solver.commutes_with_transposition:
        views = [view.wide for view in views]
    results: list[Any] = list(leaves)
    done: list[jax.Array] = []
    for stack in plan_stacks(leaves, views, platform.stack_entries):
        dtype = np.promote_types(jnp.dtype(stack.dtype), jnp.float32)
        parts = [view.to_matrices(leaves[i]).astype(dtype) for i, view in stack.parts]
        if done and platform.waits:
            zero = zero_after(done[-1:]).astype(dtype)
            parts = [x + zero for x in parts]
        if stack.count > solver.batch_size(stack.shape):
            # Batch by batch: no more matrices are prepared than are iterated.
            done.append(solver.orthogonalize_all(jnp.concatenate(parts)))
        else:
            # Preparation fuses with what made the leaves, and with a stack of them.
            done.append(solver.iterate(solver.prepare(*parts)))
        stack.scatter(done[-1], results)
    return pieces.unite(results)


def _differentiable(
    route: Callable[..., list[jax.Array]], alone: Callable[..., list[jax.Array]]
) -> Callable[..., list[jax.Array]]:
    """`route` with the derivative of what one device does, which XLA partitions."""
    result = jax.custom_jvp(lambda solver, leaves: route(solver, leaves))

    # A forward rule serves both modes: what is linear in the tangents is transposed by
    # JAX. Where nothing is differentiated it costs nothing.
    @result.defjvp
    def derivative(primals, tangents):
        solver, leaves = primals
        _, directions = jax.jvp(
            functools.partial(alone, solver), (leaves,), (tangents[1],)
        )
        return result(solver, leaves), directions

    return result
