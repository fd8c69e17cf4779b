"""Rounds: while some matrices are iterated, the next arrive and the last return.

All devices own the slots, so that none waits for another that has more to do. Both
exchanges of a round write where something lay that was read before: the next matrices
arrive where the present ones lay, and results replace those that left.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._newton_schulz.solver import Solver
from .._newton_schulz.waiting import wait_for, zero_after
from .exchange import Slots
from .ragged_exchange import RaggedExchange
from .shared_stacks import SharedStack


class UnderWay(NamedTuple):
    """What is there when a round begins."""

    here: jax.Array  # the matrices to iterate
    iterated: jax.Array  # those of the round before
    blocks: jax.Array  # of all matrices of the stack


def fetch_first(
    solver: Solver, shared: SharedStack, blocks: jax.Array
) -> list[jax.Array]:
    """The matrices of the first round, or none where there are no rounds."""
    if not shared.rounds(solver).number:
        return []
    return [shared.exchange.to_owners(blocks, _slots(solver, shared, 0))]


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
    (here,) = first
    nothing = jax.lax.empty(here.shape, here.dtype)
    _, iterated, blocks = jax.lax.fori_loop(
        0,
        rounds,
        lambda number, state: _one_round(solver, shared, number, state),
        UnderWay(wait_for(zero, here), nothing, blocks),
    )
    last = _slots(solver, shared, rounds - 1)
    return shared.exchange.to_sources(iterated, last, blocks), zero_after([iterated])


def _one_round(
    solver: Solver, shared: SharedStack, number: jax.Array, state: UnderWay
) -> UnderWay:
    """Each wait is for what was read, so that nothing is kept twice."""
    here, iterated, blocks = state
    exchange = shared.exchange
    assert isinstance(exchange, RaggedExchange)
    batches = jnp.split(here, solver.turns)
    prepared = [solver.prepare(x.astype(shared.stack.dtype)) for x in batches]
    here = wait_for(zero_after(prepared), here)
    here = exchange.to_owners(blocks, _slots(solver, shared, number + 1), here)
    arrived = zero_after([here])
    blocks = wait_for(arrived, blocks)
    last = _slots(solver, shared, number - 1)
    blocks = exchange.to_sources(iterated, last, blocks)
    iterated = wait_for(zero_after([blocks]), iterated)
    done = solver.iterate(*prepared, halfway=arrived)
    for turn, batch in enumerate(done):
        # In place: joined, they would be written once more.
        iterated = jax.lax.dynamic_update_slice_in_dim(
            iterated, batch.astype(iterated.dtype), turn * len(batch), axis=0
        )
    return UnderWay(here, iterated, blocks)


def _slots(solver: Solver, shared: SharedStack, number: jax.Array | int) -> Slots:
    """Of a round; before the first slot, where nobody owns any, if there is no such."""
    rounds, size = shared.rounds(solver)
    of_round = size * solver.turns
    return Slots(jnp.where(number < rounds, number, -1) * of_round, of_round)
