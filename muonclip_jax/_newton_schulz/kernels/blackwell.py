"""Products known to be symmetric, at half the arithmetic, as a kernel for Blackwell.

As many blocks run as the GPU has multiprocessors, one on each: its buffers take nearly
all of the shared memory. One warp of a block loads, and one multiplies a row of tiles
of `x` by two rows of `y`, into two tiles of 128 x 128 of tensor memory. A warpgroup
writes them and their transposes while the next two are computed.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .blocks import Blocks
from .triangles import check, multiprocessors


_TILE = 128  # the rows of tensor memory
_LOADING, _MULTIPLYING = 0, 1  # warps of the first warpgroup; the second writes


def symmetric_product(
    x: jax.Array,
    y: jax.Array,
    *,
    addend: jax.Array | None = None,
    scale: float | jax.Array = 1.0,
    shift: float | jax.Array = 0.0,
    sms: int | None = None,
    interpret: Any = False,
    depth: int = 64,
    steps: int | None = None,
    block: int = 64,
) -> jax.Array:
    """As `symmetric_product` of `hopper`, but for `tile`.

    - `block`: how many columns of a tile are written at a time.
    """
    if interpret:
        raise NotImplementedError("The interpreter knows no tensor memory.")
    check(x, y, addend)
    product = _Product.of(
        x,
        addend,
        tile=_TILE,
        depth=depth,
        steps=steps,
        block=(_TILE, block),
        buffers=1,
        scale=scale,
        shift=shift,
        interpret=False,
    )
    return product(x, y, addend, sms or multiprocessors(otherwise=148))


class _Product(Blocks):
    threads = 2
    writers = 1
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED

    def scratch(self) -> dict[str, Any]:
        barrier = functools.partial(
            plgpu.Barrier, num_arrivals=1, orders_tensor_core=True
        )
        return dict(
            sums=plgpu.TMEM((_TILE, 4 * _TILE), jnp.float32),
            emptied=barrier(num_barriers=self.steps),
            multiplied=barrier(num_barriers=2),
            written=barrier(num_barriers=2),
        )

    def run(self, refs) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                self._load_and_multiply(refs, lax.axis_index("warp"))

        @pl.when(warpgroup == 1)
        def _():
            self.for_each_unit(refs, functools.partial(self._write_unit, refs))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _load_and_multiply(self, refs, warp) -> None:
        @pl.when(warp == _LOADING)
        def _():
            self.for_each_unit(refs, functools.partial(self.load, refs))
            self.await_last(refs)

        @pl.when(warp == _MULTIPLYING)
        def _():
            self.for_each_unit(refs, functools.partial(self._multiply, refs))

    def _multiply(self, refs, i, matrix, row, column) -> None:
        half = lax.rem(i, 2)

        @pl.when(i >= 2)
        def _():
            plgpu.barrier_wait(refs.written.at[half])

        for tiles, is_it in ((1, column == row), (2, column < row)):
            sums = refs.sums.at[:, pl.ds(half * 2 * _TILE, tiles * _TILE)]
            multiply = functools.partial(self._multiply_tiles, refs, i, sums)
            pl.when(is_it)(multiply)
        plgpu.tcgen05_commit_arrive(refs.multiplied.at[half])

    def _multiply_tiles(self, refs, i, sums) -> None:
        rows = pl.ds(0, sums.shape[1])

        @pl.loop(0, self.depths)
        def _(k):
            slot = self.slot(i * self.depths + k)
            plgpu.barrier_wait(refs.filled.at[slot])
            y = refs.y_smem.at[slot, rows].transpose((1, 0))
            x, emptied = refs.x_smem.at[slot], refs.emptied.at[slot]
            plgpu.tcgen05_mma(sums, x, y, emptied, accumulate=k > 0)

    def _write_unit(self, refs, i, matrix, row, column) -> None:
        half = lax.rem(i, 2)
        factors = self.factors(refs, matrix)
        self.load_addend(refs, 0, matrix, row, [column, column + 1])
        plgpu.barrier_wait(refs.multiplied.at[half])
        self.await_addend(refs, 0)
        write = functools.partial(self._write_tile, refs, half, factors)
        write(0, (matrix, row, column))
        pl.when(column < row)(lambda: write(1, (matrix, row, column + 1)))
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(refs.written.at[half])

    def _write_tile(self, refs, half, factors, tile: int, place) -> None:
        first = (2 * half + tile) * _TILE

        def part(_, columns):
            size = columns.stop - columns.start
            sums = refs.sums.at[:, pl.ds(first + columns.start, size)]
            return plgpu.async_load_tmem(sums, layout=plgpu.Layout.TCGEN05)

        self.write(refs, 0, place, part, factors, first=tile * _TILE // self.block[1])
