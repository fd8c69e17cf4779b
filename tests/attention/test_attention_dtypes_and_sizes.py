"""What dtypes keep, and axes of size zero and one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_references import draw, naive_attention, slope
from flax import nnx
from helpers import differ, few, first_that, more, one_at_a_time
from internals import max_logits_module as module

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = dict(batch=2, length=5, key_length=7, heads=2, group=2, depth=3, width=4)
blockwise = functools.partial(mc.blockwise_attention, block_size=3)


def qkv(dtype=np.float32, **sizes):
    batch, length, key_length, heads, group, depth, width = (SIZES | sizes).values()
    other = (batch, key_length, heads)
    shapes = ((batch, length, heads * group, depth), (*other, depth), (*other, width))
    return draw(0, *shapes, dtype=dtype)


@pytest.mark.parametrize("size", [0, more(1)])
@pytest.mark.parametrize("axis", SIZES)
def test_axes_of_size_zero_and_one(axis, size, monkeypatch):
    arrays = qkv(**{axis: size})
    expected, exact = naive_attention(*arrays)

    def loss(*x):
        output, largest = blockwise(*x)
        return output.sum(), (output, largest)

    grads, (output, largest) = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(module, "_BLOCK", 4)
    for pairs in (0, 1 << 20):
        monkeypatch.setattr(module, "_PAIRS_AT_ONCE", pairs)
        np.testing.assert_allclose(mc.max_logits(*arrays[:2]), exact, rtol=1e-5)
    np.testing.assert_allclose(largest, exact, rtol=1e-5)
    for g, x in zip(grads, arrays, strict=True):
        assert g.shape == x.shape and np.isfinite(g).all()


def test_float64_is_kept_in_output_and_gradient():
    with jax.enable_x64(True):
        arrays = [*qkv(np.float64), *draw(1, (5, 7), (), dtype=np.float64)]
        ways = draw(2, *(x.shape for x in arrays), dtype=np.float64)

        def loss(attend, *x):
            return (attend(*x[:3], bias=x[3], scale=x[4])[0] ** 2).sum()

        grads = jax.grad(functools.partial(loss, blockwise), range(5))(*arrays)
        output, largest = blockwise(*arrays[:3], bias=arrays[3])
    expected, exact = naive_attention(*arrays[:3], bias=arrays[3])
    assert output.dtype == np.float64 and largest.dtype == np.float32
    np.testing.assert_allclose(output, expected, rtol=1e-13)
    np.testing.assert_allclose(largest, exact, rtol=1e-6)
    actual = sum(np.vdot(g, w) for g, w in zip(grads, ways, strict=True))
    along = slope(functools.partial(loss, naive_attention), arrays, ways)
    np.testing.assert_allclose(actual, along, rtol=1e-8)


DTYPES = "float16 float32, bfloat16 bfloat16, bfloat16 float32, float32 float16, "
DTYPES += "float32 bfloat16, float32 float64, float64 float32, float64 float64"


@pytest.mark.parametrize(
    "dtypes", few(DTYPES.split(", "), "bfloat16 bfloat16", "float64 float32")
)
def test_dtypes_of_arrays_and_bias_under_strict_promotion(dtypes):
    dtype, bias_dtype = dtypes.split()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        arrays = qkv(jnp.dtype(dtype), width=3)
        (bias,) = draw(1, (5, 7), dtype=jnp.dtype(bias_dtype))
        expected, exact = naive_attention(*arrays, bias=bias)

        @jax.jit
        def run(*x):
            output, vjp = jax.vjp(lambda *x: blockwise(*x[:3], bias=x[3])[0], *x)
            ids = dict(query_segment_ids=jnp.zeros(5), key_segment_ids=jnp.zeros(7))
            others = mc.max_logits(*x[:2], bias=x[3], **ids)
            return output, vjp(output), others

        output, grads, largest = run(*arrays, bias)
    assert [g.dtype for g in (*grads, output)] == [dtype] * 3 + [bias_dtype, dtype]
    rounding = 10 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(output), expected, atol=rounding)
    np.testing.assert_allclose(largest, exact, rtol=1e-5)


@pytest.mark.parametrize(
    "mask, group, is_causal",
    one_at_a_time([None, np.tri(5, 5, 2, dtype=bool)], [1, 2], [False, True]),
)
def test_flax_attention_keeps_float64(is_causal, group, mask):
    visible = np.ones((5, 5), bool) if mask is None else mask
    visible = np.tri(5, dtype=bool) & visible if is_causal else visible
    with jax.enable_x64(True):
        arrays = qkv(np.float64, key_length=5, width=3, group=group)
        actual = mc.attention_fn(*arrays, mask=mask, is_causal=is_causal)
    expected, _ = naive_attention(*arrays, mask=visible)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_layer_without_batch_takes_a_mask_as_jax_nn_does():
    causal = np.tri(5, dtype=bool)

    def largest(query, key, mask=None):
        return naive_attention(query, key, key, mask=mask)[1]

    # The largest product of a query with itself would be one that is seen.
    query, key = first_that(
        lambda both: differ(largest(*both), largest(*both, causal)),
        lambda seed: draw(seed, (5, 2, 3), (5, 2, 3)),
    )
    mask = nnx.make_causal_mask(jnp.ones((1, 5)))  # (1, 1, 5, 5)

    def call(layer):
        return mc.attention_fn(query, key, key, mask=mask, module=layer)

    _, stats = nnx.capture(call, nnx.Intermediate)(nnx.Module())
    exact = largest(query, key, causal)
    np.testing.assert_allclose(jax.tree.leaves(stats)[0], exact, rtol=1e-5)


def test_a_head_that_sees_nothing_in_float16():
    x = draw(0, (1, 3, 2, 4), dtype=np.float16)[0]
    mask = np.asarray([True, False])[:, None, None]
    _, largest = mc.blockwise_attention(x, x, x, mask=mask)
    assert np.isfinite(largest[0]) and largest[1] == -np.inf
    np.testing.assert_array_equal(largest, mc.max_logits(x, x, mask=mask))
