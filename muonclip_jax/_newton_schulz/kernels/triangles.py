"""Which tiles of symmetric products the Mosaic GPU kernels compute, and in what order.

The lower triangle is cut into square tiles, and the tiles of a row into pairs: what a
block computes at a time, so that both tiles use what it reads of `x`. A row with an odd
number of tiles ends in one that is alone, on the diagonal. Those come after the pairs
of all matrices: being half the work, they fill the gaps at the end.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.extend import backend


_GROUP = 16  # rows of tiles that run together, to share what they read in the cache


@dataclasses.dataclass(frozen=True)
class Triangles:
    """The units of work, pairs of tiles or single tiles, of `count` matrices."""

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
        """Of the arithmetic of the whole products."""
        _, row, column = self.units.T
        tiles = np.sum(np.minimum(row - column + 1, 2))
        return tiles * self.tile**2 / (self.count * self.m**2)


def check(x: jax.Array, y: jax.Array, addend: jax.Array | None) -> None:
    """Raises ValueError for what the kernels cannot compute."""
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


def multiprocessors(otherwise: int) -> int:
    """Of the default device, or `otherwise` if that is no GPU."""
    return getattr(backend.get_default_device(), "core_count", None) or otherwise
