"""The statistic against logits formed one by one in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import are_unlike, bernoulli, differ, first_that, naive_logits, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def qk(heads=4, key_heads=4, length=5, key_length=7):
    return normal(0, 2, length, heads, 3), normal(1, 2, key_length, key_heads, 3)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_plain_and_shared_keys(key_heads):
    query, key = qk(key_heads=key_heads)
    expected = naive_logits(query, key).max(axis=(0, 2, 3))
    assert are_unlike(expected)
    chex.assert_trees_all_close(
        mc.max_logits(query, key), expected.astype(np.float32), rtol=1e-5
    )


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (2, 4, 5, 7), (1, 1, 5, 7), (5, 7)])
@pytest.mark.parametrize("dtype", [bool, jnp.float32])
def test_mask_hides_pairs(shape, dtype):
    query, key = qk()

    def largest(mask):
        return naive_logits(query, key, mask).max(axis=(0, 2, 3))

    mask = first_that(
        lambda mask: differ(largest(mask), largest(None)),
        lambda seed: bernoulli(seed, 0.3, shape),
    )
    expected = largest(mask)
    actual = mc.max_logits(query, key, mask=mask.astype(dtype))
    chex.assert_trees_all_close(actual, expected.astype(np.float32), rtol=1e-5)


def test_bias_and_scale():
    query, key = qk()
    bias = normal(4, 1, 4, 5, 7)
    logits = naive_logits(query, key)
    expected = logits.max(axis=(0, 2, 3))
    assert differ(expected, (logits + bias).max(axis=(0, 2, 3)))
    chex.assert_trees_all_close(
        mc.max_logits(query, key, bias=bias), expected.astype(np.float32), rtol=1e-5
    )
    doubled = mc.max_logits(query, key, scale=2 / np.sqrt(3))
    chex.assert_trees_all_close(doubled, 2 * mc.max_logits(query, key), rtol=1e-5)


def test_bfloat16_logits_are_float32_and_nothing_visible_is_minus_infinity():
    query, key = (x.astype(jnp.bfloat16) for x in qk())
    exact = naive_logits(query.astype(jnp.float32), key.astype(jnp.float32)).max(
        axis=(0, 2, 3)
    )
    chex.assert_trees_all_close(
        mc.max_logits(query, key), exact.astype(np.float32), rtol=1e-5
    )
    assert (mc.max_logits(query, key, mask=jnp.zeros((5, 7))) == -jnp.inf).all()


def test_carries_no_gradient():
    query, key = qk()
    grads = jax.grad(lambda q, k: mc.max_logits(q, k).sum(), argnums=(0, 1))(query, key)
    assert all((g == 0).all() for g in grads)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"key heads must divide"):
        mc.max_logits(*qk(heads=4, key_heads=3))
