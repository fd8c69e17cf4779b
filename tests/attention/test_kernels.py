"""Statistics that come from the attention kernel itself."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_references import naive_attention
from helpers import inputs, linen_variables, more, normal
from internals import splash_statistic as _statistic

import muonclip_jax as mc


BLOCKWISE = functools.partial(mc.blockwise_attention, block_size=4)


class Layer(nn.Module):
    kernel: object = None
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(
            4,
            dropout_rate=self.dropout_rate,
            attention_fn=functools.partial(mc.attention_fn, kernel=self.kernel),
        )(x, mask=nn.make_causal_mask(x[..., 0]), sow_weights=True, deterministic=False)


def linen(kernel, params=None):
    layer = Layer(kernel)
    if params is None:
        params = linen_variables(Layer(), inputs())["params"]

    def run(params):
        output, recorded = layer.apply(
            {"params": params}, inputs(), mutable=["intermediates"]
        )
        return jnp.sum(output**2), recorded["intermediates"]

    (loss, stats), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    return loss, jax.tree.leaves(stats)[0], grads


@pytest.mark.more
def test_linen_layer_with_a_kernel_is_the_same_layer():
    loss, largest, grads = linen(BLOCKWISE)
    expected_loss, expected_largest, expected_grads = linen(None)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # That of the key's bias is zero but for rounding.
    size = max(np.abs(g).max() for g in jax.tree.leaves(expected_grads))
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-3, atol=1e-5 * size)
    np.testing.assert_allclose(largest, expected_largest, rtol=1e-5)


def test_a_kernel_records_nothing_without_sow_weights():
    layer = nn.MultiHeadDotProductAttention(
        4, attention_fn=functools.partial(mc.attention_fn, kernel=BLOCKWISE)
    )
    variables = linen_variables(layer, inputs())
    _, recorded = layer.apply(variables, inputs(), mutable=["intermediates"])
    assert not jax.tree.leaves(recorded)


def test_dropout_does_not_reach_a_kernel():
    layer = Layer(BLOCKWISE, dropout_rate=0.1)
    with pytest.raises(ValueError, match="dropout"):
        layer.init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs()
        )


def test_a_kernel_of_the_users_own():
    """As TransformerEngine's fused_attn returns it: output and maxima in bfloat16."""

    def kernel(query, key, value, *, mask=None):
        output = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return output, mc.max_logits(query, key, mask=mask).astype(jnp.bfloat16)

    _, largest, _ = linen(kernel)
    np.testing.assert_allclose(largest, linen(None)[1], rtol=1e-2)


@pytest.mark.more
def test_clipping_by_a_bound_keeps_every_head_under_the_threshold():
    """The log-sum-exp that fused kernels keep, as the manual has it."""

    def kernel(*qkv, **options):
        output, log_sum_exp = jax.nn.dot_product_attention(
            *qkv, **options, return_residual=True
        )
        return output, log_sum_exp.max((0, 1))

    _, bound, _ = linen(kernel)
    _, exact, _ = linen(None)
    assert (bound >= exact).all() and (bound <= exact + np.log(6) + 1e-5).all()
    params = linen_variables(Layer(), inputs())["params"]
    tau = float(np.median(bound))
    name = "MultiHeadDotProductAttention_0"
    after = mc.clip_qk(params, {name: {"max_logits": bound}}, tau)
    _, exact, _ = linen(None, after)
    assert (exact <= tau * (1 + 1e-5)).all()


def compare_splash(query, key, value, *, tolerance=5e-5, **options):
    def run(attend):
        def loss(*x):
            output, largest = attend(*x)
            weights = jnp.linspace(-1, 1, output.size).reshape(output.shape)
            return jnp.sum(output * weights), (output, largest)

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        return grad(query, key, value)

    splash = functools.partial(mc.splash_attention, interpret=True)
    grads, (output, largest) = run(functools.partial(splash, **options))
    blockwise = functools.partial(mc.blockwise_attention, **options)
    expected_grads, (expected, exact) = run(blockwise)
    np.testing.assert_allclose(output, expected, atol=tolerance)
    np.testing.assert_allclose(largest, exact, rtol=tolerance)
    for g, e in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(g, e, atol=tolerance * np.abs(e).max())


def splash_inputs(length, key_length, heads=2, key_heads=1, depth=64, batch=1):
    shape = (batch, length, heads, depth)
    other = (batch, key_length, key_heads, depth)
    shapes = (shape, other, other)
    return [normal(i, *s, scale=2.0) for i, s in enumerate(shapes)]


@pytest.mark.more
@pytest.mark.parametrize(
    "lengths, options",
    [
        more((256, 256), dict(is_causal=True)),
        more((128, 128), dict()),
        ((200, 300), dict()),  # padded
        more((256, 256), dict(local_window_size=(30, 5), scale=0.2)),
        # Empty rows.
        more((384, 128), dict(is_causal=True, local_window_size=(20, 0))),
    ],
)
def test_splash_kernel_in_interpret_mode(lengths, options):
    compare_splash(*splash_inputs(*lengths), **options)


def test_rows_that_the_splash_kernel_leaves_unwritten_are_no_logits():
    """On a TPU they hold anything; interpret mode makes them NaN and cannot tell."""
    maxima = jnp.asarray([[[7.0, -5.0, -1e38, 9.0]]])  # the last is padding
    seen = jnp.asarray([False, True, True])
    np.testing.assert_array_equal(_statistic(maxima, seen), [-5.0])


def test_splash_with_rows_that_see_nothing_and_lengths_that_fill_no_block():
    query, key, value = splash_inputs(180, 140, heads=1, depth=16)
    options = dict(is_causal=True, local_window_size=(20, 0))
    splash = functools.partial(mc.splash_attention, interpret=True, **options)
    found = jax.jit(splash)(query, key, value)
    before = np.arange(180)[:, None] - np.arange(140)
    expected = naive_attention(query, key, value, mask=(before >= 0) & (before <= 20))
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=5e-5, atol=5e-5)
    assert not np.any(found[0][:, 160:])


def test_a_splash_head_that_sees_nothing():
    ids = jnp.zeros((1, 128), jnp.int32)
    _, largest = mc.splash_attention(
        *splash_inputs(128, 128),
        query_segment_ids=ids,
        key_segment_ids=ids + 1,
        interpret=True,
    )
    np.testing.assert_array_equal(largest, [-np.inf] * 2)


@pytest.mark.more
def test_splash_kernel_with_segments_and_small_blocks():
    ids = jnp.arange(256)[None] // 100
    compare_splash(
        *splash_inputs(256, 256, heads=2, key_heads=2),
        query_segment_ids=ids,
        is_causal=True,
        block_size=128,
    )


def test_splash_with_a_softcap_is_refused():
    with pytest.raises(ValueError, match="capped logits"):
        mc.splash_attention(*splash_inputs(128, 128), logits_soft_cap=50.0)
