"""What the Mosaic GPU kernels for symmetric products share: all but multiplying.

Some threads load operands into a ring of buffers, and others write results and their
transposes out of theirs.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import mirrors
from .tiling import Tiling


class Blocks(Tiling):
    """A kernel but for what its threads do."""

    threads: ClassVar[int]
    transposed: ClassVar[plgpu.Layout]

    run: ClassVar[Callable[..., None]]  # the body of the kernel
    scratch: ClassVar[Callable[..., dict[str, Any]]]  # beside the buffers

    def __call__(self, x, y, addend, sms: int) -> jax.Array:
        m, edge = self.triangles.m, self.triangles.tile
        # The interpreter does not clip what is partly beyond the end of an array.
        whole = 2 * edge if self.interpret else 1
        x, y = (_padded(z, whole, self.depth) for z in (x, y))
        operands = dict(x=x, y=y.mT if self.interpret else y)
        if self.has_addend:
            operands["addend"] = _padded(addend, whole, whole)
        for name in ("scale", "shift"):
            if not isinstance(value := getattr(self, name), int | float):
                value = jnp.asarray(value, jnp.float32)
                operands[name] = jnp.broadcast_to(value, x.shape[:1])
        return self._call(operands, min(sms, len(self.triangles.units)))[:, :m, :m]

    def _call(self, operands: dict[str, jax.Array], sms: int) -> jax.Array:
        operands = dict(units=jnp.asarray(self.triangles.units), **operands)

        def symmetric_product(*refs, **buffers):
            names = (*operands, "out")
            refs = dict(zip(names, refs, strict=True), **buffers)
            self.run(SimpleNamespace(**refs, sm=lax.axis_index("sm"), sms=sms))

        count, edge, _ = operands["x"].shape
        scratch = self.operand_buffers() | self.result_buffers() | self.scratch()
        warpgroup = plgpu.LoweringSemantics.Warpgroup
        kernel = plgpu.kernel(
            symmetric_product,
            out_type=jax.ShapeDtypeStruct((count, edge, edge), self.dtype),
            scratch_types=scratch,
            grid=(sms,),
            grid_names=("sm",),
            num_threads=self.threads,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=warpgroup),
            **(dict(interpret=self.interpret) if self.interpret else {}),
        )
        return kernel(*operands.values())

    def for_each_unit(self, refs, body: Callable[..., None]) -> None:
        """Calls `body` with the number of a unit in this block, and its place."""

        @pl.loop(0, self._units_here(refs))
        def _(i):
            unit = refs.sm + i * refs.sms
            body(i, *(refs.units[unit, z] for z in range(3)))

    def _units_here(self, refs):
        return lax.div(len(self.triangles.units) - refs.sm + refs.sms - 1, refs.sms)

    def slot(self, step):
        """The buffers for operands of a step."""
        return lax.rem(step, self.steps)

    def load(self, refs, i, matrix, row, column) -> None:
        """Copies the operands of a unit."""
        edge = self.triangles.tile
        rows, columns = pl.ds(row * edge, edge), pl.ds(column * edge, 2 * edge)

        @pl.loop(0, self.depths)
        def _(k):
            step = i * self.depths + k
            slot = self.slot(step)

            @pl.when(step >= self.steps)
            def _():
                plgpu.barrier_wait(refs.emptied.at[slot])

            within = pl.ds(k * self.depth, self.depth)
            of_y = (within, columns) if self.interpret else (columns, within)
            copy = functools.partial(
                plgpu.copy_gmem_to_smem, barrier=refs.filled.at[slot]
            )
            copy(refs.x.at[matrix, rows, within], refs.x_smem.at[slot])
            copy(refs.y.at[matrix, *of_y], refs.y_smem.at[slot])

    def await_last(self, refs) -> None:
        """Leaves no barrier half used."""
        steps = self._units_here(refs) * self.depths

        @pl.loop(lax.max(steps - self.steps, 0), steps)
        def _(step):
            plgpu.barrier_wait(refs.emptied.at[self.slot(step)])

    def load_addend(self, refs, writer, matrix, row, columns: Sequence) -> None:
        """Copies the addends of tiles to where they are added."""
        if not self.has_addend:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        places = [place for z in columns for _, place in self._blocks(row, z)]
        for slot, place in enumerate(places):
            source, to = refs.addend.at[matrix, *place], refs.out_smem.at[writer, slot]
            plgpu.copy_gmem_to_smem(source, to, refs.added.at[writer])

    def await_addend(self, refs, writer) -> None:
        if self.has_addend:
            plgpu.barrier_wait(refs.added.at[writer])

    def factors(self, refs, matrix) -> tuple[Any, Any]:
        """`scale` and `shift`: data, or compiled in."""
        given = ((getattr(refs, name, None), name) for name in ("scale", "shift"))
        scale, shift = (
            getattr(self, name) if ref is None else ref[matrix] for ref, name in given
        )
        return scale, shift

    def write(self, refs, writer, place, part, factors, first: int = 0) -> None:
        """Writes a tile and its mirror.

        - `place`: matrix, row and column.
        - `part`: returns the sums in some rows and columns of the tile.
        - `first`: how many blocks of the unit this warpgroup writes before.
        """
        matrix, row, column = place
        for i, (corner, place) in enumerate(self._blocks(row, column), first):
            slot = refs.out_smem.at[writer, i % self.slots]
            mirror = refs.mirror_smem.at[writer, i % self.mirrors]

            def finish(corner=corner, place=place, slot=slot, mirror=mirror):
                total = factors[0] * part(*map(_slice, corner, self.block))
                if self.has_addend:
                    total += factors[1] * slot[...].astype(jnp.float32)
                to = slot, mirror, refs.out.at[matrix], *place
                self._send(total.astype(self.dtype), to, corner, row == column)

            plgpu.wait_smem_to_gmem(self.mirrors - 1, wait_read_only=True)
            above = corner[1] - corner[0] >= self.block[0]
            pl.when(row != column)(finish) if above else finish()
            plgpu.commit_smem_to_gmem_group()

    def _send(self, block: jax.Array, to: tuple, corner, on_diagonal) -> None:
        slot, mirror, *_ = to
        mirrors.fill(slot, mirror, block, None if self.interpret else self.transposed)
        start = corner[1] - corner[0]
        if 0 <= start < self.block[0]:
            reflect = functools.partial(mirrors.send_reflected, *to, start=start)
            pl.when(on_diagonal)(reflect)
            pl.when(~on_diagonal)(lambda: mirrors.send(*to))
        else:
            mirrors.send(*to)

    def _blocks(self, row, column) -> Iterator[tuple]:
        """Corner in the tile, and rows and columns of the matrix, of each block."""
        edge, (height, width) = self.triangles.tile, self.block
        row, column = row * edge, column * edge
        corners = itertools.product(range(0, edge, height), range(0, edge, width))
        for i, j in corners:
            yield (i, j), (pl.ds(row + i, height), pl.ds(column + j, width))


def _slice(start: int, size: int) -> slice:
    return slice(start, start + size)


def _padded(z: jax.Array, rows: int, columns: int) -> jax.Array:
    """With zeros, to multiples of `rows` and `columns`."""
    return jnp.pad(z, ((0, 0), (0, -z.shape[1] % rows), (0, -z.shape[2] % columns)))
