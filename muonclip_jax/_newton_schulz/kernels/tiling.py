"""How a Mosaic GPU kernel cuts its work, and the shared memory that this takes.

The buffers for operands are a ring: one thread copies into those that are `emptied`,
others multiply what is `filled`. Results leave through buffers too, each as it is and
transposed. An addend is copied into the buffers for the result.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl

from .triangles import Triangles


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of one call, and its factors.

    - `depth`: how many columns are multiplied at a time, `depths` times.
    - `steps`: operands in flight.
    - `block`: what is written at a time.
    - `writers`: warpgroups that write the two tiles of a unit.
    - `slots`: for how many blocks each of them has buffers, and `mirrors`, no more, for
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

    writers: ClassVar[int]

    @classmethod
    def of(
        cls,
        x: jax.Array,
        addend: jax.Array | None,
        *,
        tile: int,
        depth: int,
        steps: int | None,
        block: tuple[int, int],
        buffers: int,
        **others: Any,
    ) -> Self:
        """For operands of these shapes. An addend needs buffers for whole tiles."""
        count, m, n = x.shape
        depths, has_addend = pl.cdiv(n, depth), addend is not None
        blocks_of_writer = 2 // cls.writers * tile**2 // math.prod(block)
        return cls(
            triangles=Triangles(count, m, tile),
            dtype=x.dtype,
            depths=depths,
            depth=depth,
            steps=min(depths, max(2, steps or 4 - has_addend)),
            block=block,
            slots=blocks_of_writer if has_addend else buffers,
            mirrors=buffers,
            has_addend=has_addend,
            **others,
        )

    def __post_init__(self):
        height, width = self.block
        if height not in (width, 2 * width) or self.triangles.tile % height:
            raise ValueError(
                "Parts of a tile are written that are as high as wide, or twice as "
                f"high, not {height} x {width} of {self.triangles.tile}."
            )

    def operand_buffers(self) -> dict[str, Any]:
        steps, depth, edge = self.steps, self.depth, self.triangles.tile
        y_shape = (depth, 2 * edge) if self.interpret else (2 * edge, depth)
        buffer = functools.partial(
            plgpu.SMEM, dtype=self.dtype, transforms=_swizzled(depth)
        )
        return dict(
            x_smem=buffer((steps, edge, depth)),
            y_smem=buffer((steps, *y_shape)),
            filled=plgpu.Barrier(num_arrivals=2, num_barriers=steps),
        )

    def result_buffers(self) -> dict[str, Any]:
        # Copies are in parts that must not reach over the end of a row.
        transforms = _swizzled(math.gcd(self.block[1], self.triangles.m))
        buffer = functools.partial(plgpu.SMEM, dtype=self.dtype, transforms=transforms)
        added = plgpu.Barrier(num_arrivals=self.slots, num_barriers=self.writers)
        return dict(
            out_smem=buffer((self.writers, self.slots, *self.block)),
            mirror_smem=buffer((self.writers, self.mirrors, *self.block[::-1])),
            **(dict(added=added) if self.has_addend else {}),
        )


def _swizzled(columns: int) -> tuple[plgpu.Transform, ...]:
    """How rows of 16-bit numbers, in parts of `columns`, lie in shared memory."""
    swizzle = plgpu.find_swizzle(columns * 16)
    # JAX 0.12 declares a method abstract that its own transforms do not have.
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore[reportAbstractUsage]
    if swizzle == 16:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
