"""Blockwise attention: output, gradient and statistic are those of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leaf_pairs, more, naive_logits, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def arrays(length, key_length, heads, key_heads, depth=8, batch=(2,), **kwargs):
    query, key, value = (
        np.array(normal(i, *batch, *shape, depth, **kwargs))
        for i, shape in enumerate([(length, heads), *[(key_length, key_heads)] * 2])
    )
    # All logits of the first head are negative.
    query[..., 0, :], key[..., 0, :] = -abs(query[..., 0, :]), abs(key[..., 0, :])
    return tuple(map(jnp.asarray, (query, key, value)))


def compare(inputs, *, bias=None, block_size=16, **options):
    """Against jax.nn, through one vector-Jacobian product of all inputs."""
    block = functools.partial(mc.blockwise_attention, block_size=block_size)
    cotangent = normal(3, *inputs[0].shape)

    @jax.jit
    def blockwise(*x):
        (output, largest), vjp = jax.vjp(
            lambda q, k, v, b: block(q, k, v, bias=b, **options), *x
        )
        # A cotangent of the statistic must not leak into the gradient.
        return largest, (output, vjp((cotangent, jnp.ones_like(largest))))

    @jax.jit
    def whole(*x):
        attend = functools.partial(jax.nn.dot_product_attention, **options)
        output, vjp = jax.vjp(lambda q, k, v, b: attend(q, k, v, bias=b), *x)
        return output, vjp(cotangent)

    largest, actual = blockwise(*inputs, bias)
    expected = whole(*inputs, bias)
    # An error in a logit is a relative error in a weight.
    rounding = np.finfo(np.float32).eps * np.abs(largest).max()
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = max(1, np.abs(e).max())
        rtol, atol = max(1e-4, rounding), max(1e-5, rounding / 10)
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * size)
    return largest


@pytest.mark.parametrize(
    "lengths, key_heads, is_causal",
    [
        ((40, 40), 2, True),
        ((33, 50), 4, False),
        more((33, 50), 1, True),
        ((50, 33), 4, True),
        more((16, 16), 4, False),  # a single block
        ((5, 70), 1, False),
    ],
)
def test_equals_jax_nn(lengths, key_heads, is_causal):
    inputs = arrays(*lengths, 4, key_heads)
    largest = compare(inputs, is_causal=is_causal)
    mask = np.tri(*lengths, dtype=bool) if is_causal else None
    naive = naive_logits(inputs[0], inputs[1], mask).max((0, 2, 3))
    assert naive[0] < 0
    np.testing.assert_allclose(largest, naive, rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [(2, 4, 40, 40), more((1, 4, 40, 40)), (1, 1, 1, 40), more((1, 4, 40, 1))]
)
def test_bias_and_its_gradient(shape):
    bias = normal(6, *shape)
    inputs = arrays(40, 40, 4, 2)
    largest = compare(inputs, bias=bias, is_causal=True)
    mask = np.tri(40, dtype=bool)
    naive = naive_logits(inputs[0], inputs[1], mask).max((0, 2, 3))
    np.testing.assert_allclose(largest, naive, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths, window, has_bias",
    [
        more((45, 45), (5, 3), True),
        more((45, 45), (9, 0), False),
        ((33, 50), (4, 12), False),  # keys past the last query
        more((50, 21), (6, 2), True),  # queries past the last key's window
        more((40, 40), (-2, 7), False),  # ahead alone
        more((40, 40), (0, 0), False),  # itself alone
        more((3, 40), (1, 14), True),  # fewer queries than a block
    ],
)
def test_a_narrow_window_equals_a_mask(lengths, window, has_bias):
    inputs = arrays(*lengths, 4, 2)
    ahead = np.arange(lengths[1]) - np.arange(lengths[0])[:, None]
    mask = (ahead >= -window[0]) & (ahead <= window[1])
    bias = normal(6, 1, 4, *lengths) if has_bias else jnp.zeros((1, 1, 1, 1))
    cotangent = normal(3, *inputs[0].shape)

    def attend(options):
        block = functools.partial(mc.blockwise_attention, block_size=16, **options)

        @jax.jit
        def run(*x):
            (output, largest), vjp = jax.vjp(
                lambda q, k, v, b: block(q, k, v, bias=b), *x
            )
            return output, largest, vjp((cotangent, jnp.ones_like(largest)))

        return run(*inputs, bias)

    actual, expected = map(attend, ({"local_window_size": window}, {"mask": mask}))
    for a, e in leaf_pairs(actual, expected):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5)


def test_a_narrow_window_forms_few_logits_that_nobody_sees():
    shapes = [jax.ShapeDtypeStruct((2048, 1, 4), jnp.float32)] * 3
    attend = functools.partial(
        mc.blockwise_attention, is_causal=True, local_window_size=128
    )
    grad = jax.grad(lambda *x: attend(*x)[0].sum(), (0, 1, 2))
    program = str(jax.make_jaxpr(grad)(*shapes))
    assert "f32[1,128,256]" in program and "512" not in program


@pytest.mark.more
@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(4, 1), (4, 2), (3, 3)]),
    st.integers(1, 48),
)
def test_any_length_and_block(length, key_length, heads, block_size):
    compare(arrays(length, key_length, *heads), block_size=block_size)


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient():
    query, key, value = arrays(20, 20, 4, 4)
    mask = jnp.ones((1, 1, 20, 20), bool).at[..., 3, :].set(False)
    attend = functools.partial(mc.blockwise_attention, mask=mask, block_size=8)
    output, largest = attend(query, key, value)
    assert (output[:, 3] == 0).all() and jnp.isfinite(largest).all()
    grads = jax.grad(lambda *x: attend(*x)[0].sum(), argnums=(0, 1, 2))(
        query, key, value
    )
    assert all(jnp.isfinite(g).all() for g in grads) and (grads[0][:, 3] == 0).all()


def test_logits_of_a_thousand_do_not_overflow():
    query, key, value = arrays(40, 40, 4, 2)
    compare((30 * query, 30 * key, value))


def test_bfloat16():
    inputs = arrays(40, 40, 4, 2, dtype=jnp.bfloat16)
    output, largest = mc.blockwise_attention(*inputs, block_size=16)
    assert output.dtype == jnp.bfloat16 and largest.dtype == jnp.float32
    exact = mc.blockwise_attention(*(x.astype(jnp.float32) for x in inputs))
    np.testing.assert_allclose(output, exact[0], atol=2e-2)
    np.testing.assert_allclose(largest, exact[1], rtol=1e-5)


def products(jaxpr):
    """The dtypes of the factors and of the result of each product."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield [str(x.aval.dtype) for x in (*eqn.invars, *eqn.outvars)]
        for inner in jax.tree.leaves([*eqn.params.values()]):
            yield from products(inner.jaxpr) if hasattr(inner, "jaxpr") else ()


def test_products_of_bfloat16_have_factors_of_bfloat16():
    """Matrix units are slow where one factor is float32; sums are in float32."""

    def loss(*inputs):
        return mc.blockwise_attention(*inputs, block_size=16)[0].sum()

    inputs = arrays(40, 40, 4, 2, dtype=jnp.bfloat16)
    found = [*products(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*inputs).jaxpr)]
    assert found == 7 * [["bfloat16", "bfloat16", "float32"]]


@pytest.mark.more
def test_memory_grows_linearly_with_the_length():
    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)] * 3

        def loss(*x):
            output, largest = mc.blockwise_attention(*x, is_causal=True)
            return output.sum(), largest

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        return grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    at_4096 = temporaries(4096)
    assert temporaries(16384) < 4.5 * at_4096
    assert at_4096 < 4096 * 4096 * 4  # less than the logits of a single head
