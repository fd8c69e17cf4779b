"""Leaves become stacks of matrices, are orthogonalized, and become leaves again."""

import functools
from collections.abc import Sequence

import jax

from ._buckets import plan_buckets
from ._chunks import map_chunks
from ._matrices import MatrixView
from ._options import Options
from ._stages import iterate, prepare
from ._strategy import CHUNK_SIZE, on_its_platform, Platform, STACK_SIZE


def orthogonalize(
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    options: Options,
    ns_steps: jax.Array | None = None,
) -> list[jax.Array]:
    """Orthogonalizes every leaf that has a view; others pass through.

    Matrices of one shape share a stack, whichever leaves they come from. `ns_steps` is
    the number of steps where it is traced. Results are float32 or wider.
    """
    seen = [leaf for leaf, view in zip(leaves, views, strict=True) if view]
    matrices = tuple(view for view in views if view)
    results = iter(_orthogonalize(seen, ns_steps, views=matrices, options=options))
    return [
        next(results) if view else leaf
        for leaf, view in zip(leaves, views, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("views", "options"))
def _orthogonalize(leaves, ns_steps, **static):
    return on_its_platform(functools.partial(_run, **static), leaves, ns_steps)


def _run(
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
