"""Matrices to orthogonalize: of given singular values, and momentum of a real model."""

import jax
import language_model
import numpy as np
import train_lm
from flax import nnx

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


def momentum(steps: int = 30) -> dict[str, np.ndarray]:
    """Muon's momentum in the first block of the example after some steps."""
    args, corpus = language_model.settings(), train_lm.Corpus()
    tx = train_lm.make_optimizer("muon", args)
    model, optimizer = language_model.trained_by(tx, args)
    for step in range(steps):
        batch = language_model.tokens(args, corpus, step)
        train_lm.train_step(model, optimizer, batch)
    block = _momentum_tree(optimizer)["blocks"][0]
    kernels = {
        "query": block["attention"]["query"],
        "up": block["up"],
        "down": block["down"],
    }
    return {
        f"{name} after {steps} steps": _matrix(leaf["kernel"])
        for name, leaf in kernels.items()
    }


def _momentum_tree(optimizer: nnx.Optimizer) -> dict:
    def is_muon(node) -> bool:
        return isinstance(node, mc.ScaleByMuonState)

    nodes = jax.tree.leaves(optimizer.opt_state, is_leaf=is_muon)
    (state,) = filter(is_muon, nodes)
    return nnx.to_pure_dict(state.mu)


def _matrix(kernel: jax.Array) -> np.ndarray:
    """Heads side by side, as Muon takes them."""
    return np.asarray(kernel).reshape(kernel.shape[0], -1)
