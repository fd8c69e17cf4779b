"""Layers of a stack in loops: picked, nested, or only some of them; and `pmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from variants import B, D, DIM, H, logits, normed, T

import muonclip_jax as mc


X = normal(9, B, T, D)


def _layer(p, x):
    seen = logits(p, x)
    out = jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(seen), x @ p["v"])
    return normed(x + out), seen.max((0, 2, 3))


STACK = {n: normal(i, 3, D, H * DIM) for i, n in enumerate("qk")}
STACK["v"] = normal(2, 3, D, D)


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
        return jax.lax.scan(lambda x, p: _layer(p, x), x, p)

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


def test_a_loop_over_some_layers_of_a_stack_has_the_others_apart():
    def loss(params, x):
        x, _ = _layer({name: w[0] for name, w in params.items()}, x)
        rest = {name: w[1:] for name, w in params.items()}
        return jnp.sum(jax.lax.scan(lambda x, p: (_layer(p, x)[0], None), x, rest)[0])

    def in_turn(params, x):
        for i in range(3):
            x, _ = _layer({name: w[i] for name, w in params.items()}, x)
        return jnp.sum(x)

    assert not mc.read_model(loss, STACK, X).refused
    found, expected = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(stats)])
        for _, stats in (mc.record_attention(f)(STACK, X) for f in (loss, in_turn))
    )
    assert len(set(expected.round(3))) == len(expected) > 3
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-5)


@pytest.mark.parametrize(
    "exchange", ["gather", "untiled gather", "scatter", "untiled scatter"]
)
def test_heads_are_followed_through_exchanges_between_devices(exchange):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    is_gather, is_tiled = "gather" in exchange, "untiled" not in exchange

    def heads(w, x):
        y = x @ w  # some columns, or a summand of all columns
        if is_gather:
            y = jax.lax.all_gather(y, "a", axis=1, tiled=is_tiled)
        else:
            y = y if is_tiled else y.reshape(T, 2, -1)
            y = jax.lax.psum_scatter(y, "a", scatter_dimension=1, tiled=is_tiled)
        return y.reshape(T, -1, DIM)

    def local(p, x):
        q, k, v = (heads(p[name], x) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
        return jax.lax.psum(jnp.einsum("hqk,khd->qhd", weights, v).sum(), "a")

    specs = (P(None, "a"), P()) if is_gather else (P("a"), P(None, "a"))
    loss = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    params = {name: jnp.ones((D, H * DIM)) for name in "qkv"}
    (layer,) = mc.read_model(loss, params, jnp.ones((T, D))).attention
    for leaf in (*layer.query, *layer.key):
        assert leaf.head_ids.ravel().tolist() == np.repeat(np.arange(H), DIM).tolist()
