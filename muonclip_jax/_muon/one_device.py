"""Orthogonalization where every matrix is at hand: stack by stack, batch by batch."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._matrices.stacks import plan_stacks, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver


def orthogonalize_on_one_device(
    solver: Solver, leaves: Sequence[jax.Array], *, views: Sequence[MatrixView]
) -> list[jax.Array]:
    iterate = {"cpu": _on_cpu, "gpu": _on_gpu, "tpu": _on_tpu}[solver.platform]
    on_tpu, on_cpu = solver.platform == "tpu", solver.platform == "cpu"
    # On TPU tall matrices are iterated as they lie: to turn one is a copy in float32.
    views = views if on_tpu else [view.wide for view in views]
    results: list[Any] = list(leaves)
    plan = plan_stacks(leaves, views, *solver.most_stacked)
    for stacks in _in_turns(solver, plan):
        iterated = iterate(solver, stacks, leaves)
        for stack, matrices in zip(stacks, iterated, strict=True):
            stack.scatter(matrices, results, on_cpu=on_cpu)
    return results


def _in_turns(solver: Solver, plan: Sequence[Stack]) -> Iterator[list[Stack]]:
    """Stacks that are iterated together: those of one kind, if they are small."""
    waiting: dict[tuple, list[Stack]] = {}
    for stack in plan:
        is_large = solver.is_large(stack.shape, stack.count)
        kind = stack.shape, stack.dtype, is_large
        waiting.setdefault(kind, []).append(stack)
        if is_large or len(waiting[kind]) == solver.turns:
            yield waiting.pop(kind)
    yield from waiting.values()


def _on_cpu(solver, stacks: Sequence[Stack], leaves: Sequence[jax.Array]):
    # A matrix goes through all of it in the caches, in a program that does not grow
    # with the number of leaves.
    gathered = [stack.gather(leaves, MatrixView.to_matrices) for stack in stacks]
    return [solver.map(solver.orthogonalize, x) for x in gathered]


def _on_gpu(solver, stacks: Sequence[Stack], leaves: Sequence[jax.Array]):
    # Preparation fuses with what made the leaf, and with putting leaves together.
    gathered = [
        solver.prepare(*[view.to_matrices(leaves[leaf]) for leaf, view in stack.parts])
        for stack in stacks
    ]
    return [solver.map(solver.iterate, x) for x in gathered]


def _on_tpu(solver, stacks: Sequence[Stack], leaves: Sequence[jax.Array]):
    if solver.is_large(stacks[0].shape, stacks[0].count):
        gathered = [stack.gather(leaves, MatrixView.to_matrices) for stack in stacks]
        return [solver.map(solver.orthogonalize, x) for x in gathered]
    # Preparation fuses with what made the leaf.
    prepare = functools.partial(_prepare, solver)
    return solver.iterate(*[stack.gather(leaves, prepare) for stack in stacks])


@functools.partial(jax.jit, static_argnames="view")
def _prepare(solver: Solver, view: MatrixView, leaf: jax.Array) -> jax.Array:
    return solver.prepare(view.to_matrices(leaf))
