"""Orthogonalization where every matrix is at hand: stack by stack, batch by batch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .._matrices.stacks import plan_stacks, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver


def orthogonalize_on_one_device(
    solver: Solver, leaves: Sequence[jax.Array], *, views: Sequence[MatrixView]
) -> list[jax.Array]:
    results: list[Any] = list(leaves)
    on_cpu = solver.platform == "cpu"
    for stack in plan_stacks(leaves, views, solver.stack_entries):
        iterated = _iterate(solver, stack, leaves)
        stack.scatter(iterated, MatrixView.from_wide, results, on_cpu=on_cpu)
    return results


def _iterate(solver: Solver, stack: Stack, leaves: Sequence[jax.Array]) -> jax.Array:
    if solver.platform == "cpu":
        # A matrix goes through all of it in the caches, in a program that does not
        # grow with the number of leaves.
        return solver.map(
            solver.orthogonalize, stack.gather(leaves, MatrixView.to_wide)
        )

    # Elsewhere preparation fuses with what made the leaf, and on GPU with putting
    # leaves together.
    if solver.platform == "gpu":
        parts = [part.view.to_wide(leaves[part.leaf]) for part in stack.parts]
        return solver.map(solver.iterate, solver.prepare(*parts))
    prepared = stack.gather(leaves, functools.partial(_prepare, solver))
    return solver.map(solver.iterate, prepared)


@functools.partial(jax.jit, static_argnames="view")
def _prepare(solver: Solver, view: MatrixView, leaf: jax.Array) -> jax.Array:
    return solver.prepare(view.to_wide(leaf))
