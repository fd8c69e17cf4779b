"""What a reading says of attention, checked by what it claims: scale, run, compare."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from variants import attend, B, cut, D, DIM, FLAT, H, logits, normed, T

import muonclip_jax as mc


X = normal(9, B, T, D)


def _flat(p, x):
    return cut(x @ p["q"]), cut(x @ p["k"])


def _product(query, key):
    return jnp.einsum("bqhd,bkhd->bhqk", query, key)


PARAMS = {"q": normal(0, *FLAT), "k": normal(1, *FLAT), "v": normal(2, D, D)}


def _masked(p, x):
    mask = jnp.tril(jnp.ones((T, T), bool))
    slopes = 2.0 ** -jnp.arange(1, H + 1)  # ALiBi
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    biased = logits(p, x) / DIM**0.5 - slopes[:, None, None] * distance
    return attend(jnp.where(mask, biased, -1e9), x @ p["v"])


def _in_two_blocks(p, x):
    """Keys come in blocks, and the maximum so far is carried along."""
    query, key = _flat(p, x)
    value = (x @ p["v"])[:, :4].reshape(B, 2, 2, D).swapaxes(0, 1)
    blocks = key[:, :4].reshape(B, 2, 2, H, DIM).swapaxes(0, 1)

    def step(carry, block):
        most, total, out = carry
        key, value = block
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        new = jnp.maximum(most, logits.max(-1))
        weights, old = jnp.exp(logits - new[..., None]), jnp.exp(most - new)
        out = out * old[..., None] + jnp.einsum("bhqk,bkd->bhqd", weights, value)
        return (new, total * old + weights.sum(-1), out), None

    start = jnp.full((B, H, T), -1e9), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, D))
    (_, total, out), _ = jax.lax.scan(step, start, (blocks, value))
    return out / total[..., None]


def _stock(p, x):
    query, key = _flat(p, x)
    value = jnp.broadcast_to((x @ p["v"])[:, :, None], (B, T, H, D))[..., :DIM]
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def _in_a_branch(p, x):
    return jax.lax.cond(
        x.sum() > 0,
        lambda x: attend(logits(p, x), x @ p["v"]),
        lambda x: 2 * jnp.broadcast_to(x[:, :, None], (B, T, H, D)),
        x,
    )


def _of_data(p, x):
    """The value depends on no parameter."""
    return attend(logits(p, x), x)


WAYS = {
    "of data": _of_data,
    "masked": _masked,
    "in two blocks": _in_two_blocks,
    "stock": _stock,
    "in a branch": _in_a_branch,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_leaves_however_attention_is_computed(way):
    reading = mc.read_model(lambda p, x: jnp.sum(WAYS[way](p, x) ** 2), PARAMS, X)
    (layer,) = reading.attention
    heads = {"ndim": 2, "axis": -2, "split": (H, DIM)}
    query, key = (mc.HeadLeaf(name, **heads).owned((D, H * DIM)) for name in "qk")
    assert layer == mc.AttentionLayer("", (query,), (key,))


def _without_gains(p, x):
    query, key = map(normed, _flat(p, x))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    return attend(logits, x @ p["v"])


def test_logits_that_no_parameter_scales_are_said_with_their_line():
    reading = mc.read_model(_without_gains, PARAMS, X)
    assert reading.attention == ()
    nested = mc.read_model(lambda p, x: _without_gains(p["a"], x), {"a": PARAMS}, X)
    assert nested.refused[0].startswith("a at ")
    (row,) = [line for line in str(reading).splitlines() if "a gain" in line]
    first = _without_gains.__code__.co_firstlineno
    assert f"test_read_attention.py:{first + 2}" in row and "norm without a gain" in row


def _normed_key(p, x):
    query, key = _flat(p, x)
    return _product(query, normed(key))


def _normed_query(p, x):
    query, key = _flat(p, x)
    return _product(normed(query), key)


def _query_of_tokens(p, x):
    """Learned queries, without a kernel of theirs."""
    tokens = p["tokens"][None].repeat(B, 0)
    return _product(cut(tokens), normed(cut(x @ p["k"])))


def _absorbed(p, x):
    """Latent attention as it decodes: the key's kernel is a factor of the query."""
    query = jnp.einsum("bthd,rhd->bthr", cut(x @ p["q"]), p["up"])
    return jnp.einsum("bqhr,bkr->bhqk", query, normed(x @ p["down"]))


def _shared_gain(p, x):
    """The key has a gain that all heads share, and the query none."""
    query, key = _flat(p, x)
    return _product(normed(query), normed(key) * p["gain"])


ONE_SIDED = {
    _normed_key: {"q": FLAT, "k": FLAT},
    _normed_query: {"q": FLAT, "k": FLAT},
    _query_of_tokens: {"tokens": (3, H * DIM), "k": FLAT},
    _absorbed: {"q": FLAT, "up": (5, H, DIM), "down": (D, 5)},
    _shared_gain: {"q": FLAT, "k": FLAT, "gain": (DIM,)},
}


def _checked_by_clipping(logits, shapes):
    """The largest logits before a clip and after it, by what is read and recorded."""

    def loss(p, x):
        return jnp.sum(attend(logits(p, x), x @ p["v"]) ** 2)

    params = {k: normal(i, *s) for i, (k, s) in enumerate(shapes.items())}
    params["v"] = PARAMS["v"]
    reading = mc.read_model(loss, params, X)
    _, stats = mc.record_attention(loss)(params, X)
    before = np.asarray(logits(params, X).max((0, 2, 3)))
    (recorded,) = jax.tree.leaves(stats)
    np.testing.assert_allclose(recorded, before, rtol=1e-5)
    threshold = float(np.sort(before)[1])
    clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, model=reading)
    after = np.asarray(logits(clipped, X).max((0, 2, 3)))
    return before, after, threshold, (reading, clipped)


@pytest.mark.parametrize("logits", ONE_SIDED)
def test_a_side_that_nothing_scales_leaves_the_whole_to_the_other(logits):
    before, after, threshold, _ = _checked_by_clipping(logits, ONE_SIDED[logits])
    expected = np.minimum(before, threshold)
    if logits is _shared_gain:  # all heads go with the largest
        expected = before * threshold / before.max()
    np.testing.assert_allclose(after, expected, rtol=1e-4)


def test_a_query_whose_gain_all_heads_share_stays_a_query():
    def logits(p, x):
        query, key = _flat(p, x)
        return _product(normed(query) * p["gain"], key)

    shapes = {"q": FLAT, "k": FLAT, "gain": (DIM,)}
    before, after, threshold, made = _checked_by_clipping(logits, shapes)
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-4)
    reading, clipped = made
    np.testing.assert_array_equal(clipped["gain"], normal(2, DIM))
    (layer,) = reading.attention
    assert [leaf.path for leaf in layer.query] == ["gain"]
    assert [leaf.path for leaf in layer.key] == ["k"]
    assert "the query stays: gain; key k" in str(reading)


def test_data_that_is_added_to_both_sides_is_refused_with_the_reason():
    def loss(p, bias, x):
        query, key = (cut(x @ p[name] + bias) for name in "qk")
        return attend(_product(query, key), x @ p["v"])

    (refused,) = mc.read_model(loss, PARAMS, jnp.zeros(H * DIM), X).refused
    assert "data or constants are added" in refused


def test_a_normed_query_whose_key_is_shared_is_refused_with_the_reason():
    def loss(p, x):
        query, key = normed(cut(x @ p["q"])), cut(x @ p["k"], 2)
        return attend(_product(query, jnp.repeat(key, 2, 2)), x @ p["v"])

    params = {**PARAMS, "k": normal(1, D, 2 * DIM)}
    reading = mc.read_model(loss, params, X)
    assert reading.attention == ()
    (refused,) = reading.refused
    assert "several query heads share a key" in refused and ".py:" in refused


def test_two_layers_in_one_module_go_by_the_paths_of_their_leaves():
    params = {f"{name}{i}": PARAMS[name] for i in range(2) for name in "qkv"}

    def loss(params, x):
        for i in range(2):
            p = {name: params[f"{name}{i}"] for name in "qkv"}
            x = normed(x + attend(logits(p, x), x @ p["v"]).mean(2))
        return x.sum()

    layers = mc.read_model(loss, params, X).attention
    assert [layer.path for layer in layers] == ["q0", "q1"]
    stats = {f"q{i}": {"max_logits": jnp.full(H, 2.0)} for i in range(2)}
    scaled = mc.clip_qk(params, stats, 1.0, attention=layers)
    np.testing.assert_allclose(scaled["k1"], params["k1"] * 0.5**0.5, rtol=1e-6)
    np.testing.assert_array_equal(scaled["v1"], params["v1"])


def _loss_with_its_own_maximum(softmax):
    def loss(params, x):
        seen = logits(params, x)
        out = jnp.einsum("bhqk,bkhd->bqhd", softmax(seen), cut(x @ params["v"]))
        return (out**2).sum(), jnp.max(seen, (0, 2, 3))

    return loss


def test_a_program_s_own_maximum_is_not_that_of_its_softmax():
    loss = _loss_with_its_own_maximum(jax.nn.softmax)
    (_, own), stats = mc.record_attention(loss)(PARAMS, X)
    np.testing.assert_allclose(stats["max_logits"], own, rtol=1e-6)


def test_turned_logits_are_those_of_the_softmax():
    """Its maximum may be formed before a transpose, and its sum after it."""

    def softmax(logits):
        largest = logits.max(-1).transpose(2, 0, 1)
        turned = jnp.exp(logits.transpose(2, 0, 1, 3) - largest[..., None])
        weights = turned / turned.sum(-1, keepdims=True)
        return weights.transpose(1, 2, 0, 3)

    loss = _loss_with_its_own_maximum(softmax)
    (_, own), stats = mc.record_attention(loss)(PARAMS, X)
    np.testing.assert_allclose(stats["max_logits"], own, rtol=1e-6)


def test_a_norm_of_what_is_summed_over_tokens_is_no_softmax():
    """Values that are a norm's output were normalized, but along their features."""

    def loss(p, x):
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        y = normed(x)
        return (jax.nn.softmax(y @ y.mT) @ y @ p["head"]).sum()

    kernels = {"up": normal(0, D, D), "down": normal(1, D, D), "head": normal(2, D, 3)}
    reading = mc.read_model(loss, kernels, X)
    assert reading.labels == {"up": "matrix", "down": "matrix", "head": "head"}
    assert "a function other than softmax" not in str(reading.refused)


def _talking(p, x):
    """Weights mixed over heads (arXiv:2003.02436)."""
    weights = jax.nn.softmax(logits(p, x))
    return jnp.einsum("bhqk,hg,bkd->bqgd", weights, p["mix"], x @ p["v"])


def _both_sides_again(p, x):
    query, key, value = (jnp.einsum("btd,dhk->bhtk", x, p[name]) for name in "qkv")
    logits = query @ key.mT + key.sum(-1)[..., None, :]
    logits += query.sum(-1, keepdims=True) * jnp.arange(T)
    return jax.nn.softmax(logits) @ value


def test_mixed_weights_are_weights_and_sides_that_logits_have_twice_scale_none():
    params = PARAMS | {"mix": normal(3, H, H)}
    layers = mc.read_model(lambda p, x: _talking(p, x).sum(), params, X).attention
    assert [[leaf.path for leaf in layer.leaves] for layer in layers] == [["q", "k"]]
    params = {name: normal(i, D, H, DIM) for i, name in enumerate("qkv")}
    reading = mc.read_model(
        lambda p, x: (_both_sides_again(p, x) ** 2).sum(), params, X
    )
    assert not reading.attention
    assert ["in a second way" in why for why in reading.refused] == [True]
