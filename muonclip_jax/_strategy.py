"""How to run Newton-Schulz on a stack: by its shape, its dtype and the platform."""

from typing import get_args, Literal, NamedTuple

import jax.numpy as jnp

from ._coefficients import is_stable, Schedule


Method = Literal["auto", "standard", "gram"]
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

#: The most bytes of matrices, in the dtype they come in, that are iterated at once. An
#: accelerator wants work for all its units, and no more: temporaries are several times
#: a chunk. One large matrix fills a CPU, and then stays in its caches.
CHUNK_BYTES = {"cpu": 2**16, "gpu": 2**27, "tpu": 2**27}


class Strategy(NamedTuple):
    """Which form of the iteration, in which dtype, and how much at a time."""

    gram: bool
    dtype: jnp.dtype
    blocks: int
    chunk_bytes: int


def check_method(method: str) -> None:
    if method not in get_args(Method):
        raise ValueError(
            f"unknown method {method!r}; choose 'auto', 'standard' or 'gram'"
        )


def choose_strategy(
    shape: tuple[int, int],
    dtype: jnp.dtype,
    *,
    requested_dtype: jnp.dtype | None,
    method: Method,
    schedule: Schedule,
    platform: Platform,
) -> Strategy:
    """Chooses for matrices of `shape`, the short side first, that come in `dtype`."""
    iterated = requested_dtype or _iteration_dtype(dtype, schedule, platform)
    return Strategy(
        gram=method == "gram"
        or (method == "auto" and _gram_pays(shape, iterated, platform)),
        dtype=iterated,
        blocks=BLOCKS if platform == "cpu" and shape[0] >= BLOCKS * BLOCK_ROWS else 1,
        chunk_bytes=CHUNK_BYTES[platform],
    )


def _gram_pays(shape: tuple[int, int], dtype: jnp.dtype, platform: Platform) -> bool:
    m, n = shape
    # The Gram form needs exact products: elsewhere those of float32 are several times
    # as slow as what the standard form makes do with.
    exact_is_free = platform == "cpu" or jnp.finfo(dtype).bits == 16
    return exact_is_free and n >= GRAM_ASPECT_RATIO * m


def _iteration_dtype(
    dtype: jnp.dtype, schedule: Schedule, platform: Platform
) -> jnp.dtype:
    if jnp.issubdtype(dtype, jnp.complexfloating) or dtype == jnp.float64:
        return dtype
    fast = ITERATION_DTYPES[platform]
    return jnp.dtype(fast if is_stable(schedule, fast) else "float32")
