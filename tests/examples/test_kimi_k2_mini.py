"""Kimi K2 in miniature: the script, run small, and what its model must do."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import EXAMPLES, largest, normal, randomize, run_script
from kimi_k2_mini import loss_fn, make_optimizer, make_train_step
from kimi_k2_model import KimiK2, MixtureOfExperts, Router, Sizes

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


SMALL = ["--steps=12", "--batch-size=4", "--context=16", "--threshold=0.5"]
SMALL += ["--layers=2", "--width=16", "--heads=2", "--experts=4"]


def sizes(**changed):
    small = dict(
        vocabulary=32,
        layers=3,
        width=16,
        heads=4,
        query_rank=12,
        key_value_rank=8,
        nope_head_dim=8,
        rope_head_dim=4,
        dense_hidden=24,
        expert_hidden=8,
    )
    return Sizes(**small | changed)


def abstract_model(**changed):
    return nnx.eval_shape(lambda: KimiK2(sizes(**changed), nnx.Rngs(0)))


def drawn(abstract, scale):
    """With normal parameters, and zeros for the balance of the experts."""
    graph, params, balance = nnx.split(abstract, nnx.Param, ...)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), balance)
    return nnx.merge(graph, randomize(params, scale=scale), zeros)


def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, 32, (3, 13)), jnp.int32)


@nnx.jit
def record(model, text):
    return mc.record_attention(KimiK2.__call__)(model, text)


def forward(model, text=None):
    return record(model, tokens()[:, :-1] if text is None else text)


def read(model):
    return mc.read_model(loss_fn, model, tokens())


def run(*arguments):
    return run_script(EXAMPLES / "kimi_k2_mini.py", *arguments)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi_k2")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 3000)
    return folder, run(*SMALL, "--data", text, "--out", folder)


@pytest.mark.more
def test_script_describes_trains_and_draws(script):
    folder, result = script
    assert "wq_b/kernel" in result.stdout and "4 x 16 x 32" in result.stdout
    for name in ("MuonClip", "Muon without the clip"):
        assert f"\n{name}\n" in result.stdout and f"{name}: 100%" in result.stderr
    for line in ("validation loss", "largest logit", "95th percentile", "fair shares"):
        assert result.stdout.count(line) == 2
    assert (folder / "kimi_k2_mini.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
def test_every_head_is_clipped_under_a_tiny_threshold(script):
    _, result = script
    assert "heads ever clipped       4 of 4 (100%)" in result.stdout
    assert "heads ever clipped       0 of 4 (0%)" in result.stdout
    peaks = [
        float(line.split()[-1])
        for line in result.stdout.splitlines()
        if line.startswith("  ... of the last quarter")
    ]
    assert peaks[0] < peaks[1]


@pytest.mark.more
def test_a_step_that_only_clips_reports_every_head_and_brings_it_to_the_threshold():
    model = drawn(abstract_model(layers=2), scale=1.0)
    before = largest(forward(model)[1]).reshape(2, 4)
    tau = float(np.median(before[0]))
    assert (before[0] > tau).any() and (before[0] <= tau).any()
    rates = dict(learning_rate=0.0, adam_learning_rate=0.0, weight_decay=0.1)
    args = argparse.Namespace(steps=10, **rates)
    tx = make_optimizer(read(model), tau, args)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    _, _, max_logits, gamma = make_train_step()(model, optimizer, tokens(), 0.5)
    np.testing.assert_allclose(max_logits, before, rtol=1e-5)
    np.testing.assert_allclose(gamma, np.minimum(1, tau / before), rtol=1e-5)
    after = largest(forward(model)[1]).reshape(2, 4)
    # After a clipped layer the next one sees other inputs.
    np.testing.assert_allclose(after[0], np.minimum(before[0], tau), rtol=1e-4)


def test_every_leaf_is_a_matrix_or_not_as_it_should():
    model = abstract_model()
    params = nnx.state(model, nnx.Param)
    table = mc.describe(params, model=read(model), collapse=False)
    lines = table.split("\n\n")[0].splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    expected = {
        "attention/wq_b/kernel": "4 x 12 x 12 muon traced query, 4 heads + rotary",
        "attention/wkv_b/kernel": "8 x 8 x 8 muon traced key, 4 heads",
        "attention/out/kernel": "1 x 32 x 16 muon",
        "mlp/experts/gate/kernel": "8 x 16 x 8 muon",
        "mlp/experts/up/kernel": "8 x 16 x 8 muon",
        "mlp/experts/down/kernel": "8 x 8 x 16 muon",
        "mlp/shared/down/kernel": "1 x 8 x 16 muon",
        "mlp/router/scores/kernel": "(16, 8) - adamw",
        "attention/kv_norm/scale": "(8,) - adamw",
    }
    for leaf, row in expected.items():
        assert row in rows[f"blocks/1/{leaf}"]
    for leaf in ("embed/embedding", "head/kernel", "norm/scale"):
        assert "- adamw" in rows[leaf]
    assert not any("bias" in leaf or "load" in leaf for leaf in rows)


def make_router(**changed):
    router = nnx.eval_shape(lambda: Router(sizes(**changed), nnx.Rngs(0)))
    return drawn(router, scale=0.25)


def router_inputs():
    return normal(2, 3, 40, 16)


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_weights_are_of_the_best_experts_and_sum_to_the_scale(chosen):
    router = make_router(experts_per_token=chosen)
    x = router_inputs()
    weights = np.asarray(router(x))
    assert ((weights > 0).sum(axis=-1) == chosen).all() and (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), chosen**0.5, rtol=1e-5)
    scores = np.asarray(jax.nn.sigmoid(router.scores(x)))
    best = np.sort(scores, axis=-1)[..., -chosen:]
    expected = chosen**0.5 * best / best.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.sort(weights)[..., -chosen:], expected, rtol=1e-5)


def test_the_bias_chooses_but_does_not_weigh():
    router = make_router()
    x = router_inputs()
    router.bias[...] = jnp.where(jnp.isin(jnp.arange(8), jnp.array([1, 6])), 5.0, 0.0)
    weights = np.asarray(router(x))
    assert set(np.nonzero(weights)[-1]) == {1, 6}
    scores = np.asarray(jax.nn.sigmoid(router.scores(x)))[..., [1, 6]]
    expected = 2**0.5 * scores / scores.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights[..., [1, 6]], expected, rtol=1e-5)


def test_the_bias_moves_towards_underused_experts():
    router = make_router()
    weights = np.asarray(router(router_inputs()))
    load = (weights > 0).sum(axis=(0, 1))
    np.testing.assert_array_equal(router.load[...], load)
    router.balance(0.25)
    np.testing.assert_allclose(router.bias[...], 0.25 * np.sign(load.mean() - load))


@pytest.mark.more
def test_a_mixture_is_the_sum_of_its_experts():
    moe = MixtureOfExperts(sizes(), nnx.Rngs(0))
    x = router_inputs()
    weights = np.asarray(moe.router(x))
    gate, up, down = (
        np.asarray(getattr(moe.experts, name).kernel[...])
        for name in ("gate", "up", "down")
    )
    assert np.abs(gate[0] - gate[1]).max() > 0.1  # each drawn by itself
    expected = np.asarray(moe.shared(x))
    for e in range(8):
        hidden = np.asarray(jax.nn.silu(x @ gate[e])) * (x @ up[e])
        expected = expected + weights[..., e, None] * (hidden @ down[e])
    np.testing.assert_allclose(moe(x), expected, atol=1e-5)


def test_no_token_sees_a_later_one():
    model = drawn(abstract_model(layers=2), scale=0.3)
    logits, _ = forward(model)
    changed, _ = forward(model, tokens()[:, :-1].at[:, 8:].set(0))
    np.testing.assert_allclose(changed[:, :8], logits[:, :8], atol=1e-5)
    assert np.abs(changed[:, 8:] - logits[:, 8:]).max() > 1e-3
