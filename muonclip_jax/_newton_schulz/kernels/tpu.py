"""Products known to be symmetric, at half the arithmetic, as a Pallas TPU kernel.

The result is cut into blocks, large to read little, and blocks into tiles, small to
compute little above the diagonal. A block below the diagonal is written twice: where
its sum ends, and transposed by a further step of the grid that does nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


_LANES = 128
_VMEM_BYTES = 3 * 2**24  # three quarters of what the smallest chip has

_BLOCK = 1024
_TILES = (256, 512)
#: What a tile costs on top of its products, in entries. From compiled programs: the
#: matrix units fill and drain in next to no time on a v5e, and for 2^15.5 entries on a
#: v6e.
_TILE_OVERHEAD = 2**15


def symmetric_product(
    x: jax.Array,
    y: jax.Array,
    *,
    addend: jax.Array | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    out_dtype=None,
    tile: tuple[int, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """`scale * x @ y.mT + shift * addend`, where `x @ y.mT` is known to be symmetric.

    Computes tiles on and below the diagonal and writes the others as transposes: the
    result is symmetric to the bit. Sums are float32, and are rounded once.

    **Arguments:**

    - `x`, `y`: `(count, m, n)`, bfloat16 on TPU. Either the same array, which is then
        read once, or symmetric matrices that commute.
    - `addend`: symmetric `(count, m, m)`.
    - `out_dtype`: that of `x` if not given.
    - `tile`: edges of a tile and of a block of tiles. On TPU multiples of 128.
    - `interpret`: runs on any device, slowly, for tests; as for `pl.pallas_call`.
    """
    out = _product_shape(x, y, out_dtype)
    tiling = _Tiling.choose(x.shape, tile, gram=y is x)
    operands = (x, y) if addend is None else (x, y, addend)
    call = pl.pallas_call(
        functools.partial(_kernel, tiling=tiling, scale=scale, shift=shift),
        out_shape=out,
        grid_spec=_grid(tiling, has_addend=addend is not None),
        cost_estimate=_cost(tiling, operands, out),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=interpret,
        name="symmetric_product",
    )
    return call(*lower_tiles(tiling.m, tiling.edge), *operands)


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Blocks of `edge` rows, of which steps sum `depth` columns in tiles of `tile`."""

    count: int
    m: int
    n: int
    gram: bool
    tile: int
    edge: int
    depth: int

    @staticmethod
    def choose(shape, tile: tuple[int, int] | None, gram: bool) -> "_Tiling":
        count, m, n = shape
        small, large = tile or (_choose_tile(m), _BLOCK)
        edge = small * min(large // small, pl.cdiv(m, small))
        steps = pl.cdiv(n * edge, large**2)
        depth = pl.cdiv(pl.cdiv(n, steps), _LANES) * _LANES
        return _Tiling(count, m, n, gram, small, edge, min(depth, n))

    @property
    def steps(self) -> int:
        return pl.cdiv(self.n, self.depth)

    @property
    def blocks(self) -> int:
        """On and below the diagonal."""
        return len(lower_tiles(self.m, self.edge)[0])


def _choose_tile(m: int) -> int:
    def cost(tile: int) -> int:
        return len(lower_tiles(m, tile)[0]) * (tile**2 + _TILE_OVERHEAD)

    return min(_TILES, key=cost)


def _grid(tiling: _Tiling, has_addend: bool) -> pltpu.PrefetchScalarGridSpec:
    def at_row(b, t, k, rows, columns):
        b, t, k = _operand_step(tiling, b, t, k)
        return b, rows[t], k

    def at_column(b, t, k, rows, columns):
        b, t, k = _operand_step(tiling, b, t, k)
        # On the diagonal of a Gram matrix this is the block of `at_row`: read nothing.
        needed = (rows[t] != columns[t]).astype(jnp.int32) if tiling.gram else 1
        return needed * b, needed * columns[t], needed * k

    def at_block(b, t, k, rows, columns):
        return b, rows[t], columns[t]

    def at_block_then_mirror(b, t, k, rows, columns):
        row, column, mirror = rows[t], columns[t], k == tiling.steps
        return b, jnp.where(mirror, column, row), jnp.where(mirror, row, column)

    square = (None, tiling.edge, tiling.edge)
    factor = (None, tiling.edge, tiling.depth)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(tiling.count, tiling.blocks, tiling.steps + 1),
        in_specs=[
            pl.BlockSpec(factor, at_row),
            pl.BlockSpec(factor, at_column),
            *[pl.BlockSpec(square, at_block)] * has_addend,
        ],
        out_specs=pl.BlockSpec(square, at_block_then_mirror),
        scratch_shapes=[pltpu.VMEM((tiling.edge, tiling.edge), jnp.float32)],
    )


def _operand_step(tiling: _Tiling, b, t, k):
    """The step whose operands are in memory: that which transposes awaits the next."""
    ahead = k == tiling.steps
    last = t == tiling.blocks - 1
    b = jnp.where(ahead & last, jnp.minimum(b + 1, tiling.count - 1), b)
    t = jnp.where(ahead, jnp.where(last, 0, t + 1), t)
    return b, t, jnp.where(ahead, 0, k)


def _kernel(rows, columns, x_ref, y_ref, *refs, tiling: _Tiling, scale, shift):
    *addend_ref, out_ref, sum_ref = refs
    row, column = rows[pl.program_id(1)], columns[pl.program_id(1)]
    step = pl.program_id(2)
    for_each_tile = functools.partial(_for_each_tile, tiling, row, column)

    def add_product(y_ref, i, j):
        product = _product(tiling, step, x_ref[i], y_ref[j])
        if tiling.steps > 1:
            product += jnp.where(step == 0, 0.0, sum_ref[i, j])
        sum_ref[i, j] = product

    def finish(i, j):
        total = scale * sum_ref[i, j]
        for ref in addend_ref:
            total += shift * ref[i, j].astype(jnp.float32)
        sum_ref[i, j] = total
        out_ref[i, j] = total.astype(out_ref.dtype)

    def transpose(i, j):
        total = sum_ref[i, j]
        on_diagonal = (row == column) & (i.start == j.start)
        mirror = jnp.where(on_diagonal & _lower(total.shape), total, total.T)
        out_ref[j, i] = mirror.astype(out_ref.dtype)

    @pl.when((step < tiling.steps) & (row == column))
    def _():
        for_each_tile(functools.partial(add_product, x_ref if tiling.gram else y_ref))

    @pl.when((step < tiling.steps) & (row != column))
    def _():
        for_each_tile(functools.partial(add_product, y_ref))

    pl.when(step == tiling.steps - 1)(lambda: for_each_tile(finish))
    pl.when(step == tiling.steps)(lambda: for_each_tile(transpose))


def _for_each_tile(
    tiling: _Tiling, row, column, body: Callable[[Any, Any], None]
) -> None:
    """Calls `body` with the slices of each tile of a block that has to be computed."""
    tiles = tiling.edge // tiling.tile
    filled = jnp.minimum(tiles, pl.cdiv(tiling.m - row * tiling.edge, tiling.tile))

    def tile_slice(i):
        return pl.ds(pl.multiple_of(i * tiling.tile, tiling.tile), tiling.tile)

    @pl.loop(0, filled)
    def _(i):
        @pl.loop(0, jnp.where(row == column, i + 1, tiles))
        def _(j):
            body(tile_slice(i), tile_slice(j))


def _product(tiling: _Tiling, step, x: jax.Array, y: jax.Array) -> jax.Array:
    if tiling.n % tiling.depth:
        # What is read beyond the matrix is anything, NaN included.
        inside = step * tiling.depth + _iota(x.shape, 1) < tiling.n
        x, y = (jnp.where(inside, z, jnp.zeros_like(z)) for z in (x, y))
    return _tile_product(x, y)


def _lower(shape: tuple[int, ...]) -> jax.Array:
    return _iota(shape, 0) >= _iota(shape, 1)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _cost(tiling: _Tiling, operands, out) -> pl.CostEstimate:
    tiles = len(lower_tiles(tiling.m, tiling.tile)[0])
    on_diagonal = pl.cdiv(tiling.m, tiling.edge)
    reads = 2 * tiling.blocks - on_diagonal * tiling.gram
    factor_bytes = reads * tiling.edge * tiling.n * operands[0].dtype.itemsize
    return pl.CostEstimate(
        flops=2 * tiling.count * tiles * tiling.tile**2 * tiling.n,
        transcendentals=0,
        bytes_accessed=tiling.count * factor_bytes
        + sum(z.size * z.dtype.itemsize for z in (out, *operands[2:])),
    )


def lower_tiles(m: int, edge: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the tiles on and below the diagonal of `(m, m)`."""
    rows, columns = np.tril_indices(-(-m // edge))
    return rows.astype(np.int32), columns.astype(np.int32)


def _product_shape(x: jax.Array, y: jax.Array, out_dtype) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `x @ y.mT`."""
    if x.ndim != 3 or x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            "symmetric_product takes two stacks (count, m, n) of one shape and dtype, "
            f"not {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    count, m, _ = x.shape
    return jax.ShapeDtypeStruct((count, m, m), out_dtype or x.dtype)


def _tile_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y.T` in float32."""
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, contract_last, preferred_element_type=jnp.float32)
