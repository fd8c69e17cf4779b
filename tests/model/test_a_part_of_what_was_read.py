"""An optimizer of fewer leaves than were read: adapters, or the last layers."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import normal

import muonclip_jax as mc


X = normal(0, 6, 8)


def layer(params, x):
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    heads = jax.nn.softmax(q @ k.mT) @ v
    return x + jnp.einsum("htk,hkd->td", heads, params["o"])


def loss(params, x=X):
    for name in sorted(params):
        x = layer(params[name], x)
    return jnp.mean(x**2)


def weights(seed):
    shapes = {"q": (8, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4), "o": (2, 4, 8)}
    return {
        name: normal((seed, i), *shape, scale=0.8)
        for i, (name, shape) in enumerate(shapes.items())
    }


PARAMS = {"a": weights(1), "b": weights(2)}


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS)


def recorded(params):
    return mc.record_attention(loss)(params)[1]


@pytest.mark.more
def test_the_last_layer_alone_is_trained_and_clipped():
    stats = recorded(PARAMS)
    threshold = float(stats["b"]["max_logits"].min()) / 2
    tx = mc.muonclip(0.0, threshold=threshold, model=reading())
    own = {"b": PARAMS["b"]}
    updates, _ = tx.update(own, tx.init(own), own, attention_stats=stats)
    after = recorded({**PARAMS, **optax.apply_updates(own, updates)})
    # Products of a few terms in float32.
    np.testing.assert_allclose(after["b"]["max_logits"], threshold, rtol=1e-5)
    np.testing.assert_array_equal(after["a"]["max_logits"], stats["a"]["max_logits"])


def test_heads_that_are_there_are_matrices_of_their_own():
    own = {"b": {"q": PARAMS["b"]["q"]}}
    tx = mc.scale_by_muon(model=reading(), beta=0.0, nesterov=False)
    update, _ = tx.update(own, tx.init(own))
    whole = {**PARAMS, "b": {**PARAMS["b"], **own["b"]}}
    expected, _ = tx.update(whole, tx.init(whole))
    # Programs differ, and each of five steps may magnify rounding by its slope at
    # zero: 3.4445**5 * 2**-24.
    np.testing.assert_allclose(update["b"]["q"], expected["b"]["q"], atol=3e-5)


def test_a_clip_that_lacks_a_leaf_says_which_and_what_to_use():
    own = {"b": {name: PARAMS["b"][name] for name in "qv"}}
    with pytest.raises(ValueError, match=r"not given 'b/k'.*model=.*mc\.muon"):
        mc.muonclip(1e-3, model=reading()).init(own)
    mc.muon(1e-3, model=reading()).init(own)


def test_params_that_were_not_read_are_no_part_of_it():
    # Silent otherwise: all layers would be somewhere else, and nothing clipped.
    tx = mc.qk_clip(model=reading())
    with pytest.raises(ValueError, match=r"other params: it has no 'net/a/"):
        tx.init({"net": PARAMS})


@pytest.mark.more
def test_adapters_of_nnx():
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k = (
                nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(2)
            )
            self.v = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            q, k, v = (f(x).reshape(1, 6, 2, 4) for f in (self.q, self.k, self.v))
            return jax.nn.dot_product_attention(q, k, v)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    model = Attention(nnx.Rngs(0))
    reading = mc.read_model(loss, model, X)
    tx = mc.muon(1e-2, model=reading)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    of_adapters = nnx.DiffState(0, nnx.LoRAParam)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = nnx.grad(loss, argnums=of_adapters)(model, X)
    optimizer.update(model, grads)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    names = {path[-1].key for path, x in jax.tree.leaves_with_path(moved) if x}
    assert names == {"lora_a", "lora_b"}
    with pytest.raises(ValueError, match=r"q/kernel.*LoRAParam"):
        nnx.Optimizer(model, mc.muonclip(1e-2, model=reading), wrt=nnx.LoRAParam)


def test_a_partition_of_equinox():
    class Layers(eqx.Module):
        a: dict
        b: dict

    model = Layers(**PARAMS)
    of = eqx.tree_at(
        lambda x: x.b, jax.tree.map(lambda _: False, model), {k: True for k in "qkvo"}
    )
    own, rest = eqx.partition(model, of)
    reading = mc.read_model(lambda m: loss({"a": m.a, "b": m.b}), model)
    tx = mc.muonclip(0.0, threshold=1.0, model=reading)
    _, stats = mc.record_attention(lambda m: loss({"a": m.a, "b": m.b}))(model)
    updates, _ = tx.update(own, tx.init(own), own, attention_stats=stats)
    after = eqx.combine(eqx.apply_updates(own, updates), rest)
    assert float(recorded({"a": after.a, "b": after.b})["b"]["max_logits"].max()) < 1.01
