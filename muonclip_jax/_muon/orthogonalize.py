"""Orthogonalizes leaves on one device, on a mesh, on mapped axes, or wherever XLA has
put them."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._layout.layout import AxisNames, Layout, on_whole_blocks, Place
from .._layout.shardings import PlacedLeaf
from .._matrices.pieces import divide
from .._matrices.stacks import MatrixLeaf, plan_stacks, zero_after
from .._mesh.by_constraint import orthogonalize_by_constraint
from .._mesh.on_mesh import orthogonalize_by_replicas, orthogonalize_on_mesh
from .._mesh_axes import explicit_spec, on_automatic_axes, on_whole_leaves
from .._newton_schulz.solver import Solver


def orthogonalize(
    solver: Solver, leaves: Sequence[PlacedLeaf], layout: Layout, slow: AxisNames = ()
) -> list[PlacedLeaf]:
    """Orthogonalizes every leaf that has a view; others pass through.

    Matrices of one shape share a stack, whichever leaves they come from. On a mesh its
    devices share the work, and so do replicas along mapped axes and devices that hold
    blocks of leaves inside `jax.shard_map`, but along `slow` axes all that have copies
    do it. Results are float32 or wider.
    """
    # Each place has a program under `jit` of its own, so that eager updates, and other
    # transformations of the same leaves, find it again.
    results = list(leaves)
    for place, chosen in layout.places(leaves, slow):
        arrays = _at_one_place(solver, [*chosen.values()], place)
        for i, x in zip(chosen, arrays, strict=True):
            results[i] = leaves[i]._replace(array=x)
    return results


@functools.partial(jax.jit, static_argnames="place")
def _at_one_place(
    solver: Solver, leaves: list[MatrixLeaf], place: Place
) -> list[jax.Array]:
    """Orthogonalizes leaves of one place by the route for its kind."""

    def alone(solver: Solver, leaves: list[MatrixLeaf]) -> list[jax.Array]:
        """Every device orthogonalizes whole leaves."""
        on_device = functools.partial(on_one_device, solver)
        # With automatic axes, or none, `on_whole_leaves` changes nothing.
        whole = functools.partial(on_whole_leaves, on_device)
        if place.kind == "manual":
            return on_whole_blocks(whole, leaves)
        return whole(leaves)

    def together(solver: Solver, leaves: list[MatrixLeaf]) -> list[jax.Array]:
        if place.kind == "mesh":
            # Blocks are sent to the owners of matrices by a plan.
            return orthogonalize_on_mesh(solver, leaves, place.mesh, place.slow)
        if place.kind == "unknown":
            # Only the compiler knows where blocks are, so it has to send them.
            return orthogonalize_by_constraint(solver, leaves, place.mesh, place.slow)
        # Devices of mapped axes are replicas, or hold blocks.
        by_replicas = functools.partial(
            orthogonalize_by_replicas, axes=place.axes, slow=place.slow
        )
        specs = [explicit_spec(leaf.array) for leaf in leaves]
        return on_automatic_axes(by_replicas, solver, leaves, results=specs)

    if place.kind == "one device":
        return solver.on_its_platform(alone, leaves)
    # Derivatives go through the plain program: exchanges and loops of a length known at
    # run time have none.
    return solver.on_its_platform(_differentiable(together, alone), leaves)


def on_one_device(solver: Solver, leaves: Sequence[MatrixLeaf]) -> list[jax.Array]:
    """Orthogonalizes leaves where every matrix is at hand, stack by stack."""
    pieces, unite = divide(leaves)
    platform = solver.platform
    if platform.turns_tall and solver.commutes_with_transposition:
        pieces = [dataclasses.replace(x, view=x.view.wide) for x in pieces]
    results: list[Any] = list(pieces)
    done: list[jax.Array] = []
    alike: collections.Counter[int] = collections.Counter()  # stacks, by short side
    for stack in plan_stacks(enumerate(pieces), platform.stack_entries):
        dtype = np.promote_types(stack.dtype, jnp.float32)
        parts = stack.gather(dtype)
        if done and platform.waits:
            zero = zero_after(done[-1:]).astype(dtype)
            parts = [x + zero for x in parts]
        if stack.count > solver.batch_size(stack.shape, stack.count):
            # Batch by batch: no more matrices are prepared than are iterated.
            done.append(solver.orthogonalize_all(jnp.concatenate(parts)))
        else:
            # Preparation fuses with the momentum, and with joining the stack.
            stack_solver = solver.of_stack(alike[min(stack.shape)])
            done.append(stack_solver.iterate(solver.prepare(*parts)))
        alike[min(stack.shape)] += 1
        stack.scatter(done[-1], results)
    return unite(results)


def _differentiable(
    route: Callable[..., list[jax.Array]], alone: Callable[..., list[jax.Array]]
) -> Callable[..., list[jax.Array]]:
    """Gives `route` the derivative of `alone`, which XLA partitions."""
    result = jax.custom_jvp(lambda solver, leaves: route(solver, leaves))

    # A forward rule serves both modes, since JAX transposes what is linear in the
    # tangents.
    @result.defjvp
    def derivative(primals, tangents):
        solver, leaves = primals
        _, directions = jax.jvp(
            functools.partial(alone, solver), (leaves,), (tangents[1],)
        )
        return result(solver, leaves), directions

    return result
