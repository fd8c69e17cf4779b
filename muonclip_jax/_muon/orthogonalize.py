"""Orthogonalizes leaves of matrices, wherever they are: four ways, one choice."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._axes import explicit_spec, on_automatic_axes, on_whole_leaves
from .._layout.layout import Layout, on_whole_blocks
from .._layout.shardings import Place
from .._matrices.pieces import divide
from .._matrices.stacks import MatrixView, plan_stacks, Stack
from .._mesh.by_constraint import orthogonalize_by_constraint
from .._mesh.on_mesh import orthogonalize_by_replicas, orthogonalize_on_mesh
from .._newton_schulz.platforms import STACK_LEAVES
from .._newton_schulz.solver import Solver


#: From a solver and leaves to the leaves, orthogonal.
Route = Callable[[Solver, list[jax.Array]], list[jax.Array]]


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
    def alone(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        """Every device by itself, for leaves that explicit axes of a mesh may shard."""
        # With automatic axes, or none, this changes nothing.
        of_whole = functools.partial(on_one_device, solver, views=views)
        return on_whole_leaves(of_whole, leaves)

    # Derivatives go through the plain program on all four ways: exchanges and loops of
    # a length known at run time have none.
    if place.kind == "one device":
        route = alone
    elif place.kind == "manual":
        # Devices that mapped axes tell apart: replicas, or holders of blocks.
        together = functools.partial(
            orthogonalize_by_replicas, views=views, cuts=place.specs, axes=place.axes
        )

        def by_replicas(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
            specs = [explicit_spec(x) for x in leaves]
            return on_automatic_axes(together, solver, leaves, results=specs)

        route = _differentiable(
            by_replicas, functools.partial(on_whole_blocks, alone, place.specs)
        )
    elif place.kind == "unknown":
        # Automatic axes, and nobody says how they shard the leaves.
        by_constraint = functools.partial(
            orthogonalize_by_constraint, views=views, mesh=place.mesh
        )
        route = _differentiable(by_constraint, alone)
    else:
        on_mesh = functools.partial(
            orthogonalize_on_mesh, views=views, mesh=place.mesh, specs=place.specs
        )
        route = _differentiable(on_mesh, alone)
    return solver.on_its_platform(route, leaves)


def on_one_device(
    solver: Solver, leaves: Sequence[jax.Array], *, views: Sequence[MatrixView]
) -> list[jax.Array]:
    """Orthogonalizes leaves where every matrix is at hand, stack by stack."""
    platform, pieces = solver.its_platform, divide(leaves, views)
    leaves, views = pieces.arrays, pieces.views
    # On TPU a tall matrix is iterated as it is: to turn it is a copy in float32.
    views = views if platform.name == "tpu" else [view.wide for view in views]
    results: list[Any] = list(leaves)
    plan = plan_stacks(leaves, views, platform.stack_entries, STACK_LEAVES)
    for stacks, are_large in _in_turns(solver, plan):
        if are_large:
            # Batch by batch: a matrix goes through all of it in the caches, or at least
            # no more of them are prepared than are iterated.
            gathered = [
                stack.gather(leaves, MatrixView.to_matrices) for stack in stacks
            ]
            iterated = [solver.map(solver.orthogonalize, x) for x in gathered]
        else:
            # Preparation fuses with what made the leaves, and with a stack of them.
            iterated = solver.iterate(
                *[
                    solver.prepare(*[v.to_matrices(leaves[i]) for i, v in stack.parts])
                    for stack in stacks
                ]
            )
        for stack, matrices in zip(stacks, iterated, strict=True):
            stack.scatter(matrices, results, on_cpu=platform.name == "cpu")
    return pieces.unite(results)


def _in_turns(
    solver: Solver, plan: Sequence[Stack]
) -> Iterator[tuple[list[Stack], bool]]:
    """Stacks that are iterated together, and whether they are large.

    Large is what has more matrices than are iterated at once.
    """
    # On TPU two, which take turns at the matrix units; elsewhere each goes alone. A
    # large one goes alone in any case: its batches take turns with each other.
    waiting: dict[Any, list[Stack]] = {}
    for stack in plan:
        is_large = stack.count > solver.batch_size(stack.shape)
        kind = stack.shape, stack.dtype, is_large
        waiting.setdefault(kind, []).append(stack)
        if is_large or len(waiting[kind]) == solver.its_platform.turns:
            yield waiting.pop(kind), is_large
    for stacks in waiting.values():
        yield stacks, False


def _differentiable(route: Route, alone: Route) -> Route:
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
