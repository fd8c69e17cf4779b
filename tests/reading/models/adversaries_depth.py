"""Attention in layers, functions and meshes, and what only looks like it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pieces_of_cases import (
    array,
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
    one,
    qkv,
    rms,
    SAYS,
    scores,
    soft,
    weights,
    X,
)


# Layers.


def _layer(p, x, **where):
    q, k, v = qkv(p, x)
    return rms(x + mixed(soft(scores(q, k), **where), v) @ p["o"])


STACK = weights(q=(2, D, D), k=(2, D, D), v=(2, D, D), o=(2, D, D), head=(D, C))


def _of_unit_size(p, x):
    """Query and key are normed: of a layer only what the logits are multiplied with."""
    q, k, v = qkv(p, x)
    logits = scores(rms(q), rms(k)) * p["scale"].reshape(-1, 1, 1)
    return rms(x + mixed(soft(jnp.where(CAUSAL, logits, -1e30)), v) @ p["o"])


@case(
    "q k v o 1|2; scale vector; head head",
    STACK | {"scale": gains((2, 1, H))},
    X,
    attention="read",
    scaled="scale",
)
def a_temperature_for_each_head_of_counted_layers(p, x):
    def layer(i, x):
        return _of_unit_size({n: p[n][i] for n in p if n != "head"}, x)

    return jax.lax.fori_loop(0, 2, layer, x) @ p["head"]


@case(
    "q k v o 1|2; scale vector; head head",
    STACK | {"scale": gains(2)},
    X,
    attention="jointly",
    scaled="scale",
)
def a_temperature_for_each_layer_backwards(p, x):
    def layer(x, w):
        return _of_unit_size(w, x), None

    layers = {n: p[n] for n in p if n != "head"}
    x, _ = jax.lax.scan(layer, x, layers, reverse=True)
    return x @ p["head"]


@case("q k v o 1|2; head head", STACK, X, attention="read")
def layers_in_a_python_loop(p, x):
    for i in range(2):
        x = _layer({n: p[n][i] for n in "qkvo"}, x)
    return x @ p["head"]


@case(
    "layers/*/? 0|1; head head",
    {
        "layers": [weights(q=(D, D), k=(D, D), v=(D, D), o=(D, D)) for _ in range(2)],
        "head": array("head", D, C),
    },
    X,
    attention="read",
)
def layers_in_a_list(p, x):
    for w in p["layers"]:
        x = _layer(w, x)
    return x @ p["head"]


@case(
    "k v 0|1; first/? second/? 0|1; head head",
    {
        "k": array("k", D, D),
        "v": array("v", D, D),
        "head": array("head", D, C),
        "first": {"q": array("q", D, D), "o": array("o", D, D)},
        "second": {"q": array("q2", D, D), "o": array("o2", D, D)},
    },
    X,
    attention="read",
)
def keys_and_values_of_two_layers(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    for n in ("first", "second"):
        q = cut(x @ p[n]["q"])
        x = rms(x + mixed(soft(scores(q, k), layer=n), v) @ p[n]["o"])
    return x @ p["head"]


@case(
    "frozen/? frozen; " + SAYS,
    {**one(), "frozen": {n: array("f" + n, D, D) for n in "qkvo"}},
    X,
    attention="said",
)
def frozen_tower(p, x):
    """Its attention is not clipped, so it has no statistic to compare."""
    frozen = jax.lax.stop_gradient(p["frozen"])
    q, k, v = qkv(frozen, x)
    x = rms(x + mixed(jax.nn.softmax(scores(q, k)), v) @ frozen["o"])
    return _layer(p, x) @ p["head"]


@case(SAYS, one(), X, attention="said", plain=attended)
def own_derivative_of_attention(p, x):
    def attend(q, k, v):
        return mixed(jax.nn.softmax(scores(q, k)), v)

    own = jax.custom_vjp(attend)
    own.defvjp(lambda *a: (attend(*a), a), lambda a, g: jax.vjp(attend, *a)[1](g))
    return end(p, x, own(*qkv(p, x)))


def _mesh(n, name="a"):
    return jax.make_mesh(
        (n,),
        (name,),
        devices=jax.devices()[:n],
        axis_types=(jax.sharding.AxisType.Auto,),
    )


HEADS = one(q=(D, H, K), k=(D, H, K), v=(D, H, K), o=(H, K, D))
HEADS_SAY = "q k v 0|12; o 01|2; head head"


def _with_heads(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    y = jnp.einsum("bhqk,bkhd->bqhd", soft(scores(q, k)), v)
    return jax.nn.gelu(x + jnp.einsum("bqhd,hde->bqe", y, p["o"])) @ p["head"]


@case(HEADS_SAY, HEADS, X, attention="read", plain=_with_heads)
def one_head_on_each_device(p, x):
    specs = {n: P(None, "a") for n in "qkv"} | {"o": P("a"), "head": P()}

    @functools.partial(
        jax.shard_map,
        mesh=_mesh(3),
        in_specs=(specs, P()),
        out_specs=P(),
        check_vma=False,
    )
    def local(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), v)
        y = jax.lax.psum(jnp.einsum("bqhd,hde->bqe", y, p["o"]), "a")
        return jax.nn.gelu(x + y) @ p["head"]

    return local(p, x)


FOUR = one(q=(D, 4, K), k=(D, 4, K), v=(D, 4, K), o=(4, K, D))


EIGHT = array("x of eight", B, 8, D)


@case(HEADS_SAY, FOUR, EIGHT, attention="read", plain=_with_heads)
def positions_for_heads_between_devices(p, x):
    """DeepSpeed-Ulysses: each device has some positions, and attends for some heads."""
    sharded = P(None, "a")

    @functools.partial(
        jax.shard_map,
        mesh=_mesh(2),
        in_specs=(P(), sharded),
        out_specs=sharded,
        check_vma=False,
    )
    def local(p, x):
        swap = functools.partial(jax.lax.all_to_all, axis_name="a", tiled=True)
        q, k, v = (
            swap(jnp.einsum("btd,dhk->bthk", x, p[n]), split_axis=2, concat_axis=1)
            for n in "qkv"
        )
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), v)
        y = swap(y, split_axis=1, concat_axis=2)
        return jax.nn.gelu(x + jnp.einsum("bqhd,hde->bqe", y, p["o"])) @ p["head"]

    return local(p, x)


@case(HEADS_SAY, HEADS, X, attention="read", plain=_with_heads)
def features_on_two_devices(p, x):
    specs = {n: P("a") for n in "qkv"} | {"o": P(None, None, "a"), "head": P("a")}

    @functools.partial(
        jax.shard_map,
        mesh=_mesh(2),
        check_vma=False,
        in_specs=(specs, P(None, None, "a")),
        out_specs=P(),
    )
    def local(p, x):
        q, k, v = (
            jax.lax.psum(jnp.einsum("btd,dhk->bthk", x, p[n]), "a") for n in "qkv"
        )
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), v)
        y = jax.nn.gelu(x + jnp.einsum("bqhd,hde->bqe", y, p["o"]))
        return jax.lax.psum(y @ p["head"], "a")

    return local(p, x)


@case(
    "q k v 1|2; head head",
    weights(q=(2, D, D), k=(2, D, D), v=(2, D, D), head=(D, C)),
    X,
    attention="read",
    plain=lambda p, x: _scanned(p, x, lambda q, k, v: mixed(soft(scores(q, k)), v)),
)
def on_a_mesh_in_a_scan(p, x):
    spec = P("a")
    attend = jax.shard_map(
        lambda q, k, v: mixed(jax.nn.softmax(scores(q, k)), v),
        mesh=_mesh(2),
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    return _scanned(p, x, attend)


def _scanned(p, x, attend):
    def layer(x, w):
        return rms(x + attend(*qkv(w, x))), None

    return jax.lax.scan(layer, x, {n: p[n] for n in "qkv"})[0] @ p["head"]


# What looks like attention.


@case(
    "w 0|1; a b any; head head",
    weights(w=(D, D), a=(D,), b=(D,), head=(D, C)),
    X,
    attention="maybe",
)
def graph_attention(p, x):
    """GAT: logits are sums, so no product of query and key is there."""
    y = x @ p["w"]
    logits = (y @ p["a"])[:, :, None] + (y @ p["b"])[:, None]
    return jax.nn.gelu(jax.nn.softmax(jax.nn.leaky_relu(logits)) @ y) @ p["head"]
