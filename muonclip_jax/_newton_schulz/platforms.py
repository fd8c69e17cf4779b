"""What differs between platforms: dtypes and sizes, most of them measured."""

import math
from typing import Literal


Platform = Literal["cpu", "gpu", "tpu"]

#: The dtype that matrices of float32 or less are iterated in unless the user says
#: otherwise: the fastest that the platform multiplies. Singular values stay below 2, so
#: the range of float16 suffices, and it has eight times the precision of bfloat16.
ITERATION_DTYPES = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}

#: Row blocks of Hermitian products on CPU, and the least rows of a block: below that
#: the smaller products are slower by more than they save.
BLOCKS, BLOCK_ROWS = 2, 128

#: The most entries of matrices that are iterated at once. An accelerator wants work for
#: all its units, and no more: temporaries are several times a batch. One large matrix
#: fills a CPU, and then stays in its caches.
BATCH_ENTRIES = {"cpu": 2**14, "gpu": 2**27, "tpu": 10 * 2**20}

#: How many batches of matrices of one shape are iterated in turns. A TPU multiplies
#: from fast memory, and fills it for one batch while it multiplies another.
TURNS = {"cpu": 1, "gpu": 1, "tpu": 2}

#: The most batches of a stack that are written out rather than made a loop.
UNROLLED = {"cpu": 1, "gpu": 32, "tpu": 1}

#: The most pieces of a stack that travel between devices one after the other, so that
#: all but the first and the last do so while others are iterated, and the least entries
#: of a piece: those that keep all units busy.
PIECES = {"cpu": 1, "gpu": 6, "tpu": 1}
PIECE_ENTRIES = 2**24

#: The most entries of separate leaves that are put together. Compilers for accelerators
#: keep such stacks whole; on CPU they cost little, and more of them compile longer.
STACK_ENTRIES = {"cpu": math.inf, "gpu": 2**27, "tpu": 5 * 2**20}

#: The most separate leaves that are put together: compilers take time that grows with
#: the square of the number of arrays in one concatenation.
STACK_LEAVES = 256

#: The least rows from which a kernel for symmetric products is taken. Smaller ones have
#: few tiles above the diagonal to save.
KERNEL_ROWS = {"cpu": math.inf, "gpu": 2048, "tpu": 1024}

#: What rows have to be a multiple of for `kernel="auto"` to take it on GPU: others
#: leave tiles half empty.
KERNEL_TILE = 128
