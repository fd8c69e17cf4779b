"""Products known to be symmetric, at half the arithmetic, as a kernel for Hopper.

As many blocks run as the GPU has multiprocessors, one on each: its buffers take nearly
all of the shared memory. One warpgroup of a block loads, and two multiply: of a row of
tiles of `x` and two rows of `y` each computes a tile of 128 x 128, and writes it and
its transpose while operands of the next tiles are loaded.
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


_LOADING = 2  # the warpgroup that loads; those before it multiply
_REGISTERS = (40, 232)  # of a thread that loads, and of one that multiplies


def symmetric_product(
    x: jax.Array,
    y: jax.Array,
    *,
    addend: jax.Array | None = None,
    scale: float | jax.Array = 1.0,
    shift: float | jax.Array = 0.0,
    sms: int | None = None,
    interpret: Any = False,
    tile: int = 128,
    depth: int = 64,
    steps: int | None = None,
    block: tuple[int, int] = (64, 64),
    buffers: int = 1,
) -> jax.Array:
    """`scale * x @ y.mT + shift * addend`, where `x @ y.mT` is known to be symmetric.

    Computes tiles on and below the diagonal and writes the others as transposes: the
    result is symmetric to the bit. Sums are float32, and are rounded once.

    **Arguments:**

    - `x`, `y`: `(count, m, n)`, float16 or bfloat16, `m` and `n` multiples of 8. Either
        the same array or symmetric matrices that commute.
    - `addend`: symmetric `(count, m, m)`.
    - `scale`, `shift`: numbers, or arrays with one for each matrix.
    - `sms`: how many blocks run, by default one for each multiprocessor.
    - `interpret`: `InterpretGPUParams()` runs on any device, slowly, for tests.
    - `tile`: the edge of a tile.
    - `depth`: how many columns are multiplied at a time. Best a divisor of `n`, which
        is padded to a multiple.
    - `steps`: how many times that is in shared memory, at least 2: each is only free
        once the next is being multiplied.
    - `block`: the shape of what is written at a time: square, or twice as high.
    - `buffers`: for how many of these there is place.
    """
    check(x, y, addend)
    product = _Product.of(
        x,
        addend,
        tile=tile,
        depth=depth,
        steps=steps,
        block=block,
        buffers=buffers,
        scale=scale,
        shift=shift,
        interpret=interpret,
    )
    return product(x, y, addend, sms or multiprocessors(otherwise=132))


class _Product(Blocks):
    threads = 3
    writers = 2
    transposed = plgpu.Layout.WGMMA_TRANSPOSED

    def scratch(self) -> dict[str, Any]:
        emptied = plgpu.Barrier(num_arrivals=self.writers, num_barriers=self.steps)
        return dict(emptied=emptied)

    def run(self, refs) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _LOADING)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            self.for_each_unit(refs, functools.partial(self.load, refs))
            self.await_last(refs)

        @pl.when(warpgroup != _LOADING)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            self.for_each_unit(refs, functools.partial(self._compute, refs, warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _compute(self, refs, warpgroup, i, matrix, row, first_column) -> None:
        column = first_column + warpgroup
        pl.when(column > row)(lambda: self._pass(refs, i))

        @pl.when(column <= row)
        def _():
            edge = self.triangles.tile
            sums = plgpu.ACC((edge, edge), jnp.float32)  # pyright: ignore

            @functools.partial(pl.run_scoped, total=sums)
            def _(total):
                factors = self.factors(refs, matrix)
                self.load_addend(refs, warpgroup, matrix, row, [column])
                self._multiply(refs, warpgroup, i, total)
                self.await_addend(refs, warpgroup)
                part = functools.partial(_part, total[...])
                self.write(refs, warpgroup, (matrix, row, column), part, factors)

    def _pass(self, refs, i) -> None:
        """Multiplies nothing: the second tile of the unit is above the diagonal."""

        @pl.loop(i * self.depths, (i + 1) * self.depths)
        def _(step):
            plgpu.barrier_wait(refs.filled.at[self.slot(step)])
            plgpu.barrier_arrive(refs.emptied.at[self.slot(step)])

    def _multiply(self, refs, warpgroup, i, total) -> None:
        edge, first = self.triangles.tile, i * self.depths
        mine = pl.ds(warpgroup * edge, edge)

        def release(step):
            plgpu.barrier_arrive(refs.emptied.at[self.slot(step)])

        @pl.loop(first, first + self.depths)
        def _(step):
            slot = self.slot(step)
            plgpu.barrier_wait(refs.filled.at[slot])
            if self.interpret:  # which knows no transposed views
                y = refs.y_smem.at[slot, :, mine]
            else:
                y = refs.y_smem.at[slot, mine].transpose((1, 0))
            plgpu.wgmma(total, refs.x_smem.at[slot], y)
            plgpu.wgmma_wait(1)  # for the step before: the tensor cores never idle
            pl.when(step > first)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(first + self.depths - 1)


def _part(sums: jax.Array, rows: slice, columns: slice) -> jax.Array:
    return sums[rows, columns]
