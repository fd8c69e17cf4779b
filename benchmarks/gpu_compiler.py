"""NVIDIA's compiler for GPUs that are not there, in processes of their own."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import jax


@contextlib.contextmanager
def process() -> Iterator[Executor]:
    """A process that compiles, and finds the compiler's programs."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _prepare) as executor:
        yield executor


def _prepare() -> None:
    os.environ["PATH"] = os.pathsep.join([str(programs()), os.environ["PATH"]])
    jax.config.update("jax_enable_compilation_cache", False)


def programs() -> Path:
    """The folder with ptxas and nvdisasm of the packages, whatever else there is.

    **Raises:** `FileNotFoundError` if one of them is not installed.
    """
    import nvidia  # pyright: ignore[reportMissingImports]

    folders = [f for path in nvidia.__path__ for f in Path(path).glob("*/bin")]
    for folder in folders:
        if all((folder / name).exists() for name in ("ptxas", "nvdisasm")):
            return folder
    raise FileNotFoundError(
        "ptxas and nvdisasm are needed: pip install --no-deps nvidia-cuda-nvcc "
        "nvidia-nvvm nvidia-cuda-nvdisasm, of one version"
    )
