"""Statistics of models that record none equal a naive product of what they project."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import naive_logits, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

D, H, K, E, T = 12, 4, 2, 6, 5
X = normal(0, 2, T, D)


def rotate(x):
    """Rotary embedding: pairs of dimensions turn with the position."""
    angle = jnp.arange(x.shape[-3])[:, None, None] * jnp.arange(1, E // 2 + 1)
    first, second = x[..., : E // 2], x[..., E // 2 :]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], -1
    )


class Attention(nn.Module):
    """As in HuggingFace Flax: flat projections, no hook for another attention."""

    @nn.compact
    def __call__(self, x):
        query = nn.Dense(H * E, name="q_proj")(x)
        key = nn.Dense(K * E, name="k_proj")(x)
        value = nn.Dense(K * E, name="v_proj")(x)
        query, key, value = (
            y.reshape(*y.shape[:-1], -1, E) for y in (query, key, value)
        )
        y = jax.nn.dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True
        )
        return nn.Dense(D, name="o_proj")(y.reshape(*x.shape[:-1], H * E))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + Attention(name=f"layer_{i}")(x)
        return x


class NNXAttention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.LinearGeneral(D, (H, E), rngs=rngs)
        self.k_proj = nnx.LinearGeneral(D, (K, E), rngs=rngs)

    def __call__(self, x):
        query, key = self.q_proj(x) * E**-0.5, self.k_proj(x)
        weights = jnp.einsum("bthe,bshe->bhts", query, jnp.repeat(key, H // K, 2))
        return x + jnp.einsum("bhts,bsd->btd", jax.nn.softmax(weights), x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NNXAttention(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


CAUSAL = np.tri(T, dtype=bool)


def project(x, module):
    y = np.asarray(x, np.float64) @ np.asarray(module["kernel"], np.float64)
    return (y + np.asarray(module["bias"])).reshape(2, T, -1, E)


def largest(query, key, mask=None):
    return naive_logits(query, key, mask).max((0, 2, 3))


def only_projections(module, method):
    return module.name in ("q_proj", "k_proj")


@pytest.mark.more
@pytest.mark.parametrize("which", [True, only_projections])
def test_linen(which):
    variables = Model().init(jax.random.key(0), X)
    _, state = Model().apply(
        variables, X, capture_intermediates=which, mutable=["intermediates"]
    )
    stats = mc.captured_attention_stats(
        state["intermediates"],
        scale=None,
        is_causal=True,
        head_dim=E,
        transform=lambda q, k: (rotate(q), rotate(k)),
    )
    inner = variables["params"]["layer_0"]
    pair = [rotate(project(X, inner[name])) for name in ("q_proj", "k_proj")]
    np.testing.assert_allclose(
        stats["layer_0"]["max_logits"], largest(*pair, CAUSAL), rtol=1e-5
    )
    assert set(stats) == {"layer_0", "layer_1"}


@pytest.mark.parametrize("scale", [None, 0.25])
def test_nnx(scale):
    model = NNXModel(nnx.Rngs(0))
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    stats = mc.captured_attention_stats(run(X)[1], scale=scale, is_causal=False)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    x = X
    for i in range(2):
        inner = params["layers"][i]
        pair = (
            jnp.einsum("btd,dhe->bthe", x, inner[name]["kernel"]) + inner[name]["bias"]
            for name in ("q_proj", "k_proj")
        )
        expected = largest(*pair) * ((scale or E**-0.5) / E**-0.5)
        found = stats["layers"][str(i)]["max_logits"]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        x = model.layers[i](x)


def test_clip_from_outside_lands_on_the_threshold():
    """At learning rate 0, what is captured after the update is `min(S, tau)`."""
    variables = Model().init(jax.random.key(0), 3 * X)

    def recorded(params):
        _, state = Model().apply(
            {"params": params},
            3 * X,
            capture_intermediates=True,
            mutable=["intermediates"],
        )
        return mc.captured_attention_stats(
            state["intermediates"],
            scale=None,
            is_causal=True,
            head_dim=E,
            transform=lambda q, k: (rotate(q), rotate(k)),
        )

    @jax.jit
    def step(params, state):
        stats = recorded(params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(zeros, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), stats

    params = variables["params"]
    before = recorded(params)["layer_0"]["max_logits"]
    tau = float(np.sort(before)[1])
    tx = mc.muonclip(0.0, threshold=tau, attention=mc.named_attention(E))
    params, _ = step(params, tx.init(params))
    after = recorded(params)["layer_0"]["max_logits"]
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


@pytest.mark.more
def test_aux_of_a_loss_under_nnx_capture():
    model = NNXModel(nnx.Rngs(0))

    def loss_fn(model, x):
        y = model(x)
        return (y**2).mean(), {"mean": y.mean()}

    run = nnx.capture(loss_fn, nnx.Intermediate, method_outputs=nnx.Intermediate)

    def with_stats(model, x):
        (loss, aux), captured = run(model, x)
        stats = mc.captured_attention_stats(captured, scale=None, is_causal=False)
        return loss, aux | {"stats": stats}

    (loss, aux), grads = nnx.value_and_grad(with_stats, has_aux=True)(model, X)
    assert set(aux) == {"mean", "stats"} and jnp.isfinite(loss)
    alone = nnx.grad(lambda m: loss_fn(m, X)[0])(model)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@dataclasses.dataclass
class Calls:
    """Outputs as a capture has them."""

    heads: int = H

    def of(self, *seeds):
        return {"__call__": tuple(normal(s, 2, T, self.heads, E) for s in seeds)}


ONE = Calls().of(1)


def test_calls_of_a_shared_layer_by_maximum():
    captured = {"attn": {"q": Calls().of(1, 2), "k": Calls(K).of(3, 4)}}
    stats = mc.captured_attention_stats(captured, scale=None, is_causal=False)
    each = [
        largest(normal(q, 2, T, H, E), normal(k, 2, T, K, E))
        for q, k in ((1, 3), (2, 4))
    ]
    np.testing.assert_allclose(stats["attn"]["max_logits"], np.max(each, 0), rtol=1e-5)


def test_layers_in_front():
    query, key = normal(1, 3, 2, T, H, E), normal(2, 3, 2, T, K, E)
    captured = {"query": {"__call__": (query,)}, "key": {"__call__": (key,)}}
    stats = mc.captured_attention_stats(
        captured, scale=1.0, is_causal=True, stacked=True
    )
    expected = [largest(q, k, CAUSAL) * E**0.5 for q, k in zip(query, key, strict=True)]
    np.testing.assert_allclose(stats["max_logits"], expected, rtol=1e-5)


PAIR = normal(1, 2, 2, T, K, E)


@pytest.mark.parametrize(
    "captured, options, words",
    [
        ({"attn": {"q": ONE}}, {}, "no module has outputs of both .*'attn/q'"),
        ({"attn": {"q": ONE, "k": Calls(K).of(1, 2)}}, {}, "1 times .* 2 times"),
        ({"attn": {"q": ONE, "q_proj": ONE}}, {}, "name one by query="),
        ({"q": ONE, "k": ONE}, {"head_dim": 4}, "head_dim=4"),
        ({"q": ONE, "k": Calls(3).of(1)}, {}, "do not fit"),
        ({"q": ONE, "k": ONE}, {"query": "wq"}, "both wq and a key"),
        # One projection of key and value, which would broadcast.
        (
            {"q": ONE, "k": {"__call__": (PAIR,)}},
            {},
            "'k' .* different numbers of axes",
        ),
    ],
)
def test_refused(captured, options, words):
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        mc.captured_attention_stats(captured, scale=None, is_causal=False, **options)


def test_scale_and_mask_are_to_be_said():
    with pytest.raises(TypeError, match="scale"):
        mc.captured_attention_stats({}, is_causal=True)  # pyright: ignore
    with pytest.raises(TypeError, match="is_causal"):
        mc.captured_attention_stats({}, scale=1.0)  # pyright: ignore
