"""Attention in forms that no reading knows is refused or named, and nothing else is."""

import by_numbers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adversaries import CASES
from architectures import ARCHITECTURES
from library_models import MODELS
from test_architectures import shapes

import muonclip_jax as mc


B, T, D, H = 2, 6, 8, 2
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
PARAMS = by_numbers.shapes(**dict.fromkeys("qkvog", (D, D)), head=(D, 3), one=(D, 1))


def qkv(p, x):
    return ((x @ p[name]).reshape(B, T, H, -1) for name in "qkv")


def scores(p, x):
    q, k, _ = qkv(p, x)
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def weighed(p, x, w):
    _, _, v = qkv(p, x)
    return jnp.einsum("bhqk,bkhd->bqhd", w, v)


def read(layer):
    """The reading of a loss of a layer's outputs."""

    def loss(p, x):
        y = layer(p, x).reshape(B, T, D)
        return -jnp.mean(jax.nn.log_softmax((x + y @ p["o"]) @ p["head"])[..., 0])

    return mc.read_model(loss, PARAMS, X)


# Attention with a softmax that is hard to see.


def products_of_spectra(p, x):
    """Logits for each lag, by a complex transform over tokens."""
    q, k, v = qkv(p, x)
    q, k = (jnp.fft.fft(a, axis=1) for a in (q, k))
    lags = jnp.fft.ifft(q * jnp.conj(k), axis=1).real.sum(-1)
    return jnp.einsum("blh,bkhd->blhd", jax.nn.softmax(lags, axis=1), v)


def each_channel_has_weights(p, x):
    q, k, v = qkv(p, x)
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bkqhd", q, k), axis=1)
    return (w * v[:, :, None]).sum(1)


def one_activation_is_the_kernel(p, x):
    q, k, v = qkv(p, x)

    def correlated(a, b):
        a, b = (y.reshape(1, T, D).swapaxes(1, 2) for y in (a, b))
        return jax.lax.conv_general_dilated(a, b, (1,), [(T - 1, 0)])[0, 0]

    return jax.nn.softmax(jax.vmap(correlated)(q, k))[..., None, None] * v


def running_sums_of_logits(p, x):
    return weighed(p, x, jax.nn.softmax(jnp.cumsum(scores(p, x), -1)))


def mean_of_neighbouring_logits(p, x):
    window = (1, 1, 1, 3), (1, 1, 1, 1), "SAME"
    logits = jax.lax.reduce_window(scores(p, x), 0.0, jax.lax.add, *window)
    return weighed(p, x, jax.nn.softmax(logits))


def logits_of_the_next_key(p, x):
    logits = jnp.einsum("bhqk,kj->bhqj", scores(p, x), np.eye(T, k=1))
    return weighed(p, x, jax.nn.softmax(logits))


SOFTMAXES = [
    products_of_spectra, each_channel_has_weights, one_activation_is_the_kernel,
    running_sums_of_logits, mean_of_neighbouring_logits, logits_of_the_next_key,
]  # fmt: skip


@pytest.mark.parametrize("layer", SOFTMAXES)
def test_attention_in_an_odd_form_is_read_or_refused_with_its_line(layer):
    reading = read(layer)
    assert reading.attention or reading.refused
    assert all("test_suspicion.py:" in why for why in reading.refused)
    assert not reading.not_clipped
    if reading.refused:
        with pytest.raises(ValueError, match=r"test_suspicion\.py:\d"):
            jax.eval_shape(mc.muonclip(0.1, model=reading).init, PARAMS)


# Normalized, but not by exponentials.


def shares_of_relus(p, x):
    w = jax.nn.relu(scores(p, x))
    return weighed(p, x, w * (1 / (w.sum(-1, keepdims=True) + 1e-6)))


def shares_of_sigmoids(p, x):
    w = jax.nn.sigmoid(scores(p, x))
    return weighed(p, x, w / w.sum(-1, keepdims=True))


@pytest.mark.parametrize("layer", [shares_of_relus, shares_of_sigmoids])
def test_normalized_by_another_function_is_refused(layer):
    (why,) = read(layer).refused
    assert "normalized by a function other than softmax" in why


# Without a softmax.

FUNCTIONS = {
    "sigmoid": jax.nn.sigmoid,
    "sigmoid written out": lambda x: 1 / (1 + jnp.exp(-x)),
    "softplus": jax.nn.softplus,
    "squared relu": lambda x: jnp.square(jax.nn.relu(x)),
    "relu by a choice": lambda x: jnp.where(x > 0, x, 0) / T,
    "cube": lambda x: x**3,
    "square and itself": lambda x: x * x + x,
    "tanh of sums": lambda x: jnp.tanh(x @ np.tri(T, dtype=np.float32)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_attention_without_a_softmax_is_named_and_no_error(function):
    reading = read(lambda p, x: weighed(p, x, function(scores(p, x))))
    assert not reading.attention and not reading.refused
    (where,) = reading.not_clipped
    assert "test_suspicion.py:" in where
    for table in (str(reading), mc.describe(PARAMS, model=reading)):
        heading = (
            "QK-Clip does not act on attention without a softmax "
            "or with a frozen query and key"
        )
        assert table.endswith(f"{heading}\n{where}")
    jax.eval_shape(mc.muonclip(0.1, model=reading).init, PARAMS)


def test_logits_that_are_watched_are_not_normalized_for_that():
    """Sums and maxima that do not come back are no normalization."""

    def loss(p, x):
        logits = scores(p, x)
        w = jax.nn.sigmoid(logits)
        return weighed(p, x, w).sum() + 0.1 * logits.max() + w.mean()

    reading = mc.read_model(loss, PARAMS, X)
    assert reading.not_clipped and not reading.refused


# No attention.


def linear_attention_by_reciprocals(p, x):
    q, k, v = (jax.nn.elu(a) + 1 for a in qkv(p, x))
    total = 1 / (jnp.einsum("bqhd,bhd->bqh", q, k.sum(1)) + 1e-6)
    return jnp.einsum("bqhd,bkhd,bkhe,bqh->bqhe", q, k, v, total)


def normed_linear_attention(p, x):
    y = weighed(p, x, scores(p, x) * np.tri(T))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y * jax.nn.silu(x @ p["g"]).reshape(y.shape)


def decays_of_gates(p, x):
    gates = jnp.cumsum(jax.nn.log_sigmoid(x @ p["one"]), 1)
    decay = jnp.exp(gates - gates.swapaxes(1, 2)) * np.tri(T)
    return weighed(p, x, scores(p, x) * decay[:, None])


def squeezed_gates(p, x):
    y = (x @ p["q"]) * (x @ p["k"])
    return y * jax.nn.sigmoid(y.mean(1) @ p["g"])[:, None]


def long_convolution(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    window = jnp.sin(jnp.broadcast_to(jnp.arange(T)[:, None] / T, (T, D)) @ p["g"])
    window, y = (jnp.fft.rfft(a, n=2 * T, axis=-2) for a in (window, k * v))
    return q * jnp.fft.irfft(window * y, axis=1)[:, :T]


def contrasted(p, x):
    a, b = ((x @ p[name]).mean(1) for name in "qk")
    logits = 9 * a @ b.T
    aligned = jax.nn.log_softmax(logits) * (np.eye(B) * 0.9 + 0.1 / B)
    return jnp.broadcast_to(aligned.sum(), (B, T, D))


OTHERS = [
    linear_attention_by_reciprocals, normed_linear_attention, decays_of_gates,
    squeezed_gates, long_convolution, contrasted,
]  # fmt: skip


@pytest.mark.parametrize("layer", OTHERS)
def test_other_products_of_activations_are_not_suspected(layer):
    reading = read(layer)
    assert not (reading.attention or reading.refused or reading.not_clipped)


# All that is read elsewhere in these tests.

NORMALIZED = {
    "relus_by_a_mask",
    "squared_relus_divided_by_their_sum",
    "sparsemax_by_a_threshold",
}
NAMED = {"sigmoids", "squared_relus", "frozen_tower"} | {
    name for name, case in CASES.items() if case.attention == "named"
}


def every_case():
    for name, case in (CASES | MODELS).items():
        yield name, case.fun, case.params, case.args
    for name, a in ARCHITECTURES.items():
        yield name, lambda p, *x, a=a: a.loss(p, *x, None), shapes(a), a.inputs


@pytest.mark.more
def test_no_case_is_suspected_but_those_that_are_listed():
    named, normalized, others = set(), set(), set()
    for name, fun, params, args in every_case():
        reading = mc.read_model(fun, params, *args)
        named |= {name} if reading.not_clipped else set()
        why = " ".join(reading.refused)
        normalized |= {name} if "other than softmax" in why else set()
        others |= {name} if "an exponential of it weighs" in why else set()
    assert (named, normalized, others) == (NAMED, NORMALIZED, set())
