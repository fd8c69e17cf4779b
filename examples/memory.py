"""Freed memory that stays with the process, for training on a CPU."""

import ctypes
import platform


#: Of glibc's malloc.h: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD.
SETTINGS = {-8: 1, -3: 2**31 - 1, -1: 2**31 - 1, -2: 2**28}


def keep_freed_memory() -> None:
    """Has glibc hand out freed buffers again, instead of giving them to the system.

    XLA allocates the buffers of every step anew. Fresh pages are cleared by the system
    when they are first written, which took a sixth of a step. To be called before JAX
    starts threads; elsewhere than with glibc it does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        for name, value in SETTINGS.items():
            ctypes.CDLL(None).mallopt(name, value)
