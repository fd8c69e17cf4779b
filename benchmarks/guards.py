"""What the compilers for TPU and GPU plan, against what is written down here.

    python benchmarks/guards.py             # what can be compiled here
    python benchmarks/guards.py --required  # all of it, as `.ci/run` does

An update that passed every test on CPU took five times the cycles on a mesh of TPUs,
and another 13 times the temporaries on a GPU. Nothing runs: figures are the compilers'
own, and have to stay within 1.2 of these, those for an H100 within these. How the
compilers are installed: `tpu_ahead_of_time.py` and `gpu_ahead_of_time.py`.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt2 import optimizers
from hlo_costs import hlo_costs
from models import models
from shares import loops_of_devices


if TYPE_CHECKING:
    from symmetric_ahead_of_time import Resources


MARGIN = 1.2
LLAMA = "Llama-1B, FSDP 64, stacked"
#: libtpu 0.0.50, JAX 0.12. The cycles are those of an exchange for each stack: parcels
#: take 3.70e6, and expose 64 MB where those exposed 146, each MB 0.009e6 cycles.
CYCLES, TPU_BYTES, SENT = 3.58e6, 137e6, 67e6
#: Of the stage of Kimi K2 as 216 leaves on an H200, by their dtype.
GPU_BYTES = {"float32": 0.9e9, "bfloat16": 0.9e9}
#: Of updates on an H100: launches, milliseconds by the model, temporaries. None is
#: loosened by the margin. JAX 0.10.2.
H100_PLANS = {
    "GPT-2's 72 matrices, separate": (180, 4.0, 0.5e9),
    "GPT-2's 72 matrices, stacked": (90, 3.5, 0.3e9),
    "108 x (2048, 7168), separate": (560, 106.0, 0.9e9),
    "108 x (2048, 7168), stacked": (340, 109.0, 0.9e9),
    "Llama-1B's 112 matrices, separate": (440, 68.0, 1.0e9),
    "the optimizer's part of a GPT-2 step, mc.muonclip": (300, 4.6, 0.1e9),
}
#: Of a thread of the symmetric kernel, whose block of 384 has 65,536 on Hopper; and of
#: that block.
MOST_REGISTERS, MOST_SHARED_BYTES = 168, 232_448
#: Of each, the elementwise kernels between products: one for each pass of two steps.
BETWEEN = (4, 4, 24, 2, 14, 6)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--required", action="store_true", help="skip nothing")
    args = options.parse_args()
    found = [*checked("libtpu", tpu, args), *checked("jax_cuda13_plugin", gpu, args)]
    print("\n".join(found))
    if any(line.startswith("too much") for line in found):
        sys.exit(1)


def checked(package: str, check, args: argparse.Namespace) -> Iterator[str]:
    if importlib.util.find_spec(package):
        yield from check()
    elif args.required:
        yield f"too much: {package} is not installed, and nothing may be skipped"
    else:
        yield f"skipped: {package} is not installed, so nothing can be compiled for it"


def tpu() -> Iterator[str]:
    """Llama-1B on 64 chips whose shardings are told."""
    from tpu_ahead_of_time import busiest, program, shardings_of, sides_of, tpu_mesh

    model = models(4)[LLAMA]
    mesh = tpu_mesh(model)
    tx = optimizers(model.shapes, shardings=shardings_of(model, mesh))["ours"]
    compiled = program(tx, model, mesh)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    trips, sides = loops_of_devices(model, "tpu"), sides_of(mesh)
    costs = busiest([hlo_costs(text, each, sides) for each in trips])
    yield within("cycles of Llama-1B on 64 chips", costs.cycles, CYCLES)
    yield within("its temporaries", memory.temp_size_in_bytes, TPU_BYTES)
    sent = sum(traffic.bytes for traffic in costs.collectives.values())
    yield within("what it sends", sent, SENT)
    kinds = sorted(costs.collectives)
    yield f"{'ok' if kinds == ['all-to-all'] else 'too much'}: it sends by {kinds}"
    order = order_of(text)
    is_right = re.fullmatch("x+L+x+", order)
    yield f"{'ok' if is_right else 'too much'}: exchanges and loops are {order}"


def order_of(text: str) -> str:
    """An x for each exchange that ends, an L for each loop over a device's share."""
    entry = text[text.index("\nENTRY") :]
    marks = {
        r" all-to-all(-done)?\(": "x",
        r" async-done\(.*all-to-all": "x",
        r" while\(.*stack\d+/": "L",
    }
    return "".join(
        mark
        for line in entry.splitlines()
        for pattern, mark in marks.items()
        if re.search(pattern, line)
    )


def gpu() -> Iterator[str]:
    """Separate leaves, which XLA would prepare at once, and products with sums."""
    from gpu_ahead_of_time import compile_update, Plan
    from gpu_compiler import process
    from gpu_plans import planned
    from symmetric_ahead_of_time import compiled, PRODUCTS

    with process() as executor:
        for name in PRODUCTS:
            yield held(name, executor.submit(compiled, name).result())
        for (name, bounds), between in zip(H100_PLANS.items(), BETWEEN, strict=True):
            plan = executor.submit(planned, name).result()
            figures = plan.launches, 1e3 * plan.seconds, plan.temporary_bytes
            kinds = ("launches", "milliseconds", "temporaries")
            for kind, figure, most in zip(kinds, figures, bounds, strict=True):
                yield within(f"{kind} of {name}", figure, most, margin=1.0)
            word = "ok" if plan.between_products == between else "too much"
            yield f"{word}: kernels between its products: {plan.between_products}"
        for dtype, most in GPU_BYTES.items():
            plan = Plan(1, False, dtype)
            update = executor.submit(compile_update, plan).result()
            name = f"temporaries of Kimi K2's stage in {dtype}"
            yield within(name, update.temporary_bytes, most)


def held(name: str, found: "Resources") -> str:
    """A symmetric kernel that spills, or whose products wait, is no candidate."""
    is_right = (
        found.registers <= MOST_REGISTERS
        and found.shared_bytes <= MOST_SHARED_BYTES
        and not found.spilled_bytes
        and not found.warnings
    )
    word = "ok" if is_right else "too much"
    return f"{word}: symmetric kernel, {name}: {found}"


def within(name: str, figure: float, written: float, margin: float = MARGIN) -> str:
    word = "ok" if figure <= margin * written else "too much"
    return f"{word}: {name}: {figure:,.0f}, written down {written:,.0f}"


if __name__ == "__main__":
    main()
