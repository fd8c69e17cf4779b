"""What NVIDIA's compiler makes of the kernels for symmetric products, without a GPU.

    pip install -e '.[examples]'
    pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V  # V of jaxlib
    pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
    JAX_PLATFORMS=cpu python benchmarks/gpu_kernels.py

Registers of a thread, spills and warnings are those that ptxas reports; C7510 to C7514
say that it serializes products. Products and copies by TMA are counted in the machine
code. How many blocks a multiprocessor holds follows from registers, threads and shared
memory.
"""

import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from candidates import hopper
from gpu_chips import Chip, CHIPS, COMPILER_OPTIONS, gpus
from gpu_compiler import process_for, programs
from tables import parser, Report


DUMP = "MOSAIC_GPU_DUMP_TO"  # the variable with a folder for what is compiled
COLUMNS = {
    "product": "",
    "dtype": "",
    "threads": "",
    "registers": "",
    "shared memory, bytes": ",",
    "blocks a multiprocessor": "",
    "spills, bytes": "",
    "warnings": "",
    "wgmma": "",
    "tcgen05": "",
    "loads by TMA": "",
    "stores by TMA": "",
}
INSTRUCTIONS = ("HGMMA", "UTCHMMA", "UTMALDG", "UTMASTG")  # the last columns
MATRICES = 4


class Product(NamedTuple):
    """A product of stacks of `(m, n)`."""

    m: int
    n: int
    has_addend: bool

    def __str__(self) -> str:
        suffix = ", addend" if self.has_addend else ""
        return f"{self.m} x {self.n}{suffix}"


#: Those of Kimi K2's experts; large, ragged and small ones.
PRODUCTS = (
    Product(2048, 7168, has_addend=False),
    Product(2048, 2048, has_addend=True),
    Product(8192, 8192, has_addend=True),
    Product(2056, 2056, has_addend=True),
    Product(40, 40, has_addend=True),
    Product(1000, 1992, has_addend=False),
)


class MachineCode(NamedTuple):
    """What became of a kernel."""

    threads: int
    registers: int  # of a thread
    shared_bytes: int
    spilled_bytes: int
    warnings: set[str]
    instructions: list[int]  # of each of INSTRUCTIONS

    @property
    def blocks(self) -> int:
        """How many a multiprocessor of Hopper or Blackwell holds at once."""
        registers = -(-self.registers // 8) * 8 * self.threads
        shared_bytes = self.shared_bytes + 1024  # which the system takes
        return min(65536 // registers, 2048 // self.threads, 233472 // shared_bytes)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    args = options.parse_args()
    report = Report(args)
    for chip in args.chips:
        add_kernels(report, CHIPS[chip])
    report.write()


def add_kernels(report: Report, chip: Chip) -> None:
    title = f"Kernels, compiled for {chip.name} by ptxas {ptxas_version()}"
    table = report.table(title, COLUMNS)
    cases = list(itertools.product([chip], PRODUCTS, ("float16", "bfloat16")))
    with (
        tempfile.TemporaryDirectory() as folder,
        process_for(chip, **{DUMP: folder}) as process,
    ):
        found = process.map(compile_kernel, *zip(*cases, strict=True))
        for (_, product, dtype), code in zip(cases, found, strict=True):
            table.add(str(product), dtype, *cells(code))


def ptxas_version() -> str:
    printed = subprocess.check_output([programs() / "ptxas", "--version"], text=True)
    return printed.split(" V")[1].split()[0]


def cells(code: MachineCode) -> list[Any]:
    return [
        code.threads,
        code.registers,
        code.shared_bytes,
        code.blocks,
        code.spilled_bytes,
        "; ".join(sorted(code.warnings)) or "none",
        *code.instructions,
    ]


def compile_kernel(chip: Chip, product: Product, dtype: str) -> MachineCode:
    """In a process for the chip."""
    here = jax.sharding.SingleDeviceSharding(gpus(chip)[0])

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((MATRICES, *shape), dtype, sharding=here)

    def call(x, addend=None, scale=1.0, shift=0.0):
        return hopper.symmetric_product(x, x, addend=addend, scale=scale, shift=shift)

    factor = array(dtype="float32")
    others = (array(product.m, product.m), factor, factor)
    operands = (array(product.m, product.n), *others * product.has_addend)
    jax.jit(call).lower(*operands).compile(compiler_options=COMPILER_OPTIONS)
    return read_dump(Path(os.environ[DUMP]))


def read_dump(folder: Path) -> MachineCode:
    """Of the only kernel there; empties the folder."""
    dumped = {file.suffix: file.read_text() for file in folder.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    return machine_code(dumped[".log"], dumped[".ptxas"], dumped[".sass_ctrl"])


def machine_code(passes: str, report: str, code: str) -> MachineCode:
    """Reads the launch out of MLIR, and then ptxas' report and the machine code."""
    launch = re.search(
        r"gpu\.launch .*threads\(.*?\) in \(\S+ = %c(\d+).*"
        r"dynamic_shared_memory_size %c(\d+)",
        passes,
    )
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    warnings = re.findall(r"\((C\d+)\)|warning\s*: (.*)", report)
    assert launch and registers and spilled
    return MachineCode(
        int(launch[1]),
        int(registers[1]),
        int(launch[2]),
        int(spilled[1]),
        {number or text for number, text in warnings},
        [len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS],
    )


if __name__ == "__main__":
    main()
