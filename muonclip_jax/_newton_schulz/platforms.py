"""How to run Newton-Schulz on a stack: by its shape, its dtype and the platform."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .coefficients import is_stable
from .gram_restarts import cut_into_passes
from .options import Options


Platform = Literal["cpu", "gpu", "tpu"]

#: The dtype that matrices of float32 or less are iterated in unless the user says
#: otherwise: the fastest that the platform multiplies. Singular values stay below 2, so
#: the range of float16 suffices, and it has eight times the precision of bfloat16.
ITERATION_DTYPES = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}

#: From this aspect ratio on `method="auto"` takes the Gram form. In multiplications of
#: `m^3` a further step costs `2r + 1` in the standard form and 4 in the Gram form for
#: an aspect ratio `r`: the break-even is 1.5 for any number of steps. In two blocks it
#: is 1.29 on paper and was measured between 1.33 and 1.5.
GRAM_ASPECT_RATIO = 1.5

#: Row blocks of Hermitian products on CPU, and the least rows of a block: below that
#: the smaller products are slower by more than they save.
BLOCKS, BLOCK_ROWS = 2, 128

#: The most entries of matrices that are iterated at once. An accelerator wants work for
#: all its units, and no more: temporaries are several times a chunk. One large matrix
#: fills a CPU, and then stays in its caches.
CHUNK_SIZE = {"cpu": 2**14, "gpu": 2**26, "tpu": 10 * 2**20}

#: The most entries of separate leaves that are put together. Compilers for accelerators
#: keep such stacks whole; on CPU they cost little, and more of them compile longer.
STACK_SIZE = {"cpu": math.inf, "gpu": 2**26, "tpu": 5 * 2**20}


#: The least rows from which `kernel="pallas"` takes the kernel for symmetric products.
#: Smaller ones have few tiles above the diagonal to save.
KERNEL_ROWS = {"cpu": math.inf, "gpu": 2048, "tpu": 1024}


class Strategy(NamedTuple):
    """Which form of the iteration, in how many row blocks, and whether by a kernel."""

    gram: bool
    blocks: int
    kernel: bool


def choose_strategy(
    shape: tuple[int, ...], dtype: jnp.dtype, options: Options, platform: Platform
) -> Strategy:
    """Chooses for matrices of `shape`, the short side first, iterated in `dtype`."""
    m, n = shape
    is_short = jnp.finfo(dtype).bits == 16
    # The Gram form needs exact products: elsewhere those of float32 are several times
    # as slow as what the standard form makes do with.
    pays = (platform == "cpu" or is_short) and n >= GRAM_ASPECT_RATIO * m
    return Strategy(
        gram=options.method == "gram" or (options.method == "auto" and pays),
        blocks=BLOCKS if platform == "cpu" and m >= BLOCKS * BLOCK_ROWS else 1,
        kernel=options.kernel == "pallas" and is_short and m >= KERNEL_ROWS[platform],
    )


def iteration_dtype(
    dtype: jnp.dtype, options: Options, platform: Platform
) -> jnp.dtype:
    """The dtype to iterate matrices of `dtype` in."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.promote_types(options.dtype or dtype, jnp.complex64)
    if options.dtype is not None or dtype == jnp.float64:
        return options.dtype or dtype
    fast = ITERATION_DTYPES[platform]
    return jnp.dtype(fast if is_stable(options.schedule, fast) else "float32")


def wire_dtype(dtype: jnp.dtype, options: Options, platform: Platform) -> jnp.dtype:
    """The dtype in which matrices of `dtype` travel between devices.

    Not float16: what travels has no norm yet.
    """
    iterated = iteration_dtype(dtype, options, platform)
    is_short = jnp.finfo(iterated).bits == 16
    return jnp.dtype(jnp.bfloat16) if is_short else iterated


def cost(
    shape: tuple[int, ...], dtype: jnp.dtype, options: Options, platform: Platform
) -> float:
    """The multiplications that a matrix of `shape` takes, the short side first.

    Products with the long side, and of the short one with itself, as `_iterations` has
    them.
    """
    m, n = shape
    dtype = iteration_dtype(dtype, options, platform)
    schedule = options.schedule
    if not choose_strategy(shape, dtype, options, platform).gram:
        return len(schedule) * (2 * m * m * n + m**3)
    passes = cut_into_passes(schedule, dtype.name)
    return sum(2 * m * m * n + (4 * len(steps) - 3) * m**3 for steps in passes)


def on_its_platform(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(*arguments, platform=...)`.

    The platform a program is compiled for need not be the default backend, so it is
    known only to the compiler.
    """
    return jax.lax.platform_dependent(
        *arguments,
        cpu=functools.partial(function, platform="cpu"),
        tpu=functools.partial(function, platform="tpu"),
        default=functools.partial(function, platform="gpu"),
    )
