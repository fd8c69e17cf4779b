"""The Muons of nanochat and modded-nanogpt, against their steps in float64."""

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT
from test_manual import blocks
from test_torch_optimizers import DION, POLAR_EXPRESS

import muonclip_jax as mc


pytestmark = [pytest.mark.usefixtures("fast_compilation"), pytest.mark.more]

STEPS, SEED = 60, 18
DECAY = {"nanochat": 0.28, "modded_nanogpt": 1.2}
#: `(outputs, inputs)`, as PyTorch has weights, and the size of their gradients.
LEAVES = {
    "square": ((16, 16), 1.0),
    "tall": ((24, 12), 1.0),
    "wide": ((12, 24), 1.0),
    "small": ((24, 12), 1e-3),
    "tiny": ((24, 12), 1e-6),
    "zeros": ((24, 12), 1.0),  # at first, and then in some rows
    "large": ((128, 32), 1.0),
}
SMALL = tuple(LEAVES)[:-1]
# The steps are those of nanochat/optim.py (commit 92d63d4) and of modded-nanogpt's
# train_gpt.py (f411b3d3).


def rate(step):
    return 0.023 * (1 - step / (2 * STEPS))


def beta(step):
    return 0.85 + 0.1 * jnp.minimum(step / 40, 1)


def norm(x, axis=None):
    return np.linalg.norm(x, axis=axis, keepdims=True)


def polar_express(x, safety):
    x = x / (norm(x) * safety + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def modded_nanogpt(g):
    return polar_express(g, 1.02)


def nanochat(g):
    rows = np.maximum(norm(g, axis=-1), 1e-6)
    x = polar_express(g * norm(g) / len(g) ** 0.5 / rows, 1.01)
    return x * min(x.shape) ** 0.5 / np.maximum(norm(x), 1e-6)


ORTHOGONALIZED = {"nanochat": nanochat, "modded_nanogpt": modded_nanogpt}


def followed(name, w, gradients, rate, beta, decay, times=1.0):
    """Their steps, line by line, on a weight as they keep it."""
    momentum, second = np.zeros_like(w), 0.0
    axis = -1 if w.shape[0] >= w.shape[1] else -2
    for step, g in enumerate(gradients):
        of_step, lr = float(beta(step)), float(rate(step))
        wd = float(decay(step)) * (lr if name == "modded_nanogpt" else 1)
        lr *= times * max(1, w.shape[0] / w.shape[1]) ** 0.5
        momentum = of_step * momentum + (1 - of_step) * g
        g = ORTHOGONALIZED[name]((1 - of_step) * g + of_step * momentum)
        second = 0.9 * second + 0.1 * np.mean(g**2, axis=axis, keepdims=True)
        scaled = g / np.sqrt(np.maximum(second, 1e-10))
        g = scaled * norm(g) / np.maximum(norm(scaled), 1e-10)
        is_decayed = g * w >= 0
        # No sign of an update is decided by rounding in float64; that of a weight near
        # zero decides nothing.
        assert np.abs(g[g != 0]).min(initial=1) > 1e-9
        w = w - lr * (g + wd * w * is_decayed)
    return w


def random(*key):
    return np.random.default_rng([SEED, *(len(str(k)) for k in key)])


def start(shape):
    return random(*shape).normal(size=shape) / shape[1] ** 0.5


def gradients(shape, size=1.0):
    """Rows of unlike size, as those of real layers are, and one direction for all."""
    generator = random(*shape)
    one, *others = generator.normal(size=(STEPS + 1, *shape))
    sizes = size * np.exp(generator.normal(size=(shape[0], *[1] * (len(shape) - 1))))
    return np.stack([sizes * (one + x) for x in others])


def gradients_of(leaf):
    found = gradients(*LEAVES[leaf])
    if leaf == "zeros":
        found[:, :4] = found[0] = 0
    return found


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, its chains among them."""
    found: dict = {}
    for block in blocks(ROOT / "docs/speedruns.md"):
        if block.kind == "python":
            exec(block.code, found)
    return found


def stepped(tx, params, grads, dtype: Any = np.float64):
    """Weights after the steps, for trees of `(inputs, outputs)`."""
    is_double = dtype == np.float64
    with jax.enable_x64(True) if is_double else contextlib.nullcontext():
        params, grads = (
            jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
            for tree in (params, grads)
        )

        @jax.jit
        def run(params, grads):
            def step(carry, g):
                updates, state = tx.update(g, carry[1], carry[0])
                return (optax.apply_updates(carry[0], updates), state), None

            (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
            return params

        return jax.tree.map(lambda x: np.asarray(x, np.float64), run(params, grads))


def walked(tx, leaves=SMALL, dtype: Any = np.float64):
    params = {k: start(LEAVES[k][0]).T for k in leaves}
    grads = {k: gradients_of(k).swapaxes(-1, -2) for k in leaves}
    return {k: x.T for k, x in stepped(tx, params, grads, dtype).items()}


def theirs(name, leaf, decay):
    w = start(LEAVES[leaf][0])
    return followed(name, w, gradients_of(leaf), rate, beta, lambda _: decay)


def chain(page, name, decay):
    of_step = optax.constant_schedule(decay) if name == "nanochat" else decay
    return page[name](rate, beta, of_step)


@pytest.mark.parametrize("name", ORTHOGONALIZED)
@pytest.mark.parametrize("is_double", [True, False])
def test_follows_their_steps(page, name, is_double):
    """In float64, and in float32 where no sign counts."""
    decay = DECAY[name] if is_double else 0.0
    dtype, tolerance = (np.float64, 1e-6) if is_double else (np.float32, 1e-5)
    found = walked(chain(page, name, decay), dtype=dtype)
    for leaf, w in found.items():
        expected = theirs(name, leaf, decay)
        np.testing.assert_allclose(w, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ORTHOGONALIZED)
def test_rounding_moves_few_entries_by_a_step_of_decay(page, name):
    """In float32, whose rounding makes the update of such an entry 0 or turns it."""
    decay = DECAY[name]
    (found,) = walked(chain(page, name, decay), ["large"], np.float32).values()
    expected = theirs(name, "large", decay)
    off = np.abs(found - expected)
    of_a_step = rate(0) * decay * (rate(0) if name == "modded_nanogpt" else 1)
    shape_factor = 2
    assert np.mean(off > 1e-5) < 0.01
    assert off.max() < shape_factor * of_a_step * np.abs(expected).max() + 1e-5


def off_from_modded_nanogpt(tx, leaf, beta):
    """As a part of the distance moved."""
    w = start(LEAVES[leaf][0])
    schedules = rate, beta, lambda _: DECAY["modded_nanogpt"]
    expected = followed("modded_nanogpt", w, gradients_of(leaf), *schedules)
    (found,) = walked(tx, [leaf]).values()
    return np.linalg.norm(found - expected) / np.linalg.norm(expected - w)


@pytest.fixture(scope="module")
def settings(page):
    """modded-nanogpt's beta, and the settings whose distance from theirs it gives."""
    return {
        "beta": page["rising"],
        "orthogonalizer": mc.NewtonSchulz(DION),
        "weight_decay": lambda step: DECAY["modded_nanogpt"] * rate(step),
    }


@pytest.mark.parametrize(
    "leaf, percent", [("square", 0.2), ("wide", 0.2), ("tall", 0.7)]
)
def test_the_arguments_of_muon_alone(settings, leaf, percent):
    tx = mc.muon(
        rate,
        consistent_rms=None,
        neuron_b2=0.9,
        cautious_weight_decay=True,
        per_head=False,
        **settings,
    )
    off = off_from_modded_nanogpt(tx, leaf, settings["beta"])
    assert round(100 * off, 1) == percent


def test_without_their_eps(page, settings):
    tx = page["their_muon"](rate, **settings)
    off = off_from_modded_nanogpt(tx, "tiny", settings["beta"])
    assert round(100 * off) == 1


def parameters(page):
    """The page's tree, in values that are not all the same, and its gradients."""
    params = {k: start((*s, 1)[:2]).reshape(s) for k, s in page["shapes"].items()}
    return params, {k: gradients(x.shape) for k, x in params.items()}


def test_whole_nanochat(page):
    params, grads = parameters(page)
    found = stepped(page["like_nanochat"], params, grads)
    for name in ("query", "up", "down"):
        w, of_w = params[name].T, grads[name].swapaxes(-1, -2)
        schedules = lambda t: 0.02 * multiplier(t), momentum, weight_decay
        expected = followed("nanochat", w, of_w, *schedules)
        np.testing.assert_allclose(found[name].T, expected, rtol=0, atol=1e-6)
    groups = {
        "embed": (0.3, 0.995, 0.001),
        "head": (0.008, 0.96, 0.01),
        "gain": (0.005, 0.95, 0.05),
    }
    for name, group in groups.items():
        expected = adamw(params[name], grads[name], *group)
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)


# Those of nanochat's scripts/base_train.py, with 5000 iterations.
TOTAL, WARMDOWN = 5000, round(0.65 * 5000)


def multiplier(it):
    if it < 40:
        return (it + 1) / 40
    progress = (TOTAL - it) / WARMDOWN
    return 1.0 if progress >= 1 else progress + (1 - progress) * 0.05


def momentum(it):
    if it < 400:
        return 0.85 + (0.97 - 0.85) * it / 400
    progress = max(0, it - (TOTAL - WARMDOWN)) / WARMDOWN
    return 0.97 * (1 - progress) + 0.90 * progress


def weight_decay(it):
    return 0.28 * 0.5 * (1 + math.cos(math.pi * it / TOTAL))


def adamw(w, gradients, lr, b2, decay):
    """Their fused step."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in enumerate(gradients):
        of_step = lr * multiplier(step)
        w = w * (1 - of_step * decay)
        m, v = 0.8 * m + 0.2 * g, b2 * v + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2 ** (step + 1))) + 1e-10
        w = w - of_step / (1 - 0.8 ** (step + 1)) * m / root
    return w


def test_schedules_of_nanochat(page):
    for step in (0, 1, 38, 39, 40, 399, 400, 1749, 1750, 1751, 3000, 5000):
        found = page["rate"](step) / 0.02, page["beta"](step)
        expected = multiplier(step), momentum(step)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_whole_modded_nanogpt(page):
    params, grads = parameters(page)
    found = stepped(page["like_modded_nanogpt"], params, grads)

    def check(ours, w, of_w, **times):
        schedules = (
            lambda step: 0.023,
            lambda step: 0.85 + 0.1 * min(1, step / 300),
            lambda step: 1.2,
        )
        expected = followed("modded_nanogpt", w, of_w, *schedules, **times)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)

    check(found["up"].T, params["up"].T, grads["up"].swapaxes(-1, -2))
    # Their bank of MLPs has `(4 * width, width)` for both matrices.
    check(found["down"], params["down"], grads["down"], times=2)
    for pair in (slice(0, 16), slice(16, 32)):
        w, of_w = params["query"][:, pair].T, grads["query"][..., pair]
        check(found["query"][:, pair].T, w, of_w.swapaxes(-1, -2))
