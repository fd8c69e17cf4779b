"""The statistic and the drop-in attention function, in Linen and NNX."""

import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    as_pure,
    inputs,
    linen_stats,
    linen_variables,
    LinenModel,
    naive_logits,
    nnx_attention,
    nnx_model,
    nnx_stats,
)

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.mark.parametrize(
    "options", [(), (("force_fp32_for_softmax", True),), (("dropout_rate", 0.3),)]
)
@pytest.mark.parametrize("sow", [True, False])
def test_linen_output_equals_flax(options, sow):
    x = inputs()
    mask = nn.make_causal_mask(x[..., 0])
    stock = nn.MultiHeadDotProductAttention(4, **dict(options))
    ours = stock.clone(attention_fn=mc.attention_fn)
    params = linen_variables(stock, x, deterministic=True)
    call = dict(mask=mask, deterministic=False, rngs={"dropout": jax.random.key(1)})
    expected = stock.apply(params, x, **call)
    actual, _ = ours.apply(
        params, x, **call, sow_weights=sow, mutable=["intermediates"]
    )
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


REPEATED = ((True, 4), (False, 4), (False, 2))


@pytest.mark.more
@pytest.mark.parametrize(
    "sow, kv_heads",
    [(True, 2), *(pytest.param(*x, marks=pytest.mark.more) for x in REPEATED)],
)
def test_nnx_output_equals_flax(kv_heads, sow):
    x = inputs()
    causal = nnx.make_causal_mask(x[..., 0])
    stock = nnx_attention(num_kv_heads=kv_heads, attention_fn=nnx.dot_product_attention)
    ours = nnx.clone(stock)
    ours.attention_fn = mc.attention_fn
    run = nnx.capture(lambda m: m(x, mask=causal, sow_weights=sow), nnx.Intermediate)
    expected = stock(x, mask=causal)
    chex.assert_trees_all_close(run(ours)[0], expected, rtol=2e-5, atol=2e-5)
    gradient = nnx.grad(lambda m: run(m)[0].var())
    found, expected = (as_pure(gradient(model)) for model in (ours, stock))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def linen_projections(layer_params, x):
    def project(name):
        p = layer_params[name]
        return np.einsum("btd,dhk->bthk", x, p["kernel"]) + np.asarray(p["bias"])

    return project("query"), project("key")


def test_linen_statistic_is_next_to_query_and_key():
    x = inputs()
    model = LinenModel()
    params = linen_variables(model, x)["params"]
    stats = linen_stats(model, params, x)
    for name in ("layer_0", "layer_1"):
        query, key = linen_projections(params[name]["attention"], np.asarray(x))
        expected = naive_logits(query, key, np.tri(6)).max(axis=(0, 2, 3))
        actual = stats[name]["attention"]["max_logits"]
        chex.assert_shape(actual, (4,))
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_init_leaves_no_statistics_among_the_variables():
    assert set(linen_variables(LinenModel(), inputs())) == {"params"}


def test_nnx_statistic_without_a_warning_and_with_a_clean_model():
    model = nnx_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = nnx_stats(model, inputs())
    assert {s.shape for s in jax.tree.leaves(stats)} == {(4,)}
    assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))


def test_nnx_outside_capture_never_mixes_two_calls():
    model = nnx_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for scale in (3.0, 1.0):
            model(scale * inputs())
            popped = nnx.pop(model, nnx.Intermediate)
            expected = nnx_stats(model, scale * inputs())
            chex.assert_trees_all_close(
                jax.tree.leaves(popped), jax.tree.leaves(expected)
            )
        model(inputs())
        with pytest.raises(ValueError, match="nnx.capture"):
            model(inputs())


def test_linen_keeps_the_precision_and_masks_shared_over_a_batch_axis():
    x = inputs(shape=(3, 2, 6, 16))
    mask = nn.make_causal_mask(x[:, :1, :, 0])
    stock = nn.MultiHeadDotProductAttention(4, precision="highest")
    params = linen_variables(stock, x)
    ours = stock.clone(attention_fn=mc.attention_fn)
    run = [
        jax.make_jaxpr(lambda x, m=m: m.apply(params, x, mask=mask))(x)
        for m in (stock, ours)
    ]
    assert str(run[0]).count("HIGHEST") == str(run[1]).count("HIGHEST") > 0
    actual, recorded = ours.apply(
        params, x, mask=mask, sow_weights=True, mutable=["intermediates"]
    )
    expected = stock.apply(params, x, mask=mask)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)
    chex.assert_shape(recorded["intermediates"]["max_logits"], (4,))


def test_a_layer_called_twice_keeps_the_maximum():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.MultiHeadDotProductAttention(
                4, attention_fn=mc.attention_fn, name="attention"
            )
            layer(x[0], x[0], sow_weights=True)
            return layer(x[1], x[1], sow_weights=True)

    def measure(first, second):
        stats = linen_stats(Twice(), params, jnp.stack([first, second]))
        return stats["attention"]["max_logits"]

    small, large = inputs(1), 3 * inputs(2)
    params = linen_variables(Twice(), jnp.stack([small, large]))["params"]
    expected = jnp.maximum(measure(small, small), measure(large, large))
    chex.assert_trees_all_close(measure(small, large), expected)
    chex.assert_trees_all_close(measure(large, small), expected)


@pytest.mark.parametrize("length", [512, 2048])
def test_the_statistic_shares_the_logits_that_attention_forms(length):
    """Neither a second product of query and key nor memory for its result."""
    layer = nnx.eval_shape(lambda: nnx_attention(2, 16))
    graph, params = nnx.split(layer)

    def compiled(record):
        def loss(params, x):
            def call(layer, x):
                mask = nnx.make_causal_mask(x[..., 0])
                return layer(x, mask=mask, sow_weights=record).sum()

            return nnx.capture(call, nnx.Intermediate)(nnx.merge(graph, params), x)

        x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
        step = jax.jit(jax.grad(loss, has_aux=True)).lower(params, x).compile()
        dots = step.as_text().count("dot(")
        return dots, step.memory_analysis().temp_size_in_bytes

    (dots, memory), (dots_without, memory_without) = compiled(True), compiled(False)
    assert dots == dots_without > 0
    assert memory < 1.05 * memory_without
