"""How to run Newton-Schulz on a stack: by its shape, its dtype and the platform."""

from typing import Literal, NamedTuple

import jax.numpy as jnp


Method = Literal["auto", "standard", "gram"]
Platform = Literal["cpu", "accelerator"]

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
CHUNK_BYTES = {"cpu": 2**16, "accelerator": 2**27}


class Strategy(NamedTuple):
    """Which form of the iteration, with which products, on how much at a time."""

    gram: bool
    blocks: int
    chunk_bytes: int


def choose_strategy(
    shape: tuple[int, int], dtype: jnp.dtype, method: Method, platform: Platform
) -> Strategy:
    """Chooses for matrices of `shape`, the short side first, iterated in `dtype`.

    The Gram form squares the spectrum and so needs true float32 products, which only
    a CPU has for free; elsewhere, and in narrower dtypes, it has to be asked for.
    """
    m, n = shape
    on_cpu = platform == "cpu"
    pays = on_cpu and jnp.finfo(dtype).bits >= 32 and n >= GRAM_ASPECT_RATIO * m
    return Strategy(
        gram=method == "gram" or (method == "auto" and pays),
        blocks=BLOCKS if on_cpu and m >= BLOCKS * BLOCK_ROWS else 1,
        chunk_bytes=CHUNK_BYTES[platform],
    )
