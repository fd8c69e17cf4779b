"""Writes blocks of a symmetric matrix, and their mirrors, by way of shared memory."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def fill(straight, mirror, block: jax.Array, layout: plgpu.Layout | None) -> None:
    """Puts a block into one buffer and its transpose into another.

    - `layout`: that in which registers hold a transpose; None to interpret.
    """
    straight[...] = block
    if layout is None:  # the interpreter knows neither layouts nor transposed views
        mirror[...] = block.T
    else:
        turned = plgpu.layout_cast(block, layout)
        mirror.transpose((1, 0))[...] = turned
    plgpu.commit_smem()


def send(straight, mirror, out, rows: pl.Slice, columns: pl.Slice) -> None:
    """Starts to copy a block below the diagonal, and its mirror, to the matrix."""
    _copy(straight, out.at[rows, columns])
    _copy(mirror, out.at[columns, rows])


def send_reflected(straight, mirror, out, rows, columns, *, start: int) -> None:
    """As `send`, of a block that the diagonal enters in row `start`.

    Such a block has as many rows as columns, or twice as many.
    """
    height, width = straight.shape
    square = pl.ds(start, width)
    reflected = _reflect(straight.at[square], mirror.at[:, square])
    below = height - start
    straight[square] = reflected
    if below > width:
        mirror[:, square] = reflected
    plgpu.commit_smem()

    there = pl.ds(rows.start + start, below)
    _copy(straight.at[pl.ds(start, below)], out.at[there, columns])
    if below > width:
        _copy(mirror, out.at[columns, rows])


def _reflect(square, mirror) -> jax.Array:
    """What is below the diagonal of a square, and its mirror above."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, square.shape, i) for i in (0, 1))
    # Selected as float32: ptxas may serialize multiplications for 16-bit selections.
    lower, upper = (z[...].astype(jnp.float32) for z in (square, mirror))
    return jnp.where(rows >= columns, lower, upper).astype(square.dtype)


def _copy(source, target) -> None:
    plgpu.copy_smem_to_gmem(source, target, commit_group=False)
