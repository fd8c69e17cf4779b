"""Ways to orthogonalize that cost less or more than Newton-Schulz, and how much."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import muonclip_jax as mc

from .run import Run


BLOCKS = 4  # of a matrix, in MuonBP's steps between


def exact(x: jax.Array) -> jax.Array:
    """The polar factor, by a singular value decomposition."""
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt


def even(x: jax.Array) -> jax.Array:
    """Muon+ (arXiv:2602.21545): rows, then columns of the result equally long.

    `x` is inputs by outputs, so that the paper's columns are the rows here.
    """
    x = mc.newton_schulz(x)
    for axis in (-1, -2):
        x = x / _length(x, axis)
    return as_long(x)


def high_pass(x: jax.Array) -> jax.Array:
    """Lifts, and sends to 0 what is still small, as Pion (arXiv:2605.19282) does."""
    x = mc.newton_schulz(x, (1.5, -0.5, 0.0), steps=8)
    for _ in range(2):
        gram = x @ x.mT
        x = (2.5 * gram - 1.5 * gram @ gram) @ x
    return x


def as_long(x: jax.Array) -> jax.Array:
    """The matrix as it is, but of an orthogonal one's norm."""
    return math.sqrt(min(x.shape[-2:])) * x / _length(x, (-2, -1))


def in_blocks(x: jax.Array) -> jax.Array:
    """Blocks of the shorter side, each orthogonalized: what a chip of a mesh has."""
    if x.shape[-2] > x.shape[-1]:
        return jnp.matrix_transpose(in_blocks(jnp.matrix_transpose(x)))
    blocks = x.reshape(*x.shape[:-2], BLOCKS, -1, x.shape[-1])
    return mc.newton_schulz(blocks).reshape(x.shape)


def now_and_then(
    every: int, between: Callable[[jax.Array], jax.Array], direction: dict[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction in one of so many steps, and `between` of the momentum else."""
    muon = mc.scale_by_muon(**direction)
    own: dict[str, Any] = direction | {"orthogonalizer": between}
    plain = mc.scale_by_muon(**own)

    def update_fn(updates, state: Any, params=None, **extra_args):
        def by(one: optax.GradientTransformationExtraArgs):
            return lambda: one.update(updates, state, params, **extra_args)

        return jax.lax.cond(state.count % every == 0, by(muon), by(plain))

    return optax.GradientTransformationExtraArgs(muon.init, update_fn)


def step_flop(run: Run) -> float:
    """Arithmetic of one training step without that of Newton-Schulz."""
    matrices = 12 * run.layers * run.width**2 + 256 * run.width  # with the head
    attention = 12 * run.layers * run.context * run.width
    return (6 * matrices + attention) * run.batch * run.context


def iteration_flop(run: Run, squares: bool = True, blocks: int = 1) -> float:
    """Arithmetic of one step of Newton-Schulz, of all matrices and as written.

    Of an `(m, n)` with `m <= n`: `X X'`, its square unless it has none, and what is
    multiplied with `X`; `blocks` of the shorter side are iterated apart.
    """
    features = run.width // run.heads
    shapes = {
        (features, run.width): 3 * run.heads,
        (run.width, run.width): 1,
        (run.width, 4 * run.width): 2,
    }
    cut = {(m / blocks, n): blocks * count for (m, n), count in shapes.items()}
    one = sum(
        count * (4 * m * m * n + (2 * m**3 if squares else 0))
        for (m, n), count in cut.items()
    )
    return run.layers * one


def _length(x: jax.Array, axis: Any) -> jax.Array:
    """Norms, of which that of zeros divides nothing."""
    length = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    return jnp.where(length > 0, length, 1)
