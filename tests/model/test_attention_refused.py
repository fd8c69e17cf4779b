"""Attention that names or a hand-written layer cannot mean: an error at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import one_at_a_time, query_and_key
from layers import flat_layer, fused_layer, gains_layer, latent_layer

import muonclip_jax as mc


def kernel(*shape, bias=None):
    leaf = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return leaf | ({"bias": jnp.ones(bias)} if bias else {})


SCALE = {"scale": jnp.ones(4)}


FLAT_PARAMS = {"q_proj": kernel(8, 8), "k_proj": kernel(8, 8)}
FUSED_PARAMS = {"c_attn": kernel(8, 24)}
STOCK_PARAMS = {"query": kernel(8, 2, 4), "key": kernel(8, 2, 4)}
LATENT_PARAMS = {"wq_b": kernel(8, 2, 6), "wkv_b": kernel(8, 2, 7)}
AT_ROOT_OF_ALL = flat_layer("", 4, "attn/q_proj", "attn/k_proj")
KINDS = {
    "flat": ([flat_layer("attn", 4)], FLAT_PARAMS),
    "flat at the root": ([AT_ROOT_OF_ALL], FLAT_PARAMS),
    "fused": ([fused_layer("attn", 4)], FUSED_PARAMS),
    "stock": (None, STOCK_PARAMS),
    "stock by name": (mc.flax_attention_layers, STOCK_PARAMS),
}
NORMS = (
    *("query_ln", "key_ln", "query_norm", "key_norm", "q_norm", "k_norm", "q_ln"),
    *("k_ln", "norm_q", "norm_k", "Q_Norm", "KeyNorm_0", "q_layernorm", "k_layernorm"),
    *("qk_norm", "ln_q", "query_layer_norm", "QueryRMSNorm_1", "_key_norm"),
    *("norm_added_k", "q_l2norm"),
)
OTHERS = ("norm", "q_a_layernorm", "kv_norm", "kv_a_layernorm", "ln_1", "q_proj_lora")


@pytest.mark.parametrize("norm, kind", one_at_a_time(NORMS, KINDS))
def test_norms_after_the_projections(kind, norm):
    attention, params = KINDS[kind]
    tx = mc.qk_clip(attention=attention)
    message = rf"normalized after the projection \({norm}\).*mc\.read_model"
    with pytest.raises(ValueError, match=message):
        tx.init({"block": {}, "attn": params | {norm: SCALE}})
    if callable(attention):
        with pytest.raises(ValueError, match="'attn'.*normalized after"):
            attention({"attn": params | {norm: SCALE}})


@pytest.mark.parametrize("kind", [*KINDS, "latent"])
def test_norms_elsewhere_are_no_concern(kind):
    latent = [latent_layer("attn", 4)], LATENT_PARAMS
    attention, params = (KINDS | {"latent": latent})[kind]
    norms = {name: SCALE for name in OTHERS}
    tree = {"attn": params | norms, "other": {"q_norm": SCALE}, "k_norm": SCALE}
    if kind == "flat at the root":
        tree.pop("k_norm")
    mc.qk_clip(attention=attention).init(tree)


@pytest.mark.parametrize("norm", ["q_norm", "q_ln", "norm_q", "Q_norm_0"])
def test_a_norm_of_the_latent_is_none_of_the_query(norm):
    params, layer = LATENT_PARAMS | {norm: SCALE, "kv_norm": SCALE}, latent_layer("", 4)
    mc.qk_clip(attention=[layer]).init(params)
    by_hand = layer._replace(rotary_query=())
    mc.qk_clip(attention=[by_hand]).init(params)
    with pytest.raises(ValueError, match="normalized after"):
        mc.qk_clip(attention=[by_hand]).init(LATENT_PARAMS | {norm: SCALE})
    with pytest.raises(ValueError, match="normalized after .*key_norm"):
        mc.qk_clip(attention=[layer]).init(params | {"key_norm": SCALE})


def test_layers_that_clip_the_gains_are_let_through():
    params = {"attn": STOCK_PARAMS | {"query_ln": SCALE, "key_ln": SCALE}}
    layer = gains_layer("attn")
    mc.qk_clip(attention=[layer]).init(params)
    half = layer._replace(key=(mc.HeadLeaf("key/kernel", 3),))
    with pytest.raises(ValueError, match=r"projection \(key_ln\)"):
        mc.qk_clip(attention=[half]).init(params)


def test_hidden_layers_may_be_normalized():
    params = {"a": STOCK_PARAMS | {"q_norm": SCALE}, "b": STOCK_PARAMS}
    params = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    one_by_one = jax.tree.map_with_path(lambda keys, _: keys[0].key == "b", params)
    for mask in ({"a": False, "b": True}, one_by_one):
        optax.masked(mc.qk_clip(), mask).init(params)
    with pytest.raises(ValueError, match="'a'.*normalized"):
        mc.qk_clip().init(params)


FLAT_KERNEL = kernel(8, 8)
OTHER_NAMES = {
    "flat": {"q_proj": FLAT_KERNEL, "k_proj": FLAT_KERNEL},
    "with heads": {"q_proj": kernel(8, 2, 4), "k_proj": kernel(8, 2, 4)},
    "T5": {"q": FLAT_KERNEL, "k": FLAT_KERNEL, "v": FLAT_KERNEL, "o": FLAT_KERNEL},
    "Equinox": {f"{n}_proj": {"weight": jnp.ones((8, 8))} for n in ("query", "key")},
    "Gemma": {
        "q_einsum": {"w": jnp.ones((2, 8, 4))},
        "kv_einsum": {"w": jnp.ones((2, 2, 8, 4))},
    },
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_attention_under_other_names_is_not_overlooked(kind):
    params = {"a": OTHER_NAMES[kind], "b": {"kernel": jnp.ones((8, 8))}}
    mixed = params | {"stock": STOCK_PARAMS}
    for tree in (params, mixed):
        for call in (mc.qk_clip().init, lambda params: mc.clip_qk(params, {})):
            with pytest.raises(ValueError, match=r"'a/q.*mc\.read_model"):
                call(tree)
        mc.qk_clip(attention=mc.flax_attention_layers).init(tree)
        mc.describe(tree, dimension_numbers=jax.tree.map(lambda _: None, tree))
    mc.qk_clip(attention=()).init(params)
    for mask in ({"a": False, "b": True}, jax.tree.map(lambda _: False, params)):
        optax.masked(mc.qk_clip(), mask).init(params)


def test_overlooked_attention_is_named_in_short():
    layers = {f"layer_{i}": OTHER_NAMES["flat"] for i in range(40)}
    with pytest.raises(ValueError, match="'layer_0/q_proj/kernel', .* and 37 more"):
        mc.qk_clip().init(layers)


def test_two_layers_at_one_path():
    params = {"a": STOCK_PARAMS, "b": STOCK_PARAMS}
    layers = mc.flax_attention_layers(params)
    for attention in (layers * 2, lambda p: layers * 2, [*layers, layers[0]]):
        with pytest.raises(ValueError, match="several layers at 'a'"):
            mc.qk_clip(attention=attention).init(params)


def test_entries_that_are_query_and_key_are_scaled_once():
    """A part of the key's is the query, too."""
    part = mc.HeadLeaf("w", 3, part=(-1, slice(0, 2)))
    layer = mc.AttentionLayer("", (part,), (mc.HeadLeaf("w", 3),))
    params = {"w": jnp.ones((3, 2, 4))}
    stats = {"max_logits": jnp.asarray([1.0, 400.0])}
    after = mc.clip_qk(params, stats, alpha=0.3, attention=[layer])["w"]
    np.testing.assert_allclose(after[0, 1], 0.25**0.5, rtol=1e-6)
    np.testing.assert_array_equal(after[:, 0], 1)


ROOT = query_and_key(8, 2, 4)
ODD = ROOT | {"key": {"kernel": jnp.ones((8, 3, 4))}}
HIDDEN = ROOT | {"key": {"kernel": optax.MaskedNode()}}
AT_ROOT = mc.AttentionLayer(
    "", (mc.HeadLeaf("query/kernel", 3),), (mc.HeadLeaf("key/kernel", 3),)
)


@pytest.mark.parametrize(
    ("params", "layer", "said"),
    [
        (ODD, AT_ROOT, "do not fit together"),
        (HIDDEN, AT_ROOT, "the optimizer is not given"),
        (ROOT, AT_ROOT._replace(key=()), "names no key"),
        (ROOT, AT_ROOT._replace(threshold=jnp.ones(5)), "threshold of shape"),
    ],
)
def test_attention_that_is_all_of_the_params_has_a_name(params, layer, said):
    with pytest.raises(ValueError, match=said) as error:
        mc.clip_qk(params, {"max_logits": jnp.ones(2)}, attention=[layer])
    assert "(the root)" in str(error.value) and "''" not in str(error.value)
