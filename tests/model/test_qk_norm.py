"""Layers whose queries and keys are normalized: the gains of the norms are scaled."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_zoo import HEADS
from flax import nnx
from helpers import (
    clip_at_rest,
    inputs,
    linen_stats,
    linen_variables,
    more,
    nnx_model,
    nnx_stats,
)
from layers import gains_layer

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


class NormalisedAttention(nn.Module):
    """Flax's own with `normalize_qk`: the heads share the gains of the norms."""

    @nn.compact
    def __call__(self, x):
        layer = nn.MultiHeadDotProductAttention(
            HEADS, attention_fn=mc.attention_fn, normalize_qk=True
        )
        return layer(x, x, sow_weights=True)


def linen_normalized():
    model = NormalisedAttention()
    params = linen_variables(model, inputs())["params"]

    def run(params, x):
        return model.apply({"params": params}, x)

    return params, lambda p: linen_stats(model, p, inputs()), run


def nnx_normalized():
    graph, state = nnx.split(nnx_model(normalize_qk=True))

    def run(state, x):
        model = nnx.merge(graph, state)
        return [
            layer(x, mask=nnx.make_causal_mask(x[..., 0])) for layer in model.layers
        ]

    return state, lambda s: nnx_stats(nnx.merge(graph, s), inputs()), run


@pytest.mark.parametrize("make", [linen_normalized, nnx_normalized])
@pytest.mark.parametrize("alpha", [more(0.0), 0.3, more(1.0)])
def test_gains_of_qk_norm_scale_all_heads_of_a_layer(make, alpha):
    """The largest head lands on the threshold, and the others keep their share."""
    params, measure, run = make()
    reading = mc.read_model(run, params, inputs())
    _, stats = mc.record_attention(run)(params, inputs())
    before = np.stack(jax.tree.leaves(measure(params)))
    tau = float(before.max(-1).mean() if len(before) > 1 else before.max() / 2)
    clipped, state = clip_at_rest(model=reading)(params, stats, tau, alpha)
    after = np.stack(jax.tree.leaves(measure(clipped)))
    gamma = np.minimum(1, tau / before.max(-1, keepdims=True))
    np.testing.assert_allclose(after, gamma * before, rtol=1e-4)
    assert (gamma < 1).any()
    metrics = mc.scalars(state, params, model=reading)
    assert metrics["num_clipped"] == (gamma < 1).sum()
    assert "all heads" in mc.describe(params, model=reading)


def test_scaling_the_projections_under_qk_norm_does_nothing():
    """Why they are refused: a witness."""
    params, measure, _ = linen_normalized()
    name = "MultiHeadDotProductAttention_0"
    smaller = jax.tree.map(lambda p: p, params)
    for role in ("query", "key"):
        smaller[name][role] = jax.tree.map(lambda p: 0.5 * p, params[name][role])
    chex.assert_trees_all_close(measure(smaller), measure(params), rtol=1e-3)


@pytest.mark.parametrize("shift", [False, True])
def test_a_shift_is_scaled_with_its_gain(shift):
    """A logit is linear in their sum."""
    ends = ("gain", "shift")[: 1 + shift]
    params = {n: {end: jnp.full(4, 2.0) for end in ends} for n in ("a", "b")}

    def run(params, x):
        def heads(p):
            y = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            return y * p["gain"] + p.get("shift", 0)

        query, key = heads(params["a"]), heads(params["b"])
        return jax.nn.dot_product_attention(query, key, key)

    reading = mc.read_model(run, params, jnp.ones((1, 5, 2, 4)))
    _, stats = mc.record_attention(run)(params, jnp.ones((1, 5, 2, 4)))
    (seen,) = jax.tree.leaves(stats)
    after = mc.clip_qk(params, stats, float(seen.max() / 4), model=reading)
    for x in jax.tree.leaves(after):
        np.testing.assert_allclose(x, 1.0, rtol=1e-6)


def test_statistics_of_another_stack_are_refused_with_the_shape_expected():
    params = {"attn": {"q_norm": {"scale": jnp.ones(4)}, "k_norm": jnp.ones(4)}}
    layer = gains_layer("attn", query=("q_norm/scale",), key=("k_norm",))
    stats = {"attn": {"max_logits": jnp.ones((3, 5))}}
    with pytest.raises(ValueError, match=r"shape \(3, 5\).*expected \(5,\)"):
        mc.clip_qk(params, stats, attention=[layer])


def test_the_refusal_by_names_names_the_reading():
    params, _, run = linen_normalized()
    with pytest.raises(
        ValueError, match=r"normalized after the projection.*mc\.read_model"
    ):
        mc.qk_clip().init(params)
    mc.qk_clip(model=mc.read_model(run, params, inputs())).init(params)


def test_gains_that_are_differences_from_one_are_refused():
    """As in Gemma: scaling them does not scale the logits."""
    params = {name: jnp.zeros(4) for name in ("a", "b")}

    def run(params, x):
        y = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        query, key = (y * (1 + params[name]) for name in ("a", "b"))
        return jax.nn.dot_product_attention(query, key, key)

    reading = mc.read_model(run, params, jnp.ones((1, 5, 2, 4)))
    with pytest.raises(ValueError, match=r"cannot scale .*\n.*test_qk_norm\.py"):
        mc.qk_clip(model=reading)
