"""GPT-2 124M's 72 hidden matrices, and Muon for them: ours and optax's."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers
from optax_main import as_on_main, RELEASED

import muonclip_jax as mc


Shapes = dict[str, tuple[int, ...]]
#: Leaves for a number of layers with one block each: `separate` or `stacked`.
Layout = Callable[[int, Shapes], Shapes]

BLOCK: Shapes = {name: (768, 768) for name in ("query", "key", "value", "out")} | {
    "up": (768, 3072),
    "down": (3072, 768),
}


def separate(layers: int, block: Shapes = BLOCK) -> Shapes:
    return {f"{i}/{k}": shape for i in range(layers) for k, shape in block.items()}


def stacked(layers: int, block: Shapes = BLOCK) -> Shapes:
    return {k: (layers, *shape) for k, shape in block.items()}


def optimizers(
    shapes: Shapes,
    *,
    adam: Collection[str] = (),
    mu_dtype: Any = None,
    **ours: Any,
) -> dict[str, optax.GradientTransformation]:
    """The same update by ours and optax's: coefficients, scale and weight decay.

    Leaves named in `adam` are no matrices.
    """

    def numbers(axes: Callable[[tuple[int, ...]], MuonDimensionNumbers]) -> Any:
        return {k: None if k in adam else axes(shape) for k, shape in shapes.items()}

    mine = mc.muon(
        1e-3,
        dimension_numbers=numbers(lambda shape: MuonDimensionNumbers(-2, -1)),
        mu_dtype=mu_dtype,
        **ours,
    )
    theirs = optax.contrib.muon(
        1e-3,
        weight_decay=0.1,
        consistent_rms=0.2,
        mu_dtype=mu_dtype,
        # optax counts axes from the front.
        muon_weight_dimension_numbers=numbers(
            lambda shape: MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)
        ),
    )
    return {"ours": mine, "optax": as_on_main(theirs), RELEASED: theirs}


def updates(shapes: Shapes, **ours: Any) -> dict[str, Callable[[], Any]]:
    return updates_by(shapes, optimizers(shapes, **ours))


def updates_by(
    shapes: Shapes,
    optimizers: Mapping[str, optax.GradientTransformation],
    shardings: Any = None,
) -> dict[str, Callable[[], Any]]:
    """Calls of compiled updates, on the same gradients and params."""

    def side(tx):
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        return lambda: update(grads, state, params)

    grads = jax.device_put(gradients(shapes), shardings)
    params = jax.tree.map(jnp.ones_like, grads)
    return {name: side(tx) for name, tx in optimizers.items()}


def gradients(shapes: Shapes) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
