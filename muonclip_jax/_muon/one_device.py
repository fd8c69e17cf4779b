"""Orthogonalization where every matrix is at hand: stack by stack, chunk by chunk."""

from collections.abc import Sequence

import jax

from .._matrices.stacks import plan_buckets
from .._matrices.view import MatrixView
from .._newton_schulz.batches import map_chunks
from .._newton_schulz.options import Options
from .._newton_schulz.platforms import CHUNK_SIZE, Platform, STACK_SIZE
from .._newton_schulz.solver import iterate, prepare


def orthogonalize_on_one_device(
    leaves: Sequence[jax.Array],
    ns_steps: jax.Array | None,
    *,
    views: Sequence[MatrixView],
    options: Options,
    platform: Platform,
) -> list[jax.Array]:
    def prepared(x):
        return prepare(x, options, platform)

    def iterated(x):
        return iterate(x, ns_steps, options, platform)

    def mapped(function):
        return lambda stack: map_chunks(function, stack, CHUNK_SIZE[platform])

    plan = plan_buckets(leaves, views, max_size=STACK_SIZE[platform])
    if platform == "cpu":
        # A matrix goes through all of it in the caches, in a program that does not
        # grow with the number of leaves.
        return plan.apply(_as_it_is, mapped(lambda x: iterated(prepared(x))), leaves)
    # Elsewhere preparation fuses with what made the leaf.
    return plan.apply(prepared, mapped(iterated), leaves)


def _as_it_is(x: jax.Array) -> jax.Array:
    return x
