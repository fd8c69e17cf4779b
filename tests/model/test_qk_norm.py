"""Layers whose queries and keys are normalised: the gains of the norms are scaled."""

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
    nnx_model,
    nnx_stats,
)

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


class NormalisedAttention(nn.Module):
    """Flax's own with `normalize_qk`: the heads share the gains of the norms."""

    @nn.compact
    def __call__(self, x):
        layer = nn.MultiHeadDotProductAttention(
            HEADS, attention_fn=mc.attention_fn, normalize_qk=True
        )
        layer(x, x, sow_weights=True)
        return x


def linen_normalised():
    model = NormalisedAttention()
    params = linen_variables(model, inputs())["params"]
    return params, lambda p: linen_stats(model, p, inputs())


def nnx_normalised():
    graph, state = nnx.split(nnx_model(normalize_qk=True))
    return state, lambda s: nnx_stats(nnx.merge(graph, s), inputs())


@pytest.mark.parametrize("make", [linen_normalised, nnx_normalised])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gains_of_qk_norm_scale_all_heads_of_a_layer(make, alpha):
    """The largest head lands on the threshold, and the others keep their share."""
    params, measure = make()
    before = np.stack(jax.tree.leaves(measure(params)))
    tau = float(before.max(-1).mean() if len(before) > 1 else before.max() / 2)
    find = mc.normalised_attention()
    clipped, state = clip_at_rest(find)(params, measure(params), tau, alpha)
    after = np.stack(jax.tree.leaves(measure(clipped)))
    gamma = np.minimum(1, tau / before.max(-1, keepdims=True))
    np.testing.assert_allclose(after, gamma * before, rtol=1e-4)
    assert (gamma < 1).any()
    metrics = mc.qk_clip_metrics(state, params, attention=find)
    assert metrics["num_clipped"] == (gamma < 1).sum()
    assert "all heads" in mc.describe(params, attention=find)


def test_scaling_the_projections_under_qk_norm_does_nothing():
    """Why they are refused: a witness."""
    params, measure = linen_normalised()
    name = "MultiHeadDotProductAttention_0"
    smaller = jax.tree.map(lambda p: p, params)
    for role in ("query", "key"):
        smaller[name][role] = jax.tree.map(lambda p: 0.5 * p, params[name][role])
    chex.assert_trees_all_close(measure(smaller), measure(params), rtol=1e-3)


@pytest.mark.parametrize("leaf", ["scale", "weight", "w", "gamma", "weight/array", ""])
@pytest.mark.parametrize("shift", ["", "bias", "b", "offset"])
def test_gains_under_the_names_in_use(leaf, shift):
    def norm(value):
        gain = jnp.full(4, value)
        for name in reversed(leaf.split("/") if leaf else []):
            gain = {name: gain}
        return gain | {shift: jnp.full(4, value)} if leaf and shift else gain

    params = {"attn": {"q_norm": norm(2.0), "k_norm": norm(3.0)}}
    find = mc.normalised_attention(query="q_norm", key="k_norm")
    stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
    after = mc.clip_qk(params, stats, attention=find)["attn"]
    for name, value in (("q_norm", 2.0), ("k_norm", 3.0)):
        for x in jax.tree.leaves(after[name]):
            np.testing.assert_allclose(x, value / 2, rtol=1e-6)


def test_statistics_of_another_stack_are_refused_with_the_shape_expected():
    params = {"attn": {"q_norm": {"scale": jnp.ones(4)}, "k_norm": jnp.ones(4)}}
    find = mc.normalised_attention(query="q_norm", key="k_norm")
    stats = {"attn": {"max_logits": jnp.ones((3, 5))}}
    with pytest.raises(ValueError, match=r"shape \(3, 5\).*expected is \(5,\)"):
        mc.clip_qk(params, stats, attention=find)


def test_the_refusal_names_the_preset_to_paste():
    kernel, norm = {"w": jnp.ones((6, 2, 4))}, {"w": jnp.ones(4)}
    params = {"attn": {"q_proj": kernel, "k_proj": kernel, "v_proj": kernel,
                       "o_proj": {"w": jnp.ones((2, 4, 6))},
                       "_q_norm": norm, "_k_norm": norm}}  # fmt: skip
    with pytest.raises(ValueError, match="normalised after the projection") as error:
        mc.qk_clip(attention=mc.named_attention()).init(params)
    pasted = str(error.value).split("attention=")[-1]
    assert pasted == 'mc.normalised_attention(query="_q_norm", key="_k_norm")'
    mc.qk_clip(attention=eval(pasted)).init(params)


def test_gains_that_are_differences_from_one():
    norm = {"scale": jnp.zeros(4)}
    params = {"attn": {"_query_norm": norm, "_key_norm": norm}}
    find = mc.normalised_attention(query="_query_norm", key="_key_norm")
    with pytest.raises(ValueError, match="'attn/_query_norm/scale' is zero"):
        mc.qk_clip(attention=find).init(params)
