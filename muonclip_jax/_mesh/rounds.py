"""Rounds: while some matrices are iterated, the next arrive and the last return.

All devices own the slots, so that none waits for another that has more to do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._matrices.stacks import Stack
from .._newton_schulz.solver import Solver
from .exchange import Slots
from .shared_stacks import SharedStack
from .waiting import wait_for, zero_after


def fetch_first(
    solver: Solver, shared: SharedStack, blocks: jax.Array
) -> list[jax.Array]:
    """The matrices of the first round, or none where there are no rounds."""
    if not shared.rounds(solver).number:
        return []
    return _fetch(solver, shared, blocks, 0)


def iterate_in_rounds(
    solver: Solver,
    shared: SharedStack,
    first: list[jax.Array],
    blocks: jax.Array,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Iterates the first slots of a stack, whose blocks take the places of the old.

    It begins when `zero` is known; the one that it returns is when all is iterated.
    """
    rounds = shared.rounds(solver).number
    if not rounds:
        return blocks, zero
    orthogonalize = as_they_travel(solver, shared.stack, blocks.dtype)

    def one_round(number: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        here, iterated, blocks = carry
        following = _fetch(solver, shared, blocks, number + 1)
        # Said to be needed there, so that it is read before others are written.
        blocks = wait_for(zero_after(following), blocks)
        blocks = _bring_back(solver, shared, iterated, blocks, number - 1)
        return following, [*orthogonalize(*here)], blocks

    nothing = [jax.lax.empty(x.shape, x.dtype) for x in first]
    carry = [wait_for(zero, batch) for batch in first], nothing, blocks
    _, iterated, blocks = jax.lax.fori_loop(0, rounds, one_round, carry)
    blocks = _bring_back(solver, shared, iterated, blocks, rounds - 1)
    return blocks, zero_after(iterated)


def _fetch(
    solver: Solver, shared: SharedStack, blocks: jax.Array, number: jax.Array | int
) -> list[jax.Array]:
    return [
        shared.exchange.to_owners(blocks, slots)
        for slots in _slots(solver, shared, number)
    ]


def _bring_back(
    solver: Solver,
    shared: SharedStack,
    batches: Sequence[jax.Array],
    blocks: jax.Array,
    number: jax.Array | int,
) -> jax.Array:
    slots = _slots(solver, shared, number)
    for batch, each in zip(batches, slots, strict=True):
        blocks = shared.exchange.to_sources(batch, each, blocks)
    return blocks


def _slots(solver: Solver, shared: SharedStack, number: jax.Array | int) -> list[Slots]:
    """Of a round; before the first slot, where nobody owns any, if there is no such."""
    rounds, size = shared.rounds(solver)
    first = jnp.where(number < rounds, number, -1) * size * solver.turns
    return [Slots(first + size * turn, size) for turn in range(solver.turns)]


def as_they_travel(
    solver: Solver, stack: Stack, dtype: jnp.dtype
) -> Callable[..., Sequence[jax.Array]]:
    """Orthogonalizes batches of a stack from and to the dtype in which they travel.

    The dtype of the iteration follows from that of the leaf, not of the wire.
    """

    def orthogonalize(*batches: jax.Array) -> list[jax.Array]:
        leaves = [x.astype(stack.dtype) for x in batches]
        return [y.astype(dtype) for y in solver.orthogonalize(*leaves)]

    return orthogonalize
