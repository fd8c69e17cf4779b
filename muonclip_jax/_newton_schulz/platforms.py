"""The platforms that programs are compiled for, and what differs between them.

A platform is one value; `PLATFORMS` has those that there are.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.extend import backend

from .precondition import Norm, norm_by_hypotenuses, norm_by_squares
from .products import KernelProducts, Products, XlaProducts


Kernel = Literal["xla", "pallas", "auto"]


class ChooseKernel(Protocol):
    """Finds the kernel for Hermitian products of matrices; `None` if XLA's are used."""

    def __call__(
        self, m: int, n: int, dtype: jnp.dtype, kernel: Kernel
    ) -> Callable[..., jax.Array] | None: ...


def _no_kernel(m: int, n: int, dtype: jnp.dtype, kernel: Kernel) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Platform:
    """Dtypes and sizes of one kind of device, most of them measured."""

    name: str

    #: The dtype that matrices of float32 or less are iterated in unless the user says
    #: otherwise: the fastest that the platform multiplies.
    iteration_dtype: str

    #: The most entries of matrices that are iterated at once. An accelerator wants work
    #: for all its units, and no more: temporaries are several times a batch.
    batch_entries: int

    #: The most entries of separate leaves that are put together. Compilers for
    #: accelerators keep such stacks whole; on CPU they cost little, and more of them
    #: compile longer.
    stack_entries: float

    #: How norms are formed.
    norm: Norm

    #: The least rows of each of two blocks of Hermitian products. Below that the
    #: smaller products are slower by more than they save; accelerators have kernels.
    block_rows: float = math.inf

    #: How many stacks of one shape are iterated in turns.
    turns: int = 1

    #: Whether steps do better as a loop, where they are in float32 or wider.
    loops: bool = False

    #: Whether products of float32 keep all their bits by default.
    multiplies_exactly: bool = False

    #: The dtype in which libraries add to a product before they store it.
    adds_in: str | None = None

    choose_kernel: ChooseKernel = _no_kernel

    #: The least rows from which a kernel is taken. Smaller matrices have few tiles
    #: above the diagonal to save.
    kernel_rows: float = math.inf

    def products(
        self, m: int, n: int, dtype: jnp.dtype, kernel: Kernel, *, exact: bool
    ) -> Products:
        """The products for matrices of `(m, n)`, the short side first."""
        options: Any = dict(adds_for_free=dtype.name == self.adds_in)
        if kernel != "xla" and m >= self.kernel_rows:
            symmetric_product = self.choose_kernel(m, n, dtype, kernel)
            if symmetric_product is not None:
                return KernelProducts(symmetric_product, dtype, **options)
        return XlaProducts(dtype, exact=exact, block_rows=self.block_rows, **options)


#: The most separate leaves that are put together: compilers take time that grows with
#: the square of the number of arrays in one concatenation (3,336 in one took XLA 6.8 s,
#: in groups of 64 0.9 s).
STACK_LEAVES = 256


def _gpu_kernel(m: int, n: int, dtype: jnp.dtype, kernel: Kernel):
    # Rows that are no multiple of a tile leave tiles half empty.
    is_full = kernel == "pallas" or m % 128 == 0
    # They are copied 16 bytes at a time.
    is_aligned = m % 8 == 0 and n % 8 == 0
    if dtype != jnp.float16 or not is_full or not is_aligned:
        return None
    # JAX 0.8 and 0.9 lack what the kernel is made of.
    if jax.__version_info__ < (0, 10) or compute_capability() != HOPPER:
        return None
    # Pallas is slow to import, and most programs never ask for it.
    from . import hopper

    return hopper.symmetric_product


HOPPER = 9  # the major compute capability


def compute_capability() -> int:
    """The major compute capability of the GPUs to compile for; 0 of AMD's.

    A program is compiled for the GPUs of this process; where there are none, as in
    tests that only lower it, for Hopper.
    """
    device = backend.get_default_device()
    if device.platform not in ("gpu", "cuda"):
        return HOPPER
    major, *_ = str(getattr(device, "compute_capability", "")).split(".")
    return int(major) if major.isdigit() else 0


#: One matrix at a time, unless it is tiny, goes through all steps in the caches. Of
#: loops a program of 72 leaves compiled in 1.20 s in place of 1.37; it took 2 % longer.
CPU = Platform(
    name="cpu",
    iteration_dtype="float32",
    batch_entries=2**14,
    stack_entries=math.inf,
    norm=norm_by_squares,
    block_rows=128,
    loops=True,
    multiplies_exactly=True,
)

#: Singular values stay below 2, so the range of float16 suffices, and it has eight
#: times the precision of bfloat16. cuBLAS adds to a product of float16 before it stores
#: that. A kernel that leaves out half the products pays where a matrix alone has a tile
#: of 128 x 128 above its diagonal for every multiprocessor: 136 of them for 2,048 rows,
#: next to 132 multiprocessors of an H100.
GPU = Platform(
    name="gpu",
    iteration_dtype="float16",
    batch_entries=2**27,
    stack_entries=2**27,
    norm=norm_by_hypotenuses,
    adds_in="float16",
    choose_kernel=_gpu_kernel,
    kernel_rows=2048,
)

#: The matrix units multiply bfloat16. How much is iterated at once, and that two stacks
#: take turns (`take_turns`), is the best of what its compiler was asked for v5p
#: (`benchmarks/tpu_ahead_of_time.py`); none of it has run.
TPU = Platform(
    name="tpu",
    iteration_dtype="bfloat16",
    batch_entries=10 * 2**20,
    turns=2,
    stack_entries=5 * 2**20,
    norm=norm_by_squares,
)

#: By the name that JAX gives them; the last is for all others.
PLATFORMS = {"cpu": CPU, "tpu": TPU, "default": GPU}
