"""NVIDIA's compiler for GPUs that are not there, in processes of their own."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import jax
from gpu_chips import Chip
from jax.experimental.mosaic.gpu import core


@contextlib.contextmanager
def process_for(chip: Chip, **environment: str) -> Iterator[Executor]:
    """A process that compiles for one chip.

    The compiler of kernels takes architecture and environment from the first kernel of
    a process, and keeps to them.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _prepare, (chip, environment)) as process:
        yield process


def _prepare(chip: Chip, environment: dict[str, str]) -> None:
    path = os.pathsep.join([str(programs()), os.environ["PATH"]])
    os.environ.update(environment, PATH=path)
    jax.config.update("jax_enable_compilation_cache", False)
    # Kernels take the architecture of the default device, which is a CPU here.
    architecture = (chip.capability, 0)
    core._infer_arch = lambda: architecture  # pyright: ignore[reportAttributeAccessIssue]


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
