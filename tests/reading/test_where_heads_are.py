"""Leaves in which heads are a part, several parts, or in another order; stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, normal
from test_read_attention import _checked_by_clipping
from variants import B, cut, D, DIM, H, normed, rotated, T

import muonclip_jax as mc


X = normal(9, B, T, D)
G = 2  # key heads


def _logits(query, key):
    key = jnp.repeat(key, query.shape[2] // key.shape[2], 2)
    return jnp.einsum("bqhd,bkhd->bhqk", query, key)


def _queries_then_keys(p, x):
    """Phi-3's: heads of query, key and value one after the other in one axis."""
    y = cut(x @ p["qkv"] + p["b"], H + 2 * G)
    return _logits(rotated(y[:, :, :H]), rotated(y[:, :, H : H + G]))


def _queries_then_keys_with_an_axis(p, x):
    y = jnp.einsum("btd,dhk->bthk", x, p["qkv"])
    return _logits(*jnp.split(y, [H, H + G], axis=2)[:2])


def _two_slices(p, x):
    """The first and the last entries of a head are its query's."""
    y = cut(x @ p["qkv"])
    query = jnp.concatenate([y[..., :2], y[..., 10:]], -1)
    return _logits(query, y[..., 2:8])


def _transposed_heads(p, x):
    """The kernel counts heads by their place in a group first."""
    query = (x @ p["q"]).reshape(B, T, 2, G, DIM).swapaxes(2, 3).reshape(B, T, H, DIM)
    return _logits(query, cut(x @ p["k"], G))


def _both_cut(p, x):
    """Query and key are corners of one array of (3, heads, 2 * dim)."""
    y = jnp.einsum("btd,dahk->btahk", x, p["qkv"])
    return _logits(y[:, :, 0, :, :DIM], y[:, :, 2, :, DIM:])


def _tiles(p, x):
    """Heads are tiles of two axes of a kernel, and its inputs are its last."""
    y = jnp.einsum("btd,mnd->btmn", x, p["q"]).reshape(B, T, 2, 2, 2, 3)
    query = y.transpose(0, 1, 4, 2, 3, 5).reshape(B, T, H, DIM)
    return _logits(query, cut(x @ p["k"]))


def _backwards(p, x):
    """The last head comes first, and keys of groups in turn."""
    query, key = cut(x @ p["q"]), cut(x @ p["k"], G)
    return _logits(query[:, :, ::-1], jnp.tile(key, (1, 1, H // G, 1)))


def _from_two_kernels(p, x):
    """Of the heads in a row the first half is of one kernel, as the keys are."""
    query = jnp.concatenate([cut(x @ p["a"], 2), cut(x @ p["b"], 2)], 2)
    key = cut(x @ p["k"])
    return _logits(query, jnp.concatenate([key[:, :, 2:], key[:, :, :2]], 2))


WAYS = {
    _tiles: {"q": (4, 6, D), "k": (D, H * DIM)},
    _backwards: {"q": (D, H * DIM), "k": (D, G * DIM)},
    _from_two_kernels: {"a": (D, 2 * DIM), "b": (D, 2 * DIM), "k": (D, H * DIM)},
    _queries_then_keys: {"qkv": (D, (H + 2 * G) * DIM), "b": ((H + 2 * G) * DIM,)},
    _queries_then_keys_with_an_axis: {"qkv": (D, H + 2 * G, DIM)},
    _two_slices: {"qkv": (D, H * 14)},
    _transposed_heads: {"q": (D, H * DIM), "k": (D, G * DIM)},
    _both_cut: {"qkv": (D, 3, H, 2 * DIM)},
}


@pytest.mark.parametrize("logits", few(WAYS, *list(WAYS)[::3]))
def test_every_head_is_capped_and_nothing_else_is_touched(logits):
    shapes = WAYS[logits]
    params = {k: normal(i, *s, scale=0.5) for i, (k, s) in enumerate(shapes.items())}
    before, after, threshold, clipped = _checked_by_clipping(logits, params)
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-4)
    # Entries that no logit depends on keep their bits.
    for name in shapes:

        def total(leaf, name=name):
            return jnp.sum(logits({**params, name: leaf}, X) ** 2)

        matters = np.asarray(jax.grad(total)(params[name])) != 0
        same = np.asarray(clipped[name] == params[name])
        assert same[~matters].all()


def _layer(p, x):
    logits = _logits(cut(x @ p["q"]), cut(x @ p["k"]))
    out = jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(logits), x @ p["v"])
    return normed(x + out), logits.max((0, 2, 3))


STACK = {
    "q": normal(0, 3, D, H * DIM),
    "k": normal(1, 3, D, H * DIM),
    "v": normal(2, 3, D, D),
}


def _counted(params, x):
    def body(i, x):
        return _layer({name: w[i] for name, w in params.items()}, x)[0]

    return jax.lax.fori_loop(0, 3, body, x)


def _over_numbers(params, x):
    def body(x, i):
        p = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), params)
        return _layer(p, x)[0], None

    return jax.lax.scan(body, x, jnp.arange(3))[0]


def _unrolled(params, x):
    for i in range(3):
        x, _ = _layer({name: w[i] for name, w in params.items()}, x)
    return x


def _rows(x):
    """The largest logits of every layer, written out."""
    rows = []
    for i in range(3):
        x, largest = _layer({name: w[i] for name, w in STACK.items()}, x)
        rows.append(np.asarray(largest))
    return np.array(rows)


@pytest.mark.parametrize("run", few([_counted, _over_numbers], _counted))
def test_a_stack_whose_layers_a_counter_picks(run):
    def loss(params, x):
        return jnp.sum(run(params, x) ** 2)

    reading = mc.read_model(loss, STACK, X)
    assert tuple(reading.dimension_numbers["q"]) == (1, 2)
    _, stats = jax.jit(mc.record_attention(loss))(STACK, X)
    rows = _rows(X)
    np.testing.assert_allclose(stats["max_logits"], rows, rtol=1e-4)
    threshold = float(np.median(rows))
    clipped = mc.clip_qk(STACK, stats, threshold, model=reading)
    first = _layer({name: w[0] for name, w in clipped.items()}, X)[1]
    np.testing.assert_allclose(first, np.minimum(rows[0], threshold), rtol=1e-4)


def test_a_stack_that_python_unrolls_is_layers_with_parts_of_one_leaf():
    def loss(params, x):
        return jnp.sum(_unrolled(params, x) ** 2)

    reading = mc.read_model(loss, STACK, X)
    _, stats = mc.record_attention(loss)(STACK, X)
    rows = _rows(X)
    found = [stats["q"][str(i)]["max_logits"] for i in range(3)]
    np.testing.assert_allclose(found, rows, rtol=1e-4)
    threshold = float(np.median(rows))
    clipped = mc.clip_qk(STACK, stats, threshold, alpha=1.0, model=reading)
    gamma = np.minimum(rows, threshold) / rows
    scale = (clipped["q"] / STACK["q"]).reshape(3, D, H, DIM)
    np.testing.assert_allclose(scale, scale[:, :1, :, :1] + 0 * scale, rtol=1e-5)
    np.testing.assert_allclose(scale[:, 0, :, 0], gamma, rtol=1e-4)
    np.testing.assert_array_equal(clipped["k"], STACK["k"])


def test_layers_picked_by_another_index_are_refused_with_the_leaf():
    def loss(params, x, i):
        return jnp.sum(_layer({name: w[i] for name, w in params.items()}, x)[0])

    (refused,) = mc.read_model(loss, STACK, X, jnp.asarray(1)).refused
    assert "picks a layer of 'q' (3, 12, 24)" in refused


def test_in_pmap():
    def loss(p, x):
        return jnp.sum(jax.pmap(lambda x: _layer(p, x)[0])(x[None]) ** 2)

    params = {name: w[0] for name, w in STACK.items()}
    _, stats = mc.record_attention(loss)(params, X)
    np.testing.assert_allclose(stats["max_logits"], _layer(params, X)[1], rtol=1e-5)


def _nested(params, x):
    """Layers of two loops, of which the outer one has the second axis of the stack."""

    def outer(x, p):
        def inner(x, p):
            x, largest = _layer(p, x)
            return x, largest

        return jax.lax.scan(inner, x, p)

    turned = jax.tree.map(lambda w: w.swapaxes(0, 1), params)
    return jax.lax.scan(outer, x, turned)


def test_nested_loops_over_axes_in_another_order():
    params = {
        n: normal(i, 3, 2, *w.shape[1:]) for i, (n, w) in enumerate(STACK.items())
    }

    def loss(params, x):
        return jnp.sum(_nested(params, x)[0] ** 2)

    reading = mc.read_model(loss, params, X)
    rows = np.asarray(_nested(params, X)[1])
    _, stats = jax.jit(mc.record_attention(loss))(params, X)
    np.testing.assert_allclose(stats["max_logits"], rows, rtol=1e-4)
    threshold = float(np.median(rows))
    clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, model=reading)
    gamma = np.minimum(rows, threshold) / rows
    for name, power in (("q", 0.3), ("k", 0.7)):
        scale = (clipped[name] / params[name]).reshape(3, 2, D, H, DIM)
        found = np.moveaxis(scale[:, :, 0, :, 0], 0, 1)
        np.testing.assert_allclose(found, gamma**power, rtol=1e-4)


def test_a_loop_over_some_layers_of_a_stack_is_refused_with_the_leaf():
    def loss(params, x):
        x, _ = _layer({name: w[0] for name, w in params.items()}, x)
        rest = {name: w[1:] for name, w in params.items()}
        return jnp.sum(jax.lax.scan(lambda x, p: (_layer(p, x)[0], None), x, rest)[0])

    (refused,) = mc.read_model(loss, STACK, X).refused
    assert "does not go through all layers in 'q' (3, 12, 24)" in refused
