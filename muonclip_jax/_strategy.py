"""How to run Newton-Schulz on a stack: by its shape, its dtype and the platform."""

from typing import Literal, NamedTuple

import jax.numpy as jnp


Method = Literal["auto", "standard", "gram"]
Platform = Literal["cpu", "accelerator"]

#: From this aspect ratio on `method="auto"` takes the Gram form. In multiplications of
#: `m^3` a further step costs `2r + 1` in the standard form and 4 in the Gram form for
#: an aspect ratio `r`, which makes 1.5 the break-even for any number of steps. Where
#: Hermitian products leave out a quarter, it is `1.75r + 0.75` against 3, and 1.29.
GRAM_ASPECT_RATIO = 1.3

#: Hermitian products leave out their upper corner from this short side on. Below it
#: the smaller products are slower by more than they save.
HALVES_FROM = 256

#: The most bytes of matrices, in the dtype they come in, that are iterated at once. An
#: accelerator wants work for all its units, and no more: temporaries are several times
#: a chunk. One large matrix fills a CPU, and then stays in its caches.
CHUNK_BYTES = {"cpu": 2**16, "accelerator": 2**27}


class Strategy(NamedTuple):
    """Which form of the iteration, with which products, on how much at a time."""

    gram: bool
    halves: bool
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
        halves=on_cpu and m >= HALVES_FROM,
        chunk_bytes=CHUNK_BYTES[platform],
    )
