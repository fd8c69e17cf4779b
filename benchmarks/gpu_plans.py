"""Plans of Muon's update for an NVIDIA H100, by its compiler, without a GPU.

    JAX_PLATFORMS=cpu python benchmarks/gpu_plans.py

The updates that an H100 has measured (`accelerator.py`), as they are planned now. The
time is a model: each kernel takes what its arithmetic or its bytes take at rates seen
on that card, and 3 us. It explained all five updates of the code that was measured
there, 502ee87, within 9 %. How the compiler is installed: `gpu_ahead_of_time.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from first_contact.training import (
    batch,
    GPT2,
    gradient,
    optimizers,
    shapes_and_loss,
)
from gpt2 import separate, Shapes, stacked
from gpu_chips import COMPILER_OPTIONS, gpus, H100
from gpu_compiler import process
from gpu_program import between_products, Work, work_by_kind
from hlo_program import parse
from language_models import drawn
from models import llama
from optax.contrib import MuonDimensionNumbers
from tables import parser, Report

import muonclip_jax as mc


EXPERT = {"expert": (2048, 7168)}
UPDATES: dict[str, Shapes] = {
    "GPT-2's 72 matrices, separate": separate(12),
    "GPT-2's 72 matrices, stacked": stacked(12),
    "108 x (2048, 7168), separate": separate(108, EXPERT),
    "108 x (2048, 7168), stacked": stacked(108, EXPERT),
    "Llama-1B's 112 matrices, separate": separate(16, llama(2048, 512, 8192)),
}
STEP = "the optimizer's part of a GPT-2 step, mc.muonclip"
COLUMNS = {
    "update": "",
    "launches": "d",
    "between products": "d",
    "TFLOP": ".1f",
    "GB, elementwise": ".1f",
    "model, ms": ".1f",
    "temporaries, GB": ".2f",
}


class Planned(NamedTuple):
    """The compiler's plan of one update."""

    launches: int
    between_products: int
    flops: float
    elementwise_bytes: float
    seconds: float
    temporary_bytes: int


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    table = report.table("One update, planned for an NVIDIA H100", COLUMNS)
    with process() as executor:
        names = [*UPDATES, STEP]
        for name, plan in zip(names, executor.map(planned, names), strict=True):
            table.add(
                name,
                plan.launches,
                plan.between_products,
                plan.flops / 1e12,
                plan.elementwise_bytes / 1e9,
                1e3 * plan.seconds,
                plan.temporary_bytes / 1e9,
            )
    report.write()


def planned(name: str) -> Planned:
    """In a process for the chip."""
    (chip,) = gpus(1, "H100")
    place = jax.sharding.SingleDeviceSharding(chip)
    update, *arguments = step_of_gpt2() if name == STEP else update_of(UPDATES[name])
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    compiled = jax.jit(update).lower(*given).compile(compiler_options=COMPILER_OPTIONS)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    program = parse(text)
    work = work_by_kind(program, H100)
    total = Work()
    for each in work.values():
        total = total.plus(each)
    return Planned(
        int(total.launches),
        between_products(program),
        total.flops,
        work["elementwise"].bytes,
        total.seconds,
        memory.temp_size_in_bytes,
    )


def update_of(shapes: Shapes) -> tuple[Any, ...]:
    """An update and its arguments, by shape and dtype."""
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    tx = mc.scale_by_muon(
        dimension_numbers=dict.fromkeys(params, MuonDimensionNumbers(-2, -1))
    )
    return tx.update, params, jax.eval_shape(tx.init, params), params


def step_of_gpt2() -> tuple[Any, ...]:
    """All that an optimizer does in a step, with the largest logits."""
    params = jax.eval_shape(lambda: drawn(shapes_and_loss(GPT2)[0]))
    tx = optimizers(GPT2)["mc.muonclip"].tx
    tokens = jax.eval_shape(lambda: batch(GPT2, 0))
    _, stats, grads = jax.eval_shape(gradient(GPT2, True), params, tokens)

    def update(grads: Any, state: Any, params: Any, stats: Any) -> Any:
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state

    return update, grads, jax.eval_shape(tx.init, params), params, stats


if __name__ == "__main__":
    main()
