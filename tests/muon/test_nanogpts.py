"""The Muons of nanochat and modded-nanogpt, against their steps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT
from test_manual import blocks
from test_torch_optimizers import POLAR_EXPRESS

import muonclip_jax as mc


pytestmark = [pytest.mark.usefixtures("fast_compilation"), pytest.mark.more]

STEPS, DECAY, BETA2, SEED = 60, 0.3, 0.9, 18
#: `(outputs, inputs)`, as PyTorch has weights.
SHAPES = {"square": (16, 16), "tall": (24, 12), "wide": (12, 24)}
# The steps are those of nanochat/optim.py (commit 92d63d4) and of modded-nanogpt's
# train_gpt.py (f411b3d3).


def rate(step):
    return 0.02 * (1 - step / (2 * STEPS))


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
    return x * min(x.shape) ** 0.5 / norm(x)


#: What is orthogonalized, and how often the rate multiplies the decay.
THEIRS = {"nanochat": (nanochat, 1), "modded_nanogpt": (modded_nanogpt, 2)}


def followed(name, w, gradients):
    """Their steps, line by line, on a weight `(outputs, inputs)`.

    Also how near an entry or its update came to a change of sign, where decay begins.
    """
    nearest = 1.0
    orthogonalized, times = THEIRS[name]
    momentum, second = np.zeros_like(w), 0.0
    axis = -1 if w.shape[0] >= w.shape[1] else -2
    shape = max(1, w.shape[0] / w.shape[1]) ** 0.5
    for step, g in enumerate(gradients):
        of_step, lr = float(beta(step)), rate(step)
        momentum = of_step * momentum + (1 - of_step) * g
        g = orthogonalized((1 - of_step) * g + of_step * momentum)
        mean = np.mean(g**2, axis=axis, keepdims=True)
        second = BETA2 * second + (1 - BETA2) * mean
        scaled = g / np.sqrt(np.maximum(second, 1e-10))
        g = scaled * norm(g) / norm(scaled)
        decay = DECAY * lr ** (times - 1) * w * (g * w >= 0)
        nearest = min(nearest, *np.abs(g).flat, *np.abs(w).flat)
        w = w - shape * lr * (g + decay)
    return w, nearest


def gradients(name):
    """Rows of unlike size, as those of real layers are, and one direction for all."""
    generator = np.random.default_rng([SEED, len(name)])
    one, *others = generator.normal(size=(STEPS + 1, *SHAPES[name]))
    sizes = np.exp(generator.normal(size=(SHAPES[name][0], 1)))
    return [sizes * (one + x) for x in others]


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, its chains among them."""
    found: dict = {}
    for block in blocks(ROOT / "docs/from_torch.md"):
        if block.kind == "python" and "nanochat" not in found:
            exec(block.code, found)
    return found


def walked(tx):
    params = {k: jnp.full(shape[::-1], 0.1) for k, shape in SHAPES.items()}
    given = {k: gradients(k) for k in SHAPES}

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    grads = {k: jnp.float32(np.swapaxes(of, -1, -2)) for k, of in given.items()}
    (params, _), _ = jax.jit(jax.lax.scan, static_argnums=0)(
        step, (params, tx.init(params)), grads
    )
    return {k: np.asarray(x, np.float64).T for k, x in params.items()}


@pytest.fixture(scope="module")
def with_settings_alone(page):
    return walked(
        mc.muon(
            rate,
            beta=beta,
            orthogonalizer=mc.NewtonSchulz(page["DION"]),
            consistent_rms=None,
            neuron_b2=BETA2,
            cautious_weight_decay=True,
            weight_decay=DECAY,
            per_head=False,
        )
    )


@pytest.mark.parametrize("name", THEIRS)
def test_follows_their_steps(page, with_settings_alone, name):
    found = walked(page[name](rate, beta, DECAY))
    for leaf, shape in SHAPES.items():
        theirs, nearest = followed(name, np.full(shape, 0.1), gradients(leaf))
        assert nearest > 3e-6  # no sign is decided by rounding
        np.testing.assert_allclose(found[leaf], theirs, rtol=0, atol=1e-5)
        assert np.abs(with_settings_alone[leaf] - theirs).max() > 1e-3
