"""Attention in layers, functions and meshes, and what only looks like it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pieces_of_cases import (
    array,
    attend,
    attended,
    B,
    C,
    case,
    CAUSAL,
    cut,
    D,
    end,
    gains,
    H,
    K,
    mixed,
    network,
    ONE,
    one,
    one_layer,
    qkv,
    rms,
    SAYS,
    scores,
    soft,
    weights,
)


# Layers.


def _layer(p, x):
    return rms(x + attend(*qkv(p, x)) @ p["o"])


STACK = weights(**dict.fromkeys("qkvo", (2, D, D)), head=(D, C))


def _of_unit_size(p, x):
    """Query and key are normed: of a layer only what the logits are multiplied with."""
    q, k, v = qkv(p, x)
    logits = scores(rms(q), rms(k)) * p["scale"].reshape(-1, 1, 1)
    return rms(x + mixed(soft(jnp.where(CAUSAL, logits, -1e30)), v) @ p["o"])


_scaled = functools.partial(
    case, "q k v o 1|2; scale vector; head head", scaled="scale"
)


@_scaled(STACK | {"scale": gains((2, 1, H))}, attention="read")
def a_temperature_for_each_head_of_counted_layers(p, x):
    def layer(i, x):
        return _of_unit_size({n: p[n][i] for n in p if n != "head"}, x)

    return jax.lax.fori_loop(0, 2, layer, x) @ p["head"]


@_scaled(STACK | {"scale": gains(2)}, attention="jointly")
def a_temperature_for_each_layer_backwards(p, x):
    def layer(x, w):
        return _of_unit_size(w, x), None

    layers = {n: p[n] for n in p if n != "head"}
    x, _ = jax.lax.scan(layer, x, layers, reverse=True)
    return x @ p["head"]


@case("q k v o 1|2; head head", STACK, attention="read")
def layers_in_a_python_loop(p, x):
    for i in range(2):
        x = _layer({n: p[n][i] for n in "qkvo"}, x)
    return x @ p["head"]


@case(
    "layers/*/? 0|1; head head",
    {
        "layers": [weights(**dict.fromkeys("qkvo", (D, D)))] * 2,
        "head": array("head", D, C),
    },
    attention="read",
)
def layers_in_a_list(p, x):
    for w in p["layers"]:
        x = _layer(w, x)
    return x @ p["head"]


@case(
    "k v 0|1; first/? second/? 0|1; head head",
    {
        **weights(k=(D, D), v=(D, D), head=(D, C)),
        "first": weights(q=(D, D), o=(D, D)),
        "second": {"q": array("q2", D, D), "o": array("o2", D, D)},
    },
    attention="read",
)
def keys_and_values_of_two_layers(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    for n in ("first", "second"):
        q = cut(x @ p[n]["q"])
        x = rms(x + attend(q, k, v, layer=n) @ p[n]["o"])
    return x @ p["head"]


@case(
    "frozen/? frozen; " + SAYS,
    {**ONE, "frozen": {n: array("f" + n, D, D) for n in "qkvo"}},
    attention="said",
)
def frozen_tower(p, x):
    """Its attention is not clipped, so it has no statistic to compare."""
    frozen = jax.lax.stop_gradient(p["frozen"])
    q, k, v = qkv(frozen, x)
    x = rms(x + mixed(jax.nn.softmax(scores(q, k)), v) @ frozen["o"])
    return _layer(p, x) @ p["head"]


@one_layer("said", plain=attended)
def own_derivative_of_attention(p, x):
    def attend(q, k, v):
        return mixed(jax.nn.softmax(scores(q, k)), v)

    own = jax.custom_vjp(attend)
    own.defvjp(lambda *a: (attend(*a), a), lambda a, g: jax.vjp(attend, *a)[1](g))
    return end(p, x, own(*qkv(p, x)))


def _on_mesh(devices, local, **specs):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("a",), auto, devices=jax.devices()[:devices])
    return jax.shard_map(local, mesh=mesh, **specs)


def _projected(p, x):
    return (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")


def _weighed(q, k, v, softmax=jax.nn.softmax):
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores(q, k)), v)


def _written(p, y):
    return jnp.einsum("bqhd,hde->bqe", y, p["o"])


def _with_heads(p, x):
    y = _weighed(*_projected(p, x), soft)
    return jax.nn.gelu(x + _written(p, y)) @ p["head"]


def _sharded(devices, in_specs, out_specs, *args, heads=H):
    """Registers what each device computes of `_with_heads`."""
    leaves = one(**dict.fromkeys("qkv", (D, heads, K)), o=(heads, K, D))
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}

    def register(local):
        def fun(p, x):
            return _on_mesh(devices, local, **specs)(p, x)

        fun.__name__ = local.__name__
        told = {"attention": "read", "plain": _with_heads}
        return case("q k v 0|12; o 01|2; head head", leaves, *args, **told)(fun)

    return register


_BY_HEADS = {n: P(None, "a") for n in "qkv"} | {"o": P("a"), "head": P()}


@_sharded(3, (_BY_HEADS, P()), P())
def one_head_on_each_device(p, x):
    y = jax.lax.psum(_written(p, _weighed(*_projected(p, x))), "a")
    return jax.nn.gelu(x + y) @ p["head"]


_BY_POSITIONS = P(None, "a")


@_sharded(2, (P(), _BY_POSITIONS), _BY_POSITIONS, array("x of eight", B, 8, D), heads=4)
def positions_for_heads_between_devices(p, x):
    """DeepSpeed-Ulysses: each device has some positions, and attends for some heads."""
    swap = functools.partial(jax.lax.all_to_all, axis_name="a", tiled=True)
    q, k, v = (swap(y, split_axis=2, concat_axis=1) for y in _projected(p, x))
    y = swap(_weighed(q, k, v), split_axis=1, concat_axis=2)
    return jax.nn.gelu(x + _written(p, y)) @ p["head"]


_BY_FEATURES = {n: P("a") for n in "qkv"} | {"o": P(None, None, "a"), "head": P("a")}


@_sharded(2, (_BY_FEATURES, P(None, None, "a")), P())
def features_on_two_devices(p, x):
    y = _weighed(*(jax.lax.psum(y, "a") for y in _projected(p, x)))
    y = jax.nn.gelu(x + _written(p, y))
    return jax.lax.psum(y @ p["head"], "a")


@case(
    "q k v 1|2; head head",
    weights(**dict.fromkeys("qkv", (2, D, D)), head=(D, C)),
    attention="read",
    plain=lambda p, x: _scanned(p, x, attend),
)
def on_a_mesh_in_a_scan(p, x):
    def unnoted(q, k, v):
        return mixed(jax.nn.softmax(scores(q, k)), v)

    spec = P("a")
    return _scanned(p, x, _on_mesh(2, unnoted, in_specs=(spec,) * 3, out_specs=spec))


def _scanned(p, x, attend):
    def layer(x, w):
        return rms(x + attend(*qkv(w, x))), None

    return jax.lax.scan(layer, x, {n: p[n] for n in "qkv"})[0] @ p["head"]


# What looks like attention.


@network("w 0|1; a b any", w=(D, D), a=(D,), b=(D,), attention="maybe")
def graph_attention(p, x):
    """GAT: logits are sums, so no product of query and key is there."""
    y = x @ p["w"]
    logits = (y @ p["a"])[:, :, None] + (y @ p["b"])[:, None]
    return jax.nn.gelu(jax.nn.softmax(jax.nn.leaky_relu(logits)) @ y) @ p["head"]
