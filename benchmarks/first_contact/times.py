"""Times of whole updates, and what Newton-Schulz does of the peak.

Sides take turns, and figures are medians. The stage is a pipeline's of Kimi K2. The
share of the peak counts Hermitian products as if they were formed whole, so that it may
exceed what the device does.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from alternating import alternate, ratio, Sides
from gpt2 import BLOCK, Layout, Shapes, updates, updates_by
from internals import solver
from models import KIMI_K2_STAGE, llama, Stage
from optax.contrib import MuonDimensionNumbers
from optax_main import as_on_main

import muonclip_jax as mc

from .rounding import normal, own_dtype, platform
from .rows import first_line, Timed


class Sizes(NamedTuple):
    stage: Stage
    layers: int  # of GPT-2
    shrink: int  # how many times smaller its matrices are
    product: int  # rows of the square product that sets the peak
    batches: tuple[float, ...]  # as shares of what the package takes at once
    half_rows: int  # the least of each half of Hermitian products
    repeats: int


FULL = Sizes(
    stage=KIMI_K2_STAGE,
    layers=12,
    shrink=1,
    product=8192,
    batches=(1 / 4, 2),
    half_rows=512,
    repeats=7,
)
TINY = Sizes(
    stage=Stage(6, (32, 112)),
    layers=1,
    shrink=24,
    product=256,
    batches=(1 / 2, 2),
    half_rows=8,
    repeats=2,
)
#: Gradients, momentum and updates of both optimizers, params, and temporaries.
COPIES = 10
CHAIN = 4


@jax.jit
def chain(x: jax.Array) -> jax.Array:
    """Several products: one alone would pay for the fresh memory of its result."""
    return functools.reduce(jnp.matmul, [x] * (CHAIN + 1))


def newton_schulz_flops(shapes: Shapes) -> float:
    """Twice the multiplications; those of XLA's count differ between backends."""
    ours = solver(platform())
    return sum(
        2 * math.prod(stack) * ours.cost((min(m, n), max(m, n)), jnp.dtype("float32"))
        for *stack, m, n in shapes.values()
    )


class Times:
    """The peak is measured first, for the shares of the others."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.peak: float | None = None

    def peak_of_products(self) -> Iterator[Timed]:
        size = self.sizes.product
        x = (normal(0, size, size) / size**0.5).astype(own_dtype())
        sides = {"product": functools.partial(chain, x)}
        seconds = statistics.median(alternate(sides, self.sizes.repeats)["product"])
        self.peak = CHAIN * 2 * size**3 / seconds
        name = f"products {size} x {size} in {own_dtype()}"
        yield Timed(f"{name}: {self.peak / 1e12:.3g} TFLOP/s", 1e3 * seconds / CHAIN)

    def against(
        self, name: str, sides: Sides, flops: float | None = None
    ) -> Iterator[Timed]:
        """The side "ours" against each of the others, whose failures are cells."""
        failures = {peer: why for peer, run in sides.items() if (why := failure(run))}
        if "ours" in failures:
            raise RuntimeError(f"{name}: {failures['ours']}")
        running = {peer: run for peer, run in sides.items() if peer not in failures}
        times = alternate(running, self.sizes.repeats)
        ours = statistics.median(times["ours"])
        share = flops / ours / self.peak if flops and self.peak else None
        for peer in sides:
            row = Timed(f"{name} against {peer}", 1e3 * ours, share_of_peak=share)
            if peer in failures:
                yield row._replace(peer=failures[peer])
            elif peer != "ours":
                theirs = 1e3 * statistics.median(times[peer])
                faster = ratio(times, peer, "ours")
                yield row._replace(peer=theirs, times_faster=faster)

    def stage(self, layout: Layout) -> Iterator[Timed]:
        stage = that_fits(self.sizes.stage)
        shapes = stage.shapes(layout)
        name = f"{stage.matrices} x {stage.shape}, {layout.__name__}"
        sides = updates_by(shapes, directions(shapes))
        yield from self.against(name, sides, newton_schulz_flops(shapes))

    def gpt2(self, layout: Layout) -> Iterator[Timed]:
        name, shapes = self.gpt2_shapes(layout)
        yield from self.against(name, updates(shapes), newton_schulz_flops(shapes))

    def gpt2_shapes(self, layout: Layout) -> tuple[str, Shapes]:
        shapes = layout(self.sizes.layers, self.smaller(BLOCK))
        name = f"GPT-2's {6 * self.sizes.layers} matrices, {layout.__name__}"
        return name, shapes

    def llama(self, layout: Layout) -> Iterator[Timed]:
        name, shapes = self.llama_shapes(layout)
        sides = updates_by(shapes, directions(shapes))
        yield from self.against(name, sides, newton_schulz_flops(shapes))

    def llama_shapes(self, layout: Layout) -> tuple[str, Shapes]:
        """Llama 3.2 1B has 16 layers."""
        layers = 4 * self.sizes.layers // 3
        shapes = layout(layers, self.smaller(llama(2048, 512, 8192)))
        return f"Llama-1B's {7 * layers} matrices, {layout.__name__}", shapes

    def smaller(self, block: Shapes) -> Shapes:
        return {
            k: (m // self.sizes.shrink, n // self.sizes.shrink)
            for k, (m, n) in block.items()
        }


def failure(run: Callable[[], Any]) -> str | None:
    try:
        jax.block_until_ready(run())
    except Exception as error:
        return first_line(error)
    return None


def that_fits(stage: Stage) -> Stage:
    """With as many of its matrices as leave room for both optimizers."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    most = memory / (COPIES * 4 * math.prod(stage.shape))
    return stage._replace(matrices=max(1, int(min(most, stage.matrices))))


def directions(shapes: Shapes, **ours: Any) -> dict[str, optax.GradientTransformation]:
    """Without weight decay and rate."""
    numbers = {
        name: MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)
        for name, shape in shapes.items()
    }
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    mine = mc.scale_by_muon(dimension_numbers=numbers, **ours)
    return {"ours": mine, "optax": as_on_main(theirs)}
