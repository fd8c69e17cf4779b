"""Products known to be symmetric, at half the arithmetic, as a Pallas Triton kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from .tiles import lower_tiles, product_shape, tile_product


_TILE = (128, 64)
_WARPS, _STAGES = 8, 3  # two tiles share a multiprocessor of Hopper, none spills
_GROUP = 8  # rows of tiles that run together, to share what they read in the cache


def symmetric_product(
    x: jax.Array,
    y: jax.Array,
    *,
    addend: jax.Array | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    out_dtype=None,
    tile: tuple[int, int] = _TILE,
    interpret: bool = False,
) -> jax.Array:
    """As `symmetric_product` of `tpu`, in float16 or bfloat16.

    - `tile`: the edge of a tile, and how much of `n` is summed at a time: powers of
        two, at least 16.
    """
    out = product_shape(x, y, out_dtype)
    rows, columns = _grouped_tiles(x.shape[1], tile[0])
    operands = (x, y) if addend is None else (x, y, addend)
    call = pl.pallas_call(
        functools.partial(_kernel, tile=tile, scale=scale, shift=shift),
        out_shape=out,
        grid=(len(rows), x.shape[0]),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="symmetric_product",
    )
    return call(rows, columns, *operands)


def _grouped_tiles(m: int, edge: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = lower_tiles(m, edge)
    order = np.lexsort((rows, columns, rows // _GROUP))
    return rows[order], columns[order]


def _kernel(rows, columns, x_ref, y_ref, *refs, tile, scale, shift):
    *addend_ref, out_ref = refs
    (edge, depth), square, n = tile, (tile[0], tile[0]), x_ref.shape[-1]
    t, matrix = pl.program_id(0), pl.program_id(1)
    row, column = rows[t] * edge, columns[t] * edge

    def add_product(k, total):
        x = _load(x_ref, matrix, (row, k * depth), tile)
        y = _load(y_ref, matrix, (column, k * depth), tile)
        return total + tile_product(x, y)

    zeros = jnp.zeros(square, jnp.float32)
    total = scale * jax.lax.fori_loop(0, pl.cdiv(n, depth), add_product, zeros)
    for ref in addend_ref:
        addend = _load(ref, matrix, (row, column), square)
        total += shift * addend.astype(jnp.float32)
    lower, upper = _with_mirror(total.astype(out_ref.dtype), row == column)
    _store(out_ref, matrix, (row, column), lower)
    _store(out_ref, matrix, (column, row), upper)


def _with_mirror(tile: jax.Array, on_diagonal) -> tuple[jax.Array, jax.Array]:
    """The tile and its transpose; on the diagonal twice what its lower half says."""
    index = jnp.arange(len(tile))
    keep = on_diagonal & (index[:, None] >= index[None, :])
    mirror = jnp.where(keep, tile, tile.T)
    return jnp.where(on_diagonal, mirror, tile), mirror


def _load(ref, matrix, starts, shape) -> jax.Array:
    block, inside = _block(ref, matrix, starts, shape)
    return pltriton.load(block, mask=inside, other=None if inside is None else 0)


def _store(ref, matrix, starts, value: jax.Array) -> None:
    block, inside = _block(ref, matrix, starts, value.shape)
    pltriton.store(block, value, mask=inside)


def _block(ref, matrix, starts, shape):
    """A block, and which of its entries the matrix has; None if all blocks are full."""
    limits = tuple(zip(starts, shape, ref.shape[1:], strict=True))
    block = ref.at[matrix, *(pl.ds(start, size) for start, size, _ in limits)]
    if not any(end % size for _, size, end in limits):
        return block, None
    rows, columns = (start + jnp.arange(size) < end for start, size, end in limits)
    return block, rows[:, None] & columns[None, :]
