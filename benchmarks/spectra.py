"""Matrices to orthogonalize: of given singular values, and momentum of a real model."""

import functools

import jax
import numpy as np
import optax
from evidence.texts import Text
from flax import nnx
from language_model import Settings, start, train_step

import muonclip_jax as mc


SHAPE = (256, 1024)
_INDICES = np.arange(1, SHAPE[0] + 1)
SINGULAR_VALUES = {
    "power law 1/k": 1 / _INDICES,
    "1 to 1e-4": np.geomspace(1, 1e-4, SHAPE[0]),
    "1 to 1e-8": np.geomspace(1, 1e-8, SHAPE[0]),
    "rank 1": np.ones(1),
    "rank 10": np.ones(10),
}


def synthetic() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    matrices = {"Gaussian": generator.normal(size=SHAPE)}
    for name, values in SINGULAR_VALUES.items():
        left, right = (
            np.linalg.qr(generator.normal(size=(size, len(values))))[0]
            for size in SHAPE
        )
        matrices[name] = left * values @ right.T
    return {name: x.astype(np.float32) for name, x in matrices.items()}


# As examples/train_lm.py trains, at the rates that it had first.
MODEL = Settings(layers=4, width=128, heads=4, context=64)
BATCH_SIZE, WARMUP, STEPS = 32, 20, 300


def momentum(
    steps: int = 30, model: Settings = MODEL, text: Text | None = None
) -> dict[str, np.ndarray]:
    """Muon's momentum in the first block of the example after some steps."""
    text = text or Text("code", validation=15)
    tx = mc.muon(
        schedule(2e-2),
        beta=0.95,
        per_head=False,
        adam_learning_rate=schedule(6e-3),
        weight_decay=0.5,
    )
    graph, state = start(model, tx)
    step = jax.jit(functools.partial(train_step, graph, tx), donate_argnums=0)
    for i in range(steps):
        tokens = text.batch(BATCH_SIZE, model.context, seed=0, step=i)
        state, _ = step(state, tokens)
    block = _momentum_tree(state[1])["blocks"][0]
    kernels = {
        "query": block["attention"]["query"],
        "up": block["up"],
        "down": block["down"],
    }
    return {
        f"{name} after {steps} steps": _matrix(leaf["kernel"])
        for name, leaf in kernels.items()
    }


def schedule(peak: float) -> optax.Schedule:
    """The rate rises linearly, and falls so to zero at the end."""
    rise = optax.linear_schedule(peak / WARMUP, peak, WARMUP)
    fall = optax.linear_schedule(peak, 0.0, STEPS - WARMUP)
    return optax.join_schedules([rise, fall], [WARMUP])


def _momentum_tree(opt_state: optax.OptState) -> dict:
    def is_muon(node) -> bool:
        return isinstance(node, mc.ScaleByMuonState)

    nodes = jax.tree.leaves(opt_state, is_leaf=is_muon)
    (state,) = filter(is_muon, nodes)
    return nnx.to_pure_dict(state.mu)


def _matrix(kernel: jax.Array) -> np.ndarray:
    """Heads side by side, as Muon takes them."""
    return np.asarray(kernel).reshape(kernel.shape[0], -1)
