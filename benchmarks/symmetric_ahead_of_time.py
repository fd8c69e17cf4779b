"""Compiles the symmetric kernel for NVIDIA Hopper, sm_90a, without a GPU.

    JAX_PLATFORMS=cpu python benchmarks/symmetric_ahead_of_time.py

Registers, spills and serialized products are what ptxas reports, and shared memory is
what Mosaic GPU asks for at the launch. Nothing runs: `accelerator.py --candidates` does
that on a card. How the compiler is installed: `gpu_ahead_of_time.py`.
"""

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
from first_contact.symmetric_kernel import symmetric_product
from gpu_chips import COMPILER_OPTIONS, gpus
from gpu_compiler import process
from tables import parser, Report


COLUMNS = {
    "product": "",
    "registers": "d",
    "threads": "d",
    "spilled, bytes": "d",
    "warnings": "",
    "shared memory, bytes": ",d",
}
ROWS, WIDTH, COUNT = 2048, 7168, 4
#: Whether c is added, and how many products are in flight.
PRODUCTS = {
    "x x'": (False, 0),
    "c + alpha r r": (True, 0),
    "x x', one in flight": (False, 1),
    "c + alpha r r, one in flight": (True, 1),
}


class Resources(NamedTuple):
    """What the compiler gives a kernel."""

    registers: int  # of a thread, where the kernel begins
    threads: int
    spilled_bytes: int  # of a thread, stored and loaded
    warnings: tuple[str, ...]  # those of serialized products among them
    shared_bytes: int


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    table = report.table("The symmetric kernel, compiled for sm_90a", COLUMNS)
    with process() as executor:
        for name, found in zip(PRODUCTS, executor.map(compiled, PRODUCTS), strict=True):
            table.add(
                name,
                found.registers,
                found.threads,
                found.spilled_bytes,
                "; ".join(found.warnings) or "none",
                found.shared_bytes,
            )
    report.write()


def compiled(name: str) -> Resources:
    """In a process for the chip."""
    has_sum, in_flight = PRODUCTS[name]
    folder = Path(_written().name)
    (chip,) = gpus(1, "H100")
    x = jax.ShapeDtypeStruct(
        (COUNT, ROWS, ROWS if has_sum else WIDTH),
        "float16",
        sharding=jax.sharding.SingleDeviceSharding(chip),
    )

    def product(x: jax.Array) -> jax.Array:
        c, alpha = (x, 2.0) if has_sum else (None, 1.0)
        return symmetric_product(x, x, c, alpha=alpha, in_flight=in_flight)

    jax.jit(product).lower(x).compile(compiler_options=COMPILER_OPTIONS)
    texts = {file.suffix: file.read_text() for file in folder.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    return resources(texts[".ptxas"], texts[".ptx"], texts[".log"])


@functools.cache
def _written() -> tempfile.TemporaryDirectory:
    """The folder that Mosaic GPU writes to: it asks for it once in a process."""
    folder = tempfile.TemporaryDirectory()
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder.name
    return folder


def resources(ptxas: str, ptx: str, passes: str) -> Resources:
    """Read out of what ptxas says, the program it was given, and Mosaic's passes.

    **Raises:** `ValueError` if one of them does not say it of one kernel.
    """
    spilled = r"(\d+) bytes spill stores, (\d+) bytes spill loads$"
    stored, loaded = map(int, _only(spilled, ptxas))
    (registers,) = _only(r"Used (\d+) registers", ptxas)
    (threads,) = _only(r"^\.(?:max|req)ntid (\d+), 1, 1", ptx)
    (shared,) = _only(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    # "(C7511) Potential Performance Loss: ..." and others that have a number.
    numbered = re.findall(r"^ptxas (?:info|warning) *: \((C\d+)\)", ptxas, re.MULTILINE)
    unnumbered = re.findall(r"^ptxas warning *: ([^(]{,60})", ptxas, re.MULTILINE)
    warnings = (*numbered, *unnumbered)
    return Resources(
        int(registers), int(threads), stored + loaded, warnings, int(shared)
    )


def _only(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of the pattern, which are the same wherever it is found."""
    found = {match.groups() for match in re.finditer(pattern, text, re.MULTILINE)}
    if len(found) != 1:
        raise ValueError(f"{len(found)} different matches of {pattern!r}")
    return found.pop()


if __name__ == "__main__":
    main()
