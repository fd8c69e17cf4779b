"""Products known to be symmetric, at half the arithmetic, where a GPU has kernels.

A program is compiled for the GPUs of this process; where there are none, as in tests
that only lower it, for Hopper.
"""

from typing import Any

import jax
from jax.extend import backend


#: The major compute capability of Hopper.
HOPPER = 9


def can_multiply(shape: tuple[int, ...]) -> bool:
    """Whether there is a kernel for `(m, n)`: rows are copied 16 bytes at a time."""
    is_aligned = all(size % 8 == 0 for size in shape)
    return is_aligned and capability() == HOPPER and _has_mosaic()


def symmetric_product(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """As `symmetric_product` of `hopper`."""
    from . import hopper

    return hopper.symmetric_product(x, y, **options)


def capability() -> int:
    """The major compute capability of the GPUs to compile for; 0 of AMD's."""
    device = backend.get_default_device()
    if device.platform not in ("gpu", "cuda"):
        return HOPPER
    major, *_ = str(getattr(device, "compute_capability", "")).split(".")
    return int(major) if major.isdigit() else 0


def _has_mosaic() -> bool:
    """Whether this JAX has what the kernels are made of."""
    return jax.__version_info__ >= (0, 10)
