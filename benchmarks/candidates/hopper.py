"""Products known to be symmetric, at half the arithmetic, as a kernel for Hopper.

The lower triangle is cut into square tiles, and the tiles of a row into pairs. As many
blocks run as the GPU has multiprocessors, one on each: its buffers take nearly all of
the shared memory. One warpgroup of a block loads, and two multiply: of a row of tiles
of `x` and two rows of `y` each computes a tile of 128 x 128, and writes it and its
transpose while operands of the next tiles are loaded.

The buffers for operands are a ring: one warpgroup copies into those that are `emptied`,
the others multiply what is `filled`. Results leave through buffers too, each as it is
and transposed. An addend is copied into the buffers for the result.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import backend


_GROUP = 16  # rows of tiles that run together, to share what they read in the cache
_LOADING = 2  # the warpgroup that loads; those before it multiply
_WRITERS = 2  # warpgroups that multiply, and write the two tiles of a unit
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
    _check(x, y, addend)
    count, m, n = x.shape
    depths, has_addend = pl.cdiv(n, depth), addend is not None
    product = _Product(
        triangles=Triangles(count, m, tile),
        dtype=x.dtype,
        depths=depths,
        depth=depth,
        steps=min(depths, max(2, steps or 4 - has_addend)),
        block=block,
        # An addend needs buffers for whole tiles.
        slots=tile**2 // math.prod(block) if has_addend else buffers,
        mirrors=buffers,
        scale=scale,
        shift=shift,
        has_addend=has_addend,
        interpret=interpret,
    )
    return product(x, y, addend, sms or _multiprocessors(otherwise=132))


def _check(x: jax.Array, y: jax.Array, addend: jax.Array | None) -> None:
    """Raises ValueError for what the kernel cannot compute."""
    given = [z for z in (x, y, addend) if z is not None]
    square = x.ndim == 3 and (*x.shape[:2], x.shape[1])
    shapes = x.shape == y.shape and (addend is None or addend.shape == square)
    dtypes = {z.dtype.name for z in given}
    if not square or not shapes or dtypes not in ({"float16"}, {"bfloat16"}):
        described = ", ".join(f"{z.dtype}{list(z.shape)}" for z in given)
        raise ValueError(
            "symmetric_product takes two stacks (count, m, n) of one shape, and an "
            f"addend (count, m, m), in float16 or bfloat16, not {described}."
        )
    if x.shape[1] % 8 or x.shape[2] % 8:
        raise ValueError(
            "symmetric_product takes matrices whose rows and columns are multiples "
            f"of 8, not {x.shape[1]} x {x.shape[2]}."
        )


def _multiprocessors(otherwise: int) -> int:
    """The number on the default device, or `otherwise` if that is no GPU."""
    return getattr(backend.get_default_device(), "core_count", None) or otherwise


@dataclasses.dataclass(frozen=True)
class Triangles:
    """The units of work, pairs of tiles or single tiles, of `count` matrices.

    What a block computes at a time is a pair, so that both tiles use what it reads of
    `x`. A row with an odd number of tiles ends in one that is alone, on the diagonal.
    Those come after the pairs of all matrices: being half the work, they fill the gaps
    at the end.
    """

    count: int
    m: int
    tile: int

    @functools.cached_property
    def units(self) -> np.ndarray:
        """Matrix, row and first column, in tiles, of each unit."""
        edge = -(-self.m // self.tile)
        shape = self.count, edge, -(-edge // 2)
        matrix, row, pair = (z.ravel() for z in np.indices(shape, np.int32))
        alone = row == 2 * pair
        order = np.lexsort((row, pair, row // _GROUP, matrix, alone))
        units = np.stack([matrix, row, 2 * pair], 1)[order]
        return units[units[:, 1] >= units[:, 2]]

    @property
    def computed(self) -> float:
        """The share of the arithmetic of whole products."""
        _, row, column = self.units.T
        tiles = np.sum(np.minimum(row - column + 1, 2))
        return tiles * self.tile**2 / (self.count * self.m**2)


@dataclasses.dataclass(frozen=True)
class _Product:
    """The kernel of one call: its sizes, and its factors.

    - `depth`: how many columns are multiplied at a time, `depths` times.
    - `steps`: operands in flight.
    - `block`: what is written at a time.
    - `slots`: for how many blocks each writer has buffers, and `mirrors`, no more, for
        how many transposes.
    """

    triangles: Triangles
    dtype: Any
    depths: int
    depth: int
    steps: int
    block: tuple[int, int]
    slots: int
    mirrors: int
    scale: Any
    shift: Any
    has_addend: bool
    interpret: Any

    def __post_init__(self):
        height, width = self.block
        if height not in (width, 2 * width) or self.triangles.tile % height:
            raise ValueError(
                "Parts of a tile are written that are as high as wide, or twice as "
                f"high, not {height} x {width} of {self.triangles.tile}."
            )

    def __call__(self, x, y, addend, sms: int) -> jax.Array:
        m, edge = self.triangles.m, self.triangles.tile
        # The interpreter does not clip what is partly beyond the end of an array.
        whole = 2 * edge if self.interpret else 1
        x, y = (_padded(z, whole, self.depth) for z in (x, y))
        operands = dict(
            units=jnp.asarray(self.triangles.units),
            x=x,
            y=y.mT if self.interpret else y,  # which knows no transposed views
        )
        if self.has_addend:
            operands["addend"] = _padded(addend, whole, whole)
        for name in ("scale", "shift"):
            if not isinstance(value := getattr(self, name), int | float):
                value = jnp.asarray(value, jnp.float32)
                operands[name] = jnp.broadcast_to(value, x.shape[:1])
        sms = min(sms, len(self.triangles.units))

        def symmetric_product(*refs, **buffers):
            names = (*operands, "out")
            refs = dict(zip(names, refs, strict=True), **buffers)
            self._run(SimpleNamespace(**refs, sm=lax.axis_index("sm"), sms=sms))

        count, edge, _ = x.shape
        warpgroup = plgpu.LoweringSemantics.Warpgroup
        kernel = plgpu.kernel(
            symmetric_product,
            out_type=jax.ShapeDtypeStruct((count, edge, edge), self.dtype),
            scratch_types=self._buffers(),
            grid=(sms,),
            grid_names=("sm",),
            num_threads=_WRITERS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=warpgroup),
            **(dict(interpret=self.interpret) if self.interpret else {}),
        )
        return kernel(*operands.values())[:, :m, :m]

    def _buffers(self) -> dict[str, Any]:
        steps, depth, edge = self.steps, self.depth, self.triangles.tile
        y_shape = (depth, 2 * edge) if self.interpret else (2 * edge, depth)
        operand = functools.partial(
            plgpu.SMEM, dtype=self.dtype, transforms=_swizzled(depth)
        )
        # Copies are in parts that must not reach over the end of a row.
        transforms = _swizzled(math.gcd(self.block[1], self.triangles.m))
        result = functools.partial(plgpu.SMEM, dtype=self.dtype, transforms=transforms)
        added = plgpu.Barrier(num_arrivals=self.slots, num_barriers=_WRITERS)
        return dict(
            x_smem=operand((steps, edge, depth)),
            y_smem=operand((steps, *y_shape)),
            filled=plgpu.Barrier(num_arrivals=2, num_barriers=steps),
            emptied=plgpu.Barrier(num_arrivals=_WRITERS, num_barriers=steps),
            out_smem=result((_WRITERS, self.slots, *self.block)),
            mirror_smem=result((_WRITERS, self.mirrors, *self.block[::-1])),
            **(dict(added=added) if self.has_addend else {}),
        )

    def _run(self, refs) -> None:
        """The body of the kernel."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _LOADING)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            self._for_each_unit(refs, functools.partial(self._load, refs))
            # No barrier is left half used.
            steps = self._units_here(refs) * self.depths

            @pl.loop(lax.max(steps - self.steps, 0), steps)
            def _(step):
                plgpu.barrier_wait(refs.emptied.at[self._slot(step)])

        @pl.when(warpgroup != _LOADING)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            compute = functools.partial(self._compute, refs, warpgroup)
            self._for_each_unit(refs, compute)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _for_each_unit(self, refs, body) -> None:
        """Calls `body` with the number of a unit in this block, and its place."""

        @pl.loop(0, self._units_here(refs))
        def _(i):
            unit = refs.sm + i * refs.sms
            body(i, *(refs.units[unit, z] for z in range(3)))

    def _units_here(self, refs):
        return lax.div(len(self.triangles.units) - refs.sm + refs.sms - 1, refs.sms)

    def _slot(self, step):
        """The buffers for operands of a step."""
        return lax.rem(step, self.steps)

    def _load(self, refs, i, matrix, row, column) -> None:
        """Copies the operands of a unit."""
        edge = self.triangles.tile
        rows, columns = pl.ds(row * edge, edge), pl.ds(column * edge, 2 * edge)

        @pl.loop(0, self.depths)
        def _(k):
            step = i * self.depths + k
            slot = self._slot(step)

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

    def _compute(self, refs, warpgroup, i, matrix, row, first_column) -> None:
        """One of the two tiles of a unit, from operands to what is written."""
        column, edge = first_column + warpgroup, self.triangles.tile

        @pl.when(column > row)
        def _():  # nothing: the second tile of the unit is above the diagonal
            @pl.loop(i * self.depths, (i + 1) * self.depths)
            def _(step):
                plgpu.barrier_wait(refs.filled.at[self._slot(step)])
                plgpu.barrier_arrive(refs.emptied.at[self._slot(step)])

        @pl.when(column <= row)
        def _():
            sums = plgpu.ACC((edge, edge), jnp.float32)  # pyright: ignore

            @functools.partial(pl.run_scoped, total=sums)
            def _(total):
                if self.has_addend:
                    # It is copied to where it is added.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for slot, (_, place) in enumerate(self._blocks(row, column)):
                        plgpu.copy_gmem_to_smem(
                            refs.addend.at[matrix, *place],
                            refs.out_smem.at[warpgroup, slot],
                            refs.added.at[warpgroup],
                        )
                self._multiply(refs, warpgroup, i, total)
                if self.has_addend:
                    plgpu.barrier_wait(refs.added.at[warpgroup])
                self._write(refs, warpgroup, matrix, row, column, total[...])

    def _multiply(self, refs, warpgroup, i, total) -> None:
        edge, first = self.triangles.tile, i * self.depths
        mine = pl.ds(warpgroup * edge, edge)

        def release(step):
            plgpu.barrier_arrive(refs.emptied.at[self._slot(step)])

        @pl.loop(first, first + self.depths)
        def _(step):
            slot = self._slot(step)
            plgpu.barrier_wait(refs.filled.at[slot])
            if self.interpret:
                y = refs.y_smem.at[slot, :, mine]
            else:
                y = refs.y_smem.at[slot, mine].transpose((1, 0))
            plgpu.wgmma(total, refs.x_smem.at[slot], y)
            plgpu.wgmma_wait(1)  # for the step before: the tensor cores never idle
            pl.when(step > first)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(first + self.depths - 1)

    def _write(self, refs, writer, matrix, row, column, sums) -> None:
        """Writes a tile and its mirror, block by block, by way of shared memory."""
        # Data, or compiled in.
        data = (getattr(refs, name, None) for name in ("scale", "shift"))
        scale, shift = (
            number if ref is None else ref[matrix]
            for ref, number in zip(data, (self.scale, self.shift), strict=True)
        )
        height, width = self.block
        for i, ((first, start), place) in enumerate(self._blocks(row, column)):
            slot = refs.out_smem.at[writer, i % self.slots]
            mirror = refs.mirror_smem.at[writer, i % self.mirrors]

            def finish(first=first, start=start, place=place, slot=slot, mirror=mirror):
                total = scale * sums[first : first + height, start : start + width]
                if self.has_addend:
                    total += shift * slot[...].astype(jnp.float32)
                self._fill(slot, mirror, total.astype(self.dtype))
                send = functools.partial(_send, slot, mirror, refs.out.at[matrix])
                entered = start - first  # the row in which the diagonal enters
                if 0 <= entered < height:
                    reflect = functools.partial(
                        _send_reflected, slot, mirror, refs.out.at[matrix]
                    )
                    pl.when(row == column)(lambda: reflect(*place, start=entered))
                    pl.when(row != column)(lambda: send(*place))
                else:
                    send(*place)

            plgpu.wait_smem_to_gmem(self.mirrors - 1, wait_read_only=True)
            is_above = start - first >= height
            pl.when(row != column)(finish) if is_above else finish()
            plgpu.commit_smem_to_gmem_group()

    def _blocks(self, row, column) -> Iterator[tuple]:
        """Corner in the tile, and rows and columns of the matrix, of each block."""
        edge, (height, width) = self.triangles.tile, self.block
        row, column = row * edge, column * edge
        corners = itertools.product(range(0, edge, height), range(0, edge, width))
        for i, j in corners:
            yield (i, j), (pl.ds(row + i, height), pl.ds(column + j, width))

    def _fill(self, straight, mirror, block: jax.Array) -> None:
        """Puts a block into one buffer and its transpose into another."""
        straight[...] = block
        if self.interpret:  # which knows neither layouts nor transposed views
            mirror[...] = block.T
        else:
            turned = plgpu.layout_cast(block, plgpu.Layout.WGMMA_TRANSPOSED)
            mirror.transpose((1, 0))[...] = turned
        plgpu.commit_smem()


def _send(straight, mirror, out, rows: pl.Slice, columns: pl.Slice) -> None:
    """Starts to copy a block below the diagonal, and its mirror, to the matrix."""
    _copy(straight, out.at[rows, columns])
    _copy(mirror, out.at[columns, rows])


def _send_reflected(straight, mirror, out, rows, columns, *, start: int) -> None:
    """As `_send`, of a block that the diagonal enters in row `start`.

    Such a block has as many rows as columns, or twice as many.
    """
    height, width = straight.shape
    square = pl.ds(start, width)
    at = straight.at[square], mirror.at[:, square]
    # What is below the diagonal, and its mirror above. Selected as float32: ptxas may
    # serialize multiplications for 16-bit selections.
    i, j = (lax.broadcasted_iota(jnp.int32, at[0].shape, axis) for axis in (0, 1))
    lower, upper = (z[...].astype(jnp.float32) for z in at)
    reflected = jnp.where(i >= j, lower, upper).astype(straight.dtype)
    below = height - start
    straight[square] = reflected
    if below > width:
        mirror[:, square] = reflected
    plgpu.commit_smem()

    there = pl.ds(rows.start + start, below)
    _copy(straight.at[pl.ds(start, below)], out.at[there, columns])
    if below > width:
        _copy(mirror, out.at[columns, rows])


def _copy(source, target) -> None:
    plgpu.copy_smem_to_gmem(source, target, commit_group=False)


def _swizzled(columns: int) -> tuple[plgpu.Transform, ...]:
    """The order of rows of 16-bit numbers, in parts of `columns`, in shared memory."""
    swizzle = plgpu.find_swizzle(columns * 16)
    # JAX 0.12 declares a method abstract that its own transforms do not have.
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore[reportAbstractUsage]
    if swizzle == 16:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _padded(z: jax.Array, rows: int, columns: int) -> jax.Array:
    """With zeros, to multiples of `rows` and `columns`."""
    return jnp.pad(z, ((0, 0), (0, -z.shape[1] % rows), (0, -z.shape[2] % columns)))
