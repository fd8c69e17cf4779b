"""Where queries and keys come from, and how their kernels are held."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    B,
    C,
    case,
    CAUSAL,
    cut,
    D,
    DISTANCE,
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
    T,
    weights,
    X,
)


# Learned queries, keys and values.


@case(
    "latents vector~embedding; k v o 0|1; head head",
    one(q=None, latents=(2, D)),
    X,
    attention="said",
    scaled="latents",
)
def latents_are_the_queries(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    w = soft(jnp.einsum("qhd,bkhd->bhqk", cut(p["latents"]), k))
    y = mixed(w, v)
    return jax.nn.gelu(y @ p["o"]) @ p["head"]


@case(
    "latents vector~embedding; q k v o 0|1; head head",
    one(latents=(2, D)),
    X,
    attention="read",
)
def latents_are_projected(p, x):
    q = jnp.broadcast_to(cut(p["latents"] @ p["q"]), (B, 2, H, K))
    w = soft(scores(q, cut(x @ p["k"])))
    return jax.nn.gelu(mixed(w, cut(x @ p["v"])) @ p["o"]) @ p["head"]


@case(
    "latents vector~embedding; q k v o 0|1; head head",
    one(latents=(2, D)),
    X,
    attention="read",
)
def latents_are_projected_without_a_batch(p, x):
    q = cut(p["latents"] @ p["q"])
    w = soft(jnp.einsum("qhd,bkhd->bhqk", q, cut(x @ p["k"])))
    return jax.nn.gelu(mixed(w, cut(x @ p["v"])) @ p["o"]) @ p["head"]


@case(
    "query vector~embedding; v o 0|1; head head",
    one(q=None, k=None, query=(D,)),
    X,
    attention="maybe",
)
def pooled_by_one_learned_vector(p, x):
    """Keys are the input as it is, so it is a layer of one output."""
    w = jax.nn.softmax(x @ p["query"])
    y = jnp.einsum("bt,btd->bd", w, x @ p["v"])
    return jax.nn.gelu(y @ p["o"]) @ p["head"]


@case(
    "prefix_k prefix_v any; " + SAYS,
    one(prefix_k=(2, H, K), prefix_v=(2, H, K)),
    X,
    attention="said",
    scaled="prefix_k",
)
def learned_prefix_of_keys_and_values(p, x):
    q, k, v = qkv(p, x)
    k, v = (
        jnp.concatenate([jnp.broadcast_to(4 * a, (B, 2, H, K)), y], 1)
        for a, y in ((p["prefix_k"], k), (p["prefix_v"], v))
    )
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    "q o any; keys values any; head head",
    one(k=None, v=None, keys=(9, D), values=(9, D)),
    X,
    attention="maybe",
)
def memory_of_parameters(p, x):
    """Keys and values are parameters: a layer with a softmax, no product of two."""
    w = jax.nn.softmax((x @ p["q"]) @ p["keys"].T)
    return end(p, x, w @ p["values"])


# Other shapes of attention.


@case(SAYS, one(), array("long", B, 8, D, scale=1.5), attention="read")
def windows_that_overlap(p, x):
    q, k, v = qkv(p, x)
    at = np.clip(np.arange(8)[:, None] + np.arange(-1, 2), 0, 7)
    w = soft(jnp.einsum("bqhd,bqkhd->bhqk", q, k[:, at]) * 0.5)
    y = jnp.einsum("bhqk,bqkhd->bqhd", w, v[:, at])
    return end(p, x, y.reshape(x.shape))


@case(SAYS, one(), X, attention="read")
def batch_and_heads_in_one_axis(p, x):
    q, k, v = (t.swapaxes(1, 2).reshape(B * H, T, K) for t in qkv(p, x))
    logits = q @ k.mT * K**-0.5
    noted(logits.reshape(B, H, T, T))
    y = (jax.nn.softmax(logits) @ v).reshape(B, H, T, K).swapaxes(1, 2)
    return end(p, x, y.reshape(B, T, D))


@case(
    "q k v 1|02; o 0|1; head head",
    one(q=(H, D, K), k=(H, D, K), v=(H, D, K)),
    X,
    attention="read",
)
def kernels_of_heads_first(p, x):
    q, k, v = (jnp.einsum("btd,hdk->bhtk", x, p[n]) for n in "qkv")
    w = soft(q @ k.mT)
    return end(p, x, (w @ v).swapaxes(1, 2).reshape(B, T, D))


FUSED = one(q=None, k=None, v=None, qkv=(D, 3 * D))
FUSED_SAYS = "qkv o 0|1; head head"


@case(FUSED_SAYS, FUSED, X, attention="read")
def fused_by_columns(p, x):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(B, T, H, K, 3), -1, 0)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    "inner out 0|1; head head",
    weights(inner=(D, 3 * D + 16), out=(D + 16, D), head=(D, C)),
    X,
    attention="read",
    scaled="inner",
)
def fused_with_the_mlp(p, x):
    """A parallel block: query, key, value and the MLP in one kernel."""
    q, k, v, y = jnp.split(x @ p["inner"], [D, 2 * D, 3 * D], -1)
    a = mixed(soft(scores(cut(q), cut(k))), cut(v))
    return (x + jnp.concatenate([a, jax.nn.gelu(y)], -1) @ p["out"]) @ p["head"]


@case(
    "qkv 012|3~12|3~2|3; o 0|1; head head",
    one(q=None, k=None, v=None, qkv=(1, 1, D, 3 * D)),
    array("grid", B, 2, 3, D),
    attention="read",
)
def fused_by_a_convolution_of_one_by_one(p, x):
    y = jax.lax.conv_general_dilated(
        x, p["qkv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    q, k, v = map(cut, jnp.split(y.reshape(B, 6, 3 * D), 3, -1))
    x = x.reshape(B, 6, D)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    "q_window k_window vector; " + SAYS,
    one(q_window=(3, 1, D), k_window=(3, 1, D)),
    X,
    attention="read",
)
def windows_on_query_and_key(p, x):
    def conv(y, w):
        return jax.lax.conv_general_dilated(
            y,
            w,
            (1,),
            [(2, 0)],
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=D,
        )

    q, k = (cut(conv(x @ p[n], p[n + "_window"])) for n in "qk")
    return end(p, x, mixed(soft(scores(q, k)), cut(x @ p["v"])))


# Heads in other places of their leaves.


FOUR = one(q=(D, 16), k=(D, 8), v=(D, 8), o=(16, D))


@case("q 2|01; k v o 0|1; head head", one(q=(4, 6, D), k=(D, 24)), X, attention="read")
def heads_that_are_tiles_of_two_axes(p, x):
    y = jnp.einsum("btd,mnd->btmn", x, p["q"]).reshape(B, T, 2, 2, 2, 3)
    q = y.transpose(0, 1, 4, 2, 3, 5).reshape(B, T, 4, 6)
    w = soft(scores(q, cut(x @ p["k"], 4)))
    return end(p, x, mixed(w, (x @ p["v"]).reshape(B, T, 4, 3)))


@case(SAYS, FOUR, X, attention="read")
def heads_backwards_and_keys_in_turn(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = (jnp.tile(y, (1, 1, 2, 1)) for y in (k, v))
    return end(p, x, mixed(soft(scores(q[:, :, ::-1], k)), v))


@case(SAYS, FOUR, X, attention="read")
def heads_by_their_place_in_a_group(p, x):
    q = (x @ p["q"]).reshape(B, T, 2, 2, 4).swapaxes(2, 3).reshape(B, T, 4, 4)
    k, v = (jnp.repeat(cut(x @ p[n], 2), 2, 2) for n in "kv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    "q* k v o 0|1; head head",
    one(q=None, q1=(D, 8), q2=(D, 8), k=(D, 16), v=(D, 16), o=(16, D)),
    X,
    attention="read",
)
def heads_of_two_kernels_in_a_row(p, x):
    q = jnp.concatenate([cut(x @ p["q1"], 2), cut(x @ p["q2"], 2)], 2)
    k = cut(x @ p["k"], 4)
    k = jnp.concatenate([k[:, :, 2:], k[:, :, :2]], 2)
    return end(p, x, mixed(soft(scores(q, k)), cut(x @ p["v"], 4)))


@case(
    "qkv o 0|1; qkv_bias vector; head head",
    one(q=None, k=None, v=None, qkv=(D, 32), qkv_bias=(32,), o=(16, D)),
    X,
    attention="read",
)
def heads_of_queries_then_of_keys(p, x):
    """Phi-3's."""
    y = cut(x @ p["qkv"] + p["qkv_bias"], 8)
    k, v = (jnp.repeat(y[:, :, i : i + 2], 2, 2) for i in (4, 6))
    return end(p, x, mixed(soft(scores(y[:, :, :4], k)), v))


@case(
    "qkv any; o 0|1; head head",
    one(q=None, k=None, v=None, qkv=(D, 8, K), o=(16, D)),
    X,
    attention="read",
)
def heads_of_queries_then_of_keys_on_an_axis(p, x):
    y = jnp.einsum("btd,dhk->bthk", x, p["qkv"])
    q, k, v = jnp.split(y, [4, 6], axis=2)
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case("qk v o 0|1; head head", one(q=None, k=None, qk=(D, 42)), X, attention="read")
def first_and_last_entries_of_a_head_are_its_query(p, x):
    y = cut(x @ p["qk"])
    q = jnp.concatenate([y[..., :2], y[..., 10:]], -1)
    return end(p, x, mixed(soft(scores(q, y[..., 2:8])), cut(x @ p["v"])))


@case(
    "qkv any; o 0|1; head head",
    one(q=None, k=None, v=None, qkv=(D, 3, H, 2 * K)),
    X,
    attention="read",
)
def query_and_key_in_corners_of_one_array(p, x):
    y = jnp.einsum("btd,dahk->btahk", x, p["qkv"])
    w = soft(scores(y[:, :, 0, :, :K], y[:, :, 2, :, K:]))
    return end(p, x, mixed(w, y[:, :, 1, :, :K]))


@case("q* k* v o 0|1; head head", one(q2=(D, D), k2=(D, D)), X, attention="read")
def two_streams_that_meet_in_the_logits(p, x):
    """Image and text have kernels of their own."""
    q, k = (
        cut(jnp.concatenate([x[:, :2] @ p[n], x[:, 2:] @ p[n + "2"]], 1)) for n in "qk"
    )
    return end(p, x, mixed(soft(scores(q, k)), cut(x @ p["v"])))


@case(SAYS, one(), X, attention="read")
def features_padded_with_zeros(p, x):
    q, k, v = qkv(p, x)
    q, k = (jnp.pad(y, ((0, 0),) * 3 + ((0, 2),)) for y in (q, k))
    return end(p, x, mixed(soft(scores(q, k)), v))


# What is done to query and key: norms, gains, clamps and positions.


GAINS = {"q_gain": gains(K, "q_gain"), "k_gain": gains(K, "k_gain")}


@case(
    SAYS + "; *_gain vector",
    one(q_gain=gains((H, K), "qg"), k_gain=gains((H, K), "kg")),
    X,
    attention="read",
)
def normalized_with_gains_for_each_head(p, x):
    q, k, v = qkv(p, x)
    q, k = rms(q, p["q_gain"]), rms(k, p["k_gain"])
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; q_gain vector", one(q_gain=gains(D, "qg")), X, attention="read")
def query_normalized_across_heads(p, x):
    _, k, v = qkv(p, x)
    q = cut(rms(x @ p["q"], p["q_gain"]))
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    SAYS + "; *_gain *_shift vector",
    one(**GAINS, q_shift=(K,), k_shift=(K,)),
    X,
    attention="said",
)
def layer_norm_with_gains_and_shifts(p, x):
    def norm(y, n):
        y = y - y.mean(-1, keepdims=True)
        return rms(y, p[n + "_gain"]) + p[n + "_shift"]

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(norm(q, "q"), norm(k, "k"))), v))


@case(SAYS, one(), X, attention="said")
def clamped(p, x):
    q, k, v = (cut(jnp.clip(x @ p[n], -0.8, 0.8)) for n in "qkv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="said")
def without_nans(p, x):
    q, k, v = (cut(jnp.nan_to_num(x @ p[n])) for n in "qkv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="read")
def query_and_key_through_relus(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(jax.nn.relu(q), jax.nn.relu(k))), v))


# Positions.


@case(SAYS, one(), X, attention="read")
def rotary_interleaved(p, x):
    def turn(y):
        angle = jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(K // 2)
        a, b = y[..., ::2], y[..., 1::2]
        s, c = jnp.sin(angle), jnp.cos(angle)
        return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(y.shape)

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(turn(q), turn(k))), v))


@case(
    SAYS + "; table any", one(table=(2 * T - 1, K)), X, attention="said", scaled="table"
)
def relative_keys_by_a_product(p, x):
    q, k, v = qkv(p, x)
    far = jnp.einsum("bqhd,rd->bhqr", q, p["table"])
    at = jnp.broadcast_to(DISTANCE, (B, H, T, T))
    logits = scores(q, k) + jnp.take_along_axis(far, at, -1)
    return end(p, x, mixed(soft(logits), v))


@case(SAYS + "; table any", one(table=(H, T, K)), X, attention="said", scaled="table")
def relative_keys_by_a_skew(p, x):
    q, k, v = qkv(p, x)
    far = jnp.einsum("bqhd,hrd->bhqr", q, p["table"])
    far = jnp.pad(far, ((0, 0), (0, 0), (0, 0), (1, 0)))
    far = far.reshape(B, H, T + 1, T)[:, :, 1:]
    return end(p, x, mixed(soft(jnp.where(CAUSAL, scores(q, k) + far, -1e9)), v))
