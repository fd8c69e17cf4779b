"""Fused attention: read by its operands, recorded where its equation says the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, naive_logits, normal
from internals import cudnn
from jax.experimental.pallas.ops.tpu import flash_attention

import muonclip_jax as mc


B, T, D, H, DIM = 2, 128, 8, 4, 64
PARAMS = {name: normal(i, D, H * DIM, scale=0.3) for i, name in enumerate("qkv")}
X = normal(3, B, T, D)
FLAT = {"ndim": 2, "axis": -2, "split": (H, DIM)}


def heads(p, x):
    return [(x @ p[name]).reshape(B, T, -1, DIM) for name in "qkv"]


def layer_of(loss, params=PARAMS):
    (layer,) = mc.read_model(loss, params, X).attention
    return layer


def expected(p, mask=None, bias=None):
    query, key, _ = (np.asarray(x, np.float64) for x in heads(p, X))
    key = np.repeat(key, query.shape[2] // key.shape[2], 2)
    return naive_logits(query, key, mask, bias).max((0, 2, 3))


OURS = {
    "blockwise": mc.blockwise_attention,
    "splash": lambda *x, **o: mc.splash_attention(*x, interpret=True, **o),
}


@pytest.mark.parametrize("name", few(list(OURS), "blockwise"))
def test_this_packages_own_are_read_and_recorded(name):
    def loss(p, x):
        out, _ = OURS[name](*heads(p, x), is_causal=True)  # the statistic is dropped
        return jnp.sum(out**2)

    layer = layer_of(jax.jit(loss))
    query, key = (mc.HeadLeaf(name, **FLAT).owned((D, H * DIM)) for name in "qk")
    assert layer == mc.AttentionLayer("", (query,), (key,))
    value, stats = jax.jit(mc.record_attention(jax.checkpoint(loss)))(PARAMS, X)
    np.testing.assert_allclose(value, loss(PARAMS, X), rtol=1e-4)
    largest = expected(PARAMS, np.tril(np.ones((T, T), bool)))
    np.testing.assert_allclose(stats["max_logits"], largest, rtol=1e-4)


@pytest.fixture
def on_gpu(monkeypatch):
    """cuDNN's attention is traced as on a GPU; without its output nothing runs it."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)


def _lengths():
    return np.array([5, 7], np.int32)


BIAS = normal(5, 1, H, T, T, scale=3)
SEEN = np.arange(T)[:, None] - np.arange(T)
CUDNN = {
    "plain": ({}, None, None),
    "causal": ({"is_causal": True}, SEEN >= 0, None),
    "window": (
        {"is_causal": True, "local_window_size": (3, 0)},
        (SEEN >= 0) & (SEEN <= 3),
        None,
    ),
    "biased": ({"bias": jnp.asarray(BIAS, jnp.bfloat16)}, None, BIAS),
    "masked": ({"mask": (SEEN > 1)[None, None]}, SEEN > 1, None),
    "padded": (
        {"key_value_seq_lengths": _lengths()},
        np.arange(T)[None, None, None] < _lengths()[:, None, None, None],
        None,
    ),
}


@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("name", few(list(CUDNN), "window", "padded"))
def test_cudnn_by_its_equation(on_gpu, name, key_heads):
    options, mask, bias = CUDNN[name]
    params = {n: x[:, : key_heads * DIM] for n, x in PARAMS.items()}
    params["q"] = PARAMS["q"]

    def loss(p, x):
        halves = (y.astype(jnp.bfloat16) for y in heads(p, x))
        out = jax.nn.dot_product_attention(*halves, implementation="cudnn", **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    layer = layer_of(loss, params)
    assert [leaf.path for leaf in layer.leaves] == ["q", "k"]
    assert layer.key[0].heads == key_heads
    stats = jax.jit(lambda p, x: mc.record_attention(loss)(p, x)[1])(params, X)
    largest = expected(params, mask, bias)
    np.testing.assert_allclose(stats["max_logits"], largest, rtol=2e-2)


def _of_jax(p, x):
    swapped = (y.swapaxes(1, 2) for y in heads(p, x))
    return jnp.sum(flash_attention.flash_attention(*swapped, causal=True) ** 2)


def test_a_kernel_that_keeps_its_logits_is_read_and_not_recorded():
    assert [leaf.path for leaf in layer_of(_of_jax).leaves] == ["q", "k"]
    line = _of_jax.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=f"test_kernels_read.py:{line} cannot be reco"):
        mc.record_attention(_of_jax)(PARAMS, X)


def test_an_operation_that_may_hide_attention_is_an_error_unless_told():
    def loss(p, x):
        query, key, _ = heads(p, x)
        shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
        return jax.pure_callback(lambda q, k: q, shape, query, key).sum()

    with pytest.raises(ValueError, match=r"pure_callback at test_kernels_read.py:\d+"):
        mc.record_attention(loss)(PARAMS, X)
    value, stats = mc.record_attention(loss, strict=False)(PARAMS, X)
    assert stats == {} and value == pytest.approx(float(loss(PARAMS, X)))
