"""GPT-2 124M's 72 hidden matrices, and Muon for them: ours and optax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


Shapes = dict[str, tuple[int, ...]]

BLOCK: Shapes = {name: (768, 768) for name in ("query", "key", "value", "out")} | {
    "up": (768, 3072),
    "down": (3072, 768),
}


def separate(layers: int) -> Shapes:
    return {f"{i}/{k}": shape for i in range(layers) for k, shape in BLOCK.items()}


def stacked(layers: int) -> Shapes:
    return {k: (layers, *shape) for k, shape in BLOCK.items()}


def optimizers(shapes: Shapes, **ours: Any) -> dict[str, optax.GradientTransformation]:
    """The same update by both: the same coefficients, scale and weight decay."""
    axes = {k: MuonDimensionNumbers(-2, -1) for k in shapes}
    return {
        "ours": mc.muon(1e-3, dimension_numbers=axes, **ours),
        "optax": optax.contrib.muon(
            1e-3,
            weight_decay=0.1,
            consistent_rms=0.2,
            muon_weight_dimension_numbers={
                # optax counts axes from the front.
                k: MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)
                for k, shape in shapes.items()
            },
        ),
    }


def updates(shapes: Shapes, **ours: Any) -> dict[str, Callable[[], Any]]:
    def side(tx):
        state, update = tx.init(params), jax.jit(tx.update)
        return lambda: update(grads, state, params)

    keys = jax.random.split(jax.random.key(0), len(shapes))
    grads = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = jax.tree.map(jnp.ones_like, grads)
    return {name: side(tx) for name, tx in optimizers(shapes, **ours).items()}
