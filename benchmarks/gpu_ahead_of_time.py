"""Compiles Muon's update for NVIDIA H200, without a GPU.

    pip install -e '.[examples]'
    pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V  # V of jaxlib
    pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
    JAX_PLATFORMS=cpu python benchmarks/gpu_ahead_of_time.py

The update of `scale_by_muon` on the stage of Kimi K2 that one device of its pipeline
has: 216 matrices of 2,048 x 7,168. Launches, arithmetic and bytes are those of the
compiled program. The least time is what these take at rates seen on an H200, without
cache and exchanges: a bound to compare plans with, and no forecast, since nothing runs.
"""

import functools
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpt2 import separate, stacked
from gpu_chips import COMPILER_OPTIONS, gpus, H200
from gpu_compiler import process
from gpu_program import exchanged_bytes, Work, work_by_kind
from hlo_program import parse
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from models import KIMI_K2_STAGE
from optax.contrib import MuonDimensionNumbers
from tables import parser, Report, Table

import muonclip_jax as mc


COLUMNS = {
    "GPUs": "",
    "params": "",
    "launches": ",.0f",
    "TFLOP": ".1f",
    "GB, elementwise": ",.0f",
    "least ms": ".1f",
    "temporaries, GB": ".2f",
    "exchanged, GB": ".2f",
    "trace and compile, s": ".0f",
}


class Plan(NamedTuple):
    """One update to compile."""

    gpus: int
    stacked: bool
    dtype: str

    @property
    def leaves(self) -> str:
        form = "stacked" if self.stacked else f"{KIMI_K2_STAGE.matrices} leaves"
        return f"{form}, {self.dtype}"


class Compiled(NamedTuple):
    """What became of it, on one of the GPUs."""

    work: dict[str, Work]
    temporary_bytes: int
    exchanged_bytes: int
    seconds: float

    @property
    def total(self) -> Work:
        kinds = ("products", "elementwise", "other")
        of_kinds = (self.work.get(kind, Work()) for kind in kinds)
        return functools.reduce(Work.plus, of_kinds)


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    table = report.table("One update, compiled for NVIDIA H200", COLUMNS)
    choices = itertools.product((1, 8), (False, True), ("float32", "bfloat16"))
    plans = [Plan(*choice) for choice in choices]
    with process() as executor:
        compiled = executor.map(compile_update, plans)
        for plan, update in zip(plans, compiled, strict=True):
            add_row(table, plan, update)
    report.write()


def compile_update(plan: Plan) -> Compiled:
    """In a process for the chip."""
    params, shardings = stage(plan)
    tx = mc.scale_by_muon(
        shardings=shardings,
        dimension_numbers=dict.fromkeys(params, MuonDimensionNumbers(-2, -1)),
    )
    state = _placed(jax.eval_shape(tx.init, params), params)
    start = time.perf_counter()
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    compiled = update.lower(params, state).compile(compiler_options=COMPILER_OPTIONS)
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    program = parse(text)
    return Compiled(
        work_by_kind(program, H200),
        memory.temp_size_in_bytes,
        exchanged_bytes(program),
        seconds,
    )


def stage(plan: Plan) -> tuple[Any, Any]:
    """Params by shape, dtype and place, sharded if there is a mesh."""
    axes = (AxisType.Auto,)
    mesh = Mesh(np.array(gpus(plan.gpus)), ("fsdp",), axis_types=axes)
    is_cut = plan.gpus > 1
    rows = PartitionSpec("fsdp") if is_cut else PartitionSpec()
    if plan.stacked and is_cut:
        rows = PartitionSpec(None, "fsdp")
    sharding = NamedSharding(mesh, rows)
    shapes = KIMI_K2_STAGE.shapes(stacked if plan.stacked else separate)
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(plan.dtype), sharding=sharding)
        for name, shape in shapes.items()
    }
    return params, sharding if is_cut else None


def _placed(state: Any, params: Any) -> Any:
    sharding = next(iter(params.values())).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if x.ndim else whole
        ),
        state,
    )


def add_row(table: Table, plan: Plan, compiled: Compiled) -> None:
    total = compiled.total
    elementwise = compiled.work.get("elementwise", Work())
    table.add(
        str(plan.gpus),
        plan.leaves,
        total.launches,
        total.flops / 1e12,
        elementwise.bytes / 1e9,
        1e3 * total.seconds,
        compiled.temporary_bytes / 1e9,
        compiled.exchanged_bytes / 1e9 or None,
        compiled.seconds,
    )


if __name__ == "__main__":
    main()
