"""Candidates of the field against their definitions, in NumPy and float64."""

import jax
import numpy as np
import optax
import pytest
from evidence.candidates import GAINS
from evidence.optimizers import hyperparameters, make_optimizer
from evidence.run import Run
from helpers import assert_close, few, tolerance


SHAPES = {
    "embed": {"embedding": (64, 8)},
    "query": {"kernel": (8, 2, 4)},  # a matrix for each of two heads
    "out": {"kernel": (2, 4, 8)},  # one matrix, whose rows are two axes
    "up": {"kernel": (8, 32)},
    "norm": {"scale": (8,)},
    "head": {"kernel": (8, 64)},
}
MATRICES, WORDS = ("query", "out", "up"), ("embed", "head")
RATE, ADAM_RATE, DECAY, BETA = 0.1, 0.02, 0.3, 0.9
RUN = Run(
    matrices="per_head",
    learning_rate=RATE,
    adam_learning_rate=ADAM_RATE,
    weight_decay=DECAY,
    beta=BETA,
    schedule="constant",
    warm_up=0.0,
)
# Sums of at most 256 products, eleven one after the other, each a norm's square, and
# differences of results that are at most four times as large.
CLOSE = tolerance(np.float32, size=256, slopes=(1.0,) * 11, condition=4.0)


def drawn(seed):
    """Params, or gradients in which a word was not seen and another hardly."""
    draws = np.random.default_rng(seed)

    def leaf(shape):
        return draws.standard_normal(shape).astype(np.float32)

    tree = jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    if seed:
        for words in (tree["embed"]["embedding"], tree["head"]["kernel"].T):
            words[5], words[6] = 0, 1e-4 * words[6]
    return tree


def steps_of(candidate, count):
    """The params before each of some steps, and their updates."""
    run = RUN.but(candidate=candidate)
    tx, params = make_optimizer(run, hyperparameters(run)[0]), drawn(0)
    state, update, steps = tx.init(params), jax.jit(tx.update), []
    for i in range(count):
        updates, state = update(drawn(i + 1), state, params)
        steps.append((params, updates))
        params = optax.apply_updates(params, updates)
    return steps


@pytest.fixture(scope="module")
def muon():
    """The first step of Muon itself, from where the candidates begin."""
    return steps_of("", 1)[0][1]


def without(tree, names):
    return {name: leaf for name, leaf in tree.items() if name not in names}


def matrices(name, *trees):
    """The matrices of a leaf of every tree in float64, `(fan_in, fan_out)`."""
    leaves = [np.asarray(tree[name]["kernel"], np.float64) for tree in trees]
    if name == "query":
        return zip(*(x.swapaxes(0, 1) for x in leaves), strict=True)
    return [tuple(x.reshape(-1, x.shape[-1]) for x in leaves)]


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.more
@pytest.mark.parametrize("name", few(GAINS, "SAMuon-lite 1.5"))
def test_samuon_lite_holds_back_the_first_direction_alone(name, muon):
    gain = float(name.split()[-1])
    params, ours = steps_of(name, 1)[0]
    for leaf in MATRICES:
        for found, update, weights, momentum in matrices(
            leaf, ours, muon, params, drawn(1)
        ):
            u = unit(momentum @ momentum[np.argmax((momentum**2).sum(axis=1))])
            v = unit(u @ momentum)
            decay = -RATE * DECAY * weights
            step = update - decay
            expected = gain * step - (gain - 1) * (u @ step @ v) * np.outer(u, v)
            assert_close(found, expected + decay, CLOSE)
    assert_close(without(ours, MATRICES), without(muon, MATRICES), CLOSE)


def sinkhorn_step(gradients):
    """DeepSeek V4.1's update of a matrix whose rows are words."""
    momentum = sum(BETA**i * g for i, g in enumerate(reversed(gradients)))
    x = gradients[-1] + BETA * momentum
    lengths = np.sqrt((x**2).sum(axis=1))
    active = lengths > 1e-3 * lengths.mean()
    assert active.sum() == len(x) - 2
    x = x[active]
    for i in range(11):
        x = x / np.sqrt((x**2).sum(axis=1 - i % 2, keepdims=True))
    update = np.zeros_like(momentum)
    update[active] = 0.18 * x.shape[1] ** 0.5 * x
    return update


@pytest.mark.more
def test_sinkhorn_is_the_step_of_embedding_and_head(muon):
    steps = steps_of("sinkhorn", 2)
    for i, (params, ours) in enumerate(steps):
        trees = [params, ours, *map(drawn, range(1, i + 2))]
        embeddings = [tree["embed"]["embedding"] for tree in trees]
        heads = [tree["head"]["kernel"].T for tree in trees]
        for weights, update, *gradients in (embeddings, heads):
            doubles = [np.asarray(g, np.float64) for g in gradients]
            expected = sinkhorn_step(doubles) + DECAY * np.asarray(weights)
            assert_close(update, -ADAM_RATE * expected, CLOSE)
    assert_close(without(steps[0][1], WORDS), without(muon, WORDS), CLOSE)


def test_hyperball_turns_matrices_and_keeps_their_norm(muon):
    steps = steps_of("hyperball", 3)
    params, ours = steps[0]
    for leaf in MATRICES:
        for found, update, weights in matrices(leaf, ours, muon, params):
            radius = np.linalg.norm(weights)
            direction = unit(update + RATE * DECAY * weights)  # points downhill
            expected = radius * unit(weights + RATE * radius * direction) - weights
            assert_close(found, expected, CLOSE)
        after = optax.apply_updates(*steps[-1])
        for weights, turned in matrices(leaf, params, after):
            share = np.linalg.norm(turned) / np.linalg.norm(weights)
            assert share == pytest.approx(1, abs=len(steps) * CLOSE)
    assert_close(without(ours, MATRICES), without(muon, MATRICES), CLOSE)
