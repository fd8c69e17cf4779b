"""The contract's list of bad uses, one by one: a ValueError that names the path."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import inputs, linen_variables, LinenModel, more, nnx_model

import muonclip_jax as mc


KERNEL = jnp.ones((8, 2, 4))
PARAMS = {"decoder": {"attn": {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}}}}
STATS = {"decoder": {"attn": {"max_logits": jnp.ones(2)}}}


def update(params, stats, jit=False, **options):
    tx = mc.muonclip(1e-3, **options)
    step = jax.jit(tx.update) if jit else tx.update
    return step(params, tx.init(params), params, attention_stats=stats)


@pytest.mark.parametrize("jit", [False, True])
def test_no_attention_stats(jit):
    tx = mc.muonclip(1e-3)
    step = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match="needs attention_stats.*attention_stats="):
        step(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="needs attention_stats"):
        mc.clip_qk(PARAMS, None)


@pytest.mark.parametrize("jit", [False, True])
def test_statistics_without_query_and_key(jit):
    stats = STATS | {"encoder": {"attn": {"max_logits": jnp.ones(2)}}}
    with pytest.raises(ValueError, match="'encoder/attn/max_logits'.*'decoder/attn'"):
        update(PARAMS, stats, jit)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("stats", [{}, {"decoder": {"attn": {}}}])
def test_attention_layer_without_statistics(jit, stats):
    with pytest.raises(
        ValueError, match="'decoder/attn'.*sow_weights=True.*variable_axes"
    ):
        update(PARAMS, stats, jit)


@pytest.mark.parametrize("jit", [False, more(True)])
@pytest.mark.parametrize("shape", [(3,), (1,), (4,), (1, 2), (3, 2)])
def test_head_counts_that_differ(jit, shape):
    stats = {"decoder": {"attn": {"max_logits": jnp.ones(shape)}}}
    message = r"'decoder/attn/max_logits' .*'decoder/attn/query/kernel' \(8, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        update(PARAMS, stats, jit)


def test_kernels_without_a_head_axis():
    params = {
        "attn": {
            "query": {"kernel": jnp.ones((8, 8))},
            "key": {"kernel": jnp.ones((8, 8))},
        }
    }
    with pytest.raises(ValueError, match="'attn/query/kernel'.*attention="):
        update(params, {"attn": {"max_logits": jnp.ones(2)}})


def test_key_heads_that_do_not_divide_query_heads():
    params = {
        "attn": {
            "query": {"kernel": jnp.ones((8, 4, 2))},
            "key": {"kernel": jnp.ones((8, 3, 2))},
        }
    }
    with pytest.raises(ValueError, match="'attn/key/kernel'"):
        update(params, {"attn": {"max_logits": jnp.ones(4)}})


def test_qk_normalized_linen_attention_at_init():
    model = LinenModel(options=(("normalize_qk", True),))
    params = linen_variables(model, inputs())["params"]
    with pytest.raises(
        ValueError, match="'layer_0/attention', 'layer_1/attention'.*normalized"
    ):
        mc.muonclip(1e-3).init(params)
    with pytest.raises(ValueError, match="normalized"):
        mc.clip_qk(params, {})
    mc.muon(1e-3).init(params)


def test_qk_normalized_nnx_attention_at_init():
    model = nnx_model(normalize_qk=True)
    with pytest.raises(ValueError, match="'layers/0', 'layers/1'.*normalized"):
        nnx.Optimizer(model, mc.muonclip(1e-3), wrt=nnx.Param)


def test_leaf_without_a_matrix():
    params = {
        "mlp": {"up": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
        "norm": {"scale": jnp.ones(2)},
    }
    with pytest.raises(ValueError, match="'mlp/up/bias', 'norm/scale'.*matrix_mask"):
        mc.scale_by_muon().init(params)


@pytest.mark.parametrize("threshold", [0, 0.0, -1, float("nan")])
def test_threshold_that_is_not_positive(threshold):
    for make in (
        mc.qk_clip,
        lambda t: mc.muonclip(1e-3, threshold=t),
        lambda t: mc.clip_qk(PARAMS, STATS, t),
    ):
        with pytest.raises(ValueError, match="threshold must be positive, got"):
            make(threshold)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_the_unit_interval(alpha):
    for make in (
        mc.qk_clip,
        lambda **o: mc.muonclip(1e-3, **o),
        lambda **o: mc.clip_qk(PARAMS, STATS, **o),
    ):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\], got"):
            make(alpha=alpha)


def test_alpha_for_each_head():
    with pytest.raises(ValueError, match=r"alpha must be one number, got shape \(2,\)"):
        mc.clip_qk(PARAMS, STATS, alpha=jnp.ones(2))


def test_a_mask_that_splits_a_layer():
    params = {
        "attn": {n: {"kernel": KERNEL, "bias": KERNEL[0]} for n in ("query", "key")}
    }
    tx = optax.masked(mc.qk_clip(), mc.matrix_mask)
    with pytest.raises(
        ValueError, match="'attn/query/bias', 'attn/key/bias'.*together"
    ):
        tx.update(
            params,
            tx.init(params),
            params,
            attention_stats={"attn": {"max_logits": jnp.ones(2)}},
        )


def test_attention_that_names_a_missing_leaf():
    layer = mc.AttentionLayer(
        "decoder/attn", (mc.HeadLeaf("wq", 3),), (mc.HeadLeaf("wk", 3),)
    )
    with pytest.raises(ValueError, match="'decoder/attn/wq', 'decoder/attn/wk'"):
        update(PARAMS, STATS, attention=[layer])


def test_a_function_that_inject_hyperparams_called_as_a_schedule():
    """Without a word it would find no layers in the step, and clip nothing."""
    params = {"attn": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
    bound = functools.partial(mc.flax_attention_layers, stack_axes={})
    for function in (mc.flax_attention_layers, bound):
        tx = optax.inject_hyperparams(mc.qk_clip)(attention=function)
        with pytest.raises(ValueError, match=r'static_args=\("attention",\)'):
            tx.init(params)
        tx = optax.inject_hyperparams(mc.qk_clip, "attention")(attention=function)
        assert optax.tree.get(tx.init(params), "gamma").shape == (2,)
