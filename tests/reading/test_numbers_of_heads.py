"""Kernels of one number for each head go to AdamW; what looks like them does not."""

import by_numbers
import jax
import jax.numpy as jnp
import pytest
from variants import B, D, normed, T
from written_out import joined

import muonclip_jax as mc


HEADS, OUT = 4, 7
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)


def cut(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def _steps_and_decays(p, x):
    """As a state-space model has them, of kernels of their own."""
    value, step = cut(x @ p["v"]), jax.nn.sigmoid(x @ p["gate"])
    decay = jnp.exp(-jax.nn.softplus(x @ p["decay"] + p["bias"]))

    def trip(state, inputs):
        value, step, decay = inputs
        state = state * decay[..., None] + value * step[..., None]
        return state, state

    inputs = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (value, step, decay))
    out = jax.lax.scan(trip, jnp.zeros((B, HEADS, D // HEADS)), inputs)[1]
    return joined(jnp.moveaxis(out, 0, 1))


def _of_low_rank(p, x):
    gate = jax.nn.sigmoid(jnp.tanh(x @ p["a"]) @ p["gate"])
    return joined(cut(x @ p["v"]) * gate[..., None])


def _pooled_by_heads(p, x):
    weights = jax.nn.softmax(x @ p["gate"], axis=1)
    return joined((weights[..., None] * cut(x @ p["v"])).sum(1))


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (
            _steps_and_decays,
            {"gate": (D, HEADS), "decay": (D, HEADS), "bias": (HEADS,)},
        ),
        (_of_low_rank, {"a": (D, 3), "gate": (3, HEADS)}),
        (_pooled_by_heads, {"gate": (D, HEADS)}),
    ],
)
def test_what_scales_all_features_of_a_head_goes_to_adamw(fun, shapes):
    labels = _labels(fun, shapes)
    assert labels["v"] == "matrix"
    assert all(labels[name] == "vector" for name in {"gate", "decay"} & labels.keys())
    assert labels.get("a", "matrix") == "matrix"


def _gated_linear_unit(p, x):
    return cut(x @ p["v"]) * cut(jax.nn.sigmoid(x @ p["w"]))


def _squeezed_and_excited(p, x):
    x = jnp.tanh(x @ p["v"])
    return cut(x * jax.nn.sigmoid(x.mean(1) @ p["w"])[:, None])


def _adaptive_norm(p, x):
    """A table distinguishes positions, and the modulation distinguishes none."""
    x = jnp.tanh(x @ p["v"]) + p["positions"]
    return cut(normed(x) * (1 + jnp.tanh(x.mean(1)) @ p["w"])[:, None])


def _outer_product(p, x):
    key, value = jax.nn.sigmoid(x @ p["w"]), x @ p["v"]
    return key[..., :, None] * value[..., None, :]


def _shared_by_heads(p, x):
    """Features of a head, the same for all heads."""
    return cut(x @ p["v"]) * jax.nn.sigmoid(x @ p["w"])[:, :, None]


def _added(p, x):
    return jnp.tanh(cut(x @ p["v"]) + (x @ p["w"])[..., None])


def _features_of_their_own(p, x):
    """It scales heads, but another kernel takes it, too."""
    gate = jnp.tanh(x @ p["w"])
    return cut(x @ p["v"]) * gate[..., None] + cut(jnp.tanh(gate @ p["more"]))


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (_gated_linear_unit, {"w": (D, D)}),
        (_squeezed_and_excited, {"w": (D, D)}),
        (_adaptive_norm, {"w": (D, D), "positions": (T, D)}),
        (_outer_product, {"w": (D, 5), "out": (5 * D, OUT)}),
        (_shared_by_heads, {"w": (D, D // HEADS)}),
        (_added, {"w": (D, HEADS)}),
        (_features_of_their_own, {"w": (D, HEADS), "more": (HEADS, D)}),
    ],
)
def test_other_products_with_activations_are_of_matrices(fun, shapes):
    labels = _labels(lambda p, x: joined(fun(p, x)), shapes)
    assert labels["v"] == labels["w"] == "matrix"


def _labels(fun, shapes):
    def loss(p, x):
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(fun(p, x)) @ p["out"])[..., 0])

    params = by_numbers.shapes(**{"v": (D, D), "out": (D, OUT)} | shapes)
    return mc.read_model(loss, params, X).labels


def test_heads_along_the_batch_are_counted_up_to_a_limit():
    """Of each entry along both it is asked which head it is: 2^14 of them at most."""

    def loss(p, x):
        by_head = (jnp.swapaxes(cut(x @ p[n]), 1, 2) for n in "qkv")
        q, k, v = (y.reshape(-1, *y.shape[2:]) for y in by_head)
        weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k))
        return jnp.sum((weights @ v) ** 2)

    params = dict.fromkeys("qkv", jnp.ones((D, HEADS)))
    for batch, count in ((2**12, 1), (2**12 + 1, 0)):
        x = jax.ShapeDtypeStruct((batch, T, D), jnp.float32)
        reading = mc.read_model(loss, params, x)
        assert [layer.query[0].heads for layer in reading.attention] == [HEADS] * count
        assert all("keep an axis" in why for why in reading.refused)
        assert len(reading.refused) == 1 - count
