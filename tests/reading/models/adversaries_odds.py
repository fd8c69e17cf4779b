"""What was found by writing functions of all kinds: each was once read wrong."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    attended,
    B,
    C,
    case,
    cut,
    D,
    end,
    F,
    H,
    K,
    mixed,
    ONE,
    one,
    qkv,
    SAYS,
    scores,
    soft,
    T,
    weights,
    X,
)


MLP = weights(up=(D, F), down=(F, D), head=(D, C))


# Weights.


@case("up down 0|1; head head", MLP, X)
def scales_that_products_are_multiplied_with(p, x):
    """Eight bits: a scale found from a weight is no norm that divides it."""

    def dot(x, w):
        a, b = (jnp.max(jnp.abs(y)) / 448 for y in (x, w))
        x, w = ((y / s).astype(jnp.float8_e4m3fn) for y, s in ((x, a), (w, b)))
        return (x.astype(jnp.float32) @ w.astype(jnp.float32)) * a * b

    return jax.nn.gelu(dot(x, p["up"])) @ p["down"] @ p["head"]


@case("a b c 0|1; head head", weights(a=(D, 4), b=(4, 4), c=(4, D), head=(D, C)), X)
def factor_between_two_others(p, x):
    return jax.nn.gelu(x @ (p["a"] @ p["b"] @ p["c"])) @ p["head"]


@case(
    "up 1|2; head head; share any",
    {"up": array("ups", 3, D, F), **weights(head=(F, C)), "share": array("share", 3)},
    X,
)
def kernel_that_is_a_mean_of_several(p, x):
    share = jax.nn.softmax(p["share"])
    return jax.nn.gelu(x @ jnp.einsum("l,lij->ij", share, p["up"])) @ p["head"]


@case(
    "up gate down 0|1; head head",
    weights(up=(D, F), gate=(D, F), down=(F, D), head=(D, C)),
    X,
)
def gate_of_features_by_a_softmax(p, x):
    y = jax.nn.softmax(x @ p["gate"]) * (x @ p["up"])
    return jax.nn.gelu(y @ p["down"]) @ p["head"]


@case(
    "inner steps 0|1; decay bias any; small b c out 0|1; head head",
    weights(
        inner=(D, F), small=(F, 2), steps=(2, F), decay=(F, 4), bias=(F,),
        b=(F, 4), c=(F, 4), out=(F, D), head=(D, C),
    ),
    X,
)  # fmt: skip
def state_space_by_an_associative_scan(p, x):
    """Exponentials that no sum divides are decays, and no attention."""
    u = jax.nn.silu(x @ p["inner"])
    steps = jax.nn.softplus(u @ p["small"] @ p["steps"] + p["bias"])[..., None]
    a = jnp.exp(-jnp.exp(p["decay"]) * steps)
    b = steps * u[..., None] * (u @ p["b"])[:, :, None]

    def joined(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    _, h = jax.lax.associative_scan(joined, (a, b), axis=1)
    y = jnp.einsum("btfn,btn->btf", h, u @ p["c"])
    return (x + y @ p["out"]) @ p["head"]


@case(
    "router router; wi wo 1|2; head head",
    weights(router=(D, 4), wi=(4, D, F), wo=(4, F, D), head=(D, C)),
    X,
)
def experts_by_one_hot_rows_twice(p, x):
    """What one-hot rows have weighed is weighed by them again."""
    logits = x @ p["router"]
    rows = jax.nn.one_hot(logits.argmax(-1), 4)
    y = jnp.einsum("btd,edf,bte->btf", x, p["wi"], rows)
    y = jnp.einsum("btf,efd,bte->btd", jax.nn.gelu(y), p["wo"], rows)
    return jax.nn.gelu(x + jax.nn.sigmoid(logits.max(-1))[..., None] * y) @ p["head"]


# Attention.


@case(SAYS + "; features any", one(features=(K, 8)), X, attention="maybe")
def random_features(p, x):
    """Performer: the query's own kernel makes no key of relative positions."""
    features = jax.lax.stop_gradient(p["features"])

    def positive(y):
        return jnp.exp(y @ features - jnp.sum(y * y, -1, keepdims=True) / 2)

    q, k, v = qkv(p, x)
    q, k = positive(q / 2), positive(k / 2)
    sums = jnp.einsum("bqhf,bhf->bqh", q, k.sum(1))
    y = jnp.einsum("bqhf,bhfd->bqhd", q, jnp.einsum("bkhf,bkhd->bhfd", k, v))
    return end(p, x, (y / sums[..., None]).reshape(B, T, D))


@case(SAYS, one(), X, attention="said")
def values_of_the_largest_keys(p, x):
    """The values are picked by what the logits say."""
    q, k, v = qkv(p, x)
    largest, at = jax.lax.top_k(noted(scores(q, k)), 2)
    v = v.swapaxes(1, 2)[:, :, None]
    v = jnp.take_along_axis(v, at[..., None], 3)
    y = jnp.einsum("bhqk,bhqkd->bqhd", jax.nn.softmax(largest), v)
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X, attention="read")
def two_hops(p, x):
    q, k, v = qkv(p, x)
    w = soft(scores(q, k))
    return end(p, x, mixed(w @ w, v))


@case("q v o 0|1; head head", one(k=None), X, attention="read")
def keys_that_are_the_input(p, x):
    """Luong's general score: no parameter made the keys."""
    logits = noted(jnp.einsum("bqd,bkd->bqk", x @ p["q"], x), heads=())
    return end(p, x, jax.nn.softmax(logits) @ (x @ p["v"]))


@case("q k v o 0|1~1|0; head head", one(), X, attention="jointly")
def kernels_of_query_and_key_multiplied_first(p, x):
    q, k = (p[n].reshape(D, H, K) for n in "qk")
    both = jnp.einsum("dhk,chk->hdc", q, k)
    logits = jnp.einsum("btd,hdc,buc->bhtu", x, both, x)
    return end(p, x, mixed(soft(logits / 2), cut(x @ p["v"])))


@case(SAYS, one(), X, attention="said")
def temperature_by_the_query(p, x):
    q, k, v = qkv(p, x)
    by = 1 + jnp.abs(q).mean(-1).swapaxes(1, 2)[..., None]
    return end(p, x, mixed(soft(scores(q, k) / by), v))


@case(SAYS, one(), X, attention="said")
def logits_of_unit_variance(p, x):
    q, k, v = qkv(p, x)
    s = scores(q, k)
    s = (s - s.mean(-1, keepdims=True)) / (s.std(-1, keepdims=True) + 1e-6)
    return end(p, x, mixed(soft(s), v))


@case(SAYS, one(), X, attention="said")
def logits_as_distances(p, x):
    """No product is written, but a square has one inside."""
    q, k, v = qkv(p, x)
    s = 20 - jnp.sum((q[:, :, None] - k[:, None]) ** 2, -1).transpose(0, 3, 1, 2)
    return end(p, x, mixed(soft(s), v))


LAYERS = {n: np.stack([ONE[n], array("two" + n, D, D)]) for n in "qkvo"}


@case(
    "q k v o 1|2; share any; head head",
    {**LAYERS, "share": array("share", 2), "head": ONE["head"]},
    X,
    attention="said",
)
def kernels_that_are_means_of_layers(p, x):
    share = jax.nn.softmax(p["share"])
    kernels = {n: jnp.einsum("l,lij->ij", share, p[n]) for n in "qkvo"}
    return attended({**kernels, "head": p["head"]}, x)
