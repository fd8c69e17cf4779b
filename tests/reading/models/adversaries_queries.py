"""Where queries and keys come from, and how their kernels are held."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    attend,
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
    heads,
    K,
    mixed,
    network,
    one_layer,
    qkv,
    rms,
    scores,
    soft,
    T,
    turned,
    weights,
    X,
)


# Learned queries, keys and values.


LEARNED = {"also": "latents vector~embedding", "latents": (2, D)}


def _of_latents(p, x, w):
    return jax.nn.gelu(mixed(w, cut(x @ p["v"])) @ p["o"]) @ p["head"]


@one_layer("said", says="k v o 0|1; head head", q=None, scaled="latents", **LEARNED)
def latents_are_the_queries(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    w = soft(jnp.einsum("qhd,bkhd->bhqk", cut(p["latents"]), k))
    return jax.nn.gelu(mixed(w, v) @ p["o"]) @ p["head"]


@one_layer("read", **LEARNED)
def latents_are_projected(p, x):
    q = jnp.broadcast_to(cut(p["latents"] @ p["q"]), (B, 2, H, K))
    return _of_latents(p, x, soft(scores(q, cut(x @ p["k"]))))


@one_layer("read", **LEARNED)
def latents_are_projected_without_a_batch(p, x):
    q = cut(p["latents"] @ p["q"])
    w = soft(jnp.einsum("qhd,bkhd->bhqk", q, cut(x @ p["k"])))
    return _of_latents(p, x, w)


@network(
    "query vector~embedding; v o 0|1", v=(D, D), o=(D, D), query=(D,), attention="maybe"
)
def pooled_by_one_learned_vector(p, x):
    """Keys are the input as it is, so it is a layer of one output."""
    w = jax.nn.softmax(x @ p["query"])
    y = jnp.einsum("bt,btd->bd", w, x @ p["v"])
    return jax.nn.gelu(y @ p["o"]) @ p["head"]


@heads(
    "said",
    also="prefix_k prefix_v any",
    scaled="prefix_k",
    prefix_k=(2, H, K),
    prefix_v=(2, H, K),
)
def learned_prefix_of_keys_and_values(q, k, v, prefix_k, prefix_v):
    k, v = (
        jnp.concatenate([jnp.broadcast_to(4 * a, (B, 2, H, K)), y], 1)
        for a, y in ((prefix_k, k), (prefix_v, v))
    )
    return attend(q, k, v)


@case(
    "q o any; keys values any; head head",
    weights(q=(D, D), o=(D, D), head=(D, C), keys=(9, D), values=(9, D)),
    attention="maybe",
)
def memory_of_parameters(p, x):
    """Keys and values are parameters: a layer with a softmax, no product of two."""
    w = jax.nn.softmax((x @ p["q"]) @ p["keys"].T)
    return end(p, x, w @ p["values"])


# Other shapes of attention.


@heads("read", array("long", B, 8, D, scale=1.5))
def windows_that_overlap(q, k, v):
    at = np.clip(np.arange(8)[:, None] + np.arange(-1, 2), 0, 7)
    w = soft(jnp.einsum("bqhd,bqkhd->bhqk", q, k[:, at]) * 0.5)
    return jnp.einsum("bhqk,bqkhd->bqhd", w, v[:, at])


@heads("read")
def batch_and_heads_in_one_axis(q, k, v):
    q, k, v = (t.swapaxes(1, 2).reshape(B * H, T, K) for t in (q, k, v))
    logits = q @ k.mT * K**-0.5
    noted(logits.reshape(B, H, T, T))
    return (jax.nn.softmax(logits) @ v).reshape(B, H, T, K).swapaxes(1, 2)


@one_layer(
    "read", says="q k v 1|02; o 0|1; head head", **dict.fromkeys("qkv", (H, D, K))
)
def kernels_of_heads_first(p, x):
    q, k, v = (jnp.einsum("btd,hdk->bhtk", x, p[n]) for n in "qkv")
    w = soft(q @ k.mT)
    return end(p, x, (w @ v).swapaxes(1, 2).reshape(B, T, D))


def fused(*shape, args=(X,), says="qkv o 0|1; head head", **others):
    """Registers a layer whose query, key and value are of one kernel."""
    leaves = {**dict.fromkeys("qkv"), "qkv": shape, **others}
    return one_layer("read", *args, says=says, **leaves)


@fused(D, 3 * D)
def fused_by_columns(p, x):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(B, T, H, K, 3), -1, 0)
    return end(p, x, attend(q, k, v))


@case(
    "inner out 0|1; head head",
    weights(inner=(D, 3 * D + 16), out=(D + 16, D), head=(D, C)),
    attention="read",
    scaled="inner",
)
def fused_with_the_mlp(p, x):
    """A parallel block: query, key, value and the MLP in one kernel."""
    q, k, v, y = jnp.split(x @ p["inner"], [D, 2 * D, 3 * D], -1)
    a = attend(cut(q), cut(k), cut(v))
    return (x + jnp.concatenate([a, jax.nn.gelu(y)], -1) @ p["out"]) @ p["head"]


GRID = array("grid", B, 2, 3, D)


@fused(1, 1, D, 3 * D, args=(GRID,), says="qkv 012|3~12|3~2|3; o 0|1; head head")
def fused_by_a_convolution_of_one_by_one(p, x):
    y = jax.lax.conv_general_dilated(
        x, p["qkv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    q, k, v = map(cut, jnp.split(y.reshape(B, 6, 3 * D), 3, -1))
    return end(p, x.reshape(B, 6, D), attend(q, k, v))


@one_layer("read", also="*_window vector", q_window=(3, 1, D), k_window=(3, 1, D))
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
    return end(p, x, attend(q, k, cut(x @ p["v"])))


# Heads that are shared.


@one_layer("read", says="qk v o 0|1; head head", q=None, k=None, qk=(D, D))
def tied_query_and_key(p, x):
    q, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, attend(q, q, v))


@one_layer(
    "read",
    says="qk v o 0|1; *_gain vector; head head",
    **dict.fromkeys("qk"),
    qk=(D, D),
    q_gain=gains((H, K), "a"),
    k_gain=gains((H, K), "b"),
)
def tied_query_and_key_with_gains(p, x):
    y, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, attend(y * p["q_gain"], y * p["k_gain"], v))


LATENT = {"kv": (D, 6), **dict.fromkeys(("k_up", "v_up"), (6, H, K)), "k": None}


@one_layer(
    "read",
    says="kv q o q_rope k_rope 0|1; *_up any; head head",
    **LATENT,
    v=None,
    q_rope=(D, D),
    k_rope=(D, K),
)
def latent_with_rotary_parts(p, x):
    q, latent = cut(x @ p["q"]), x @ p["kv"]
    k, v = (jnp.einsum("btc,chk->bthk", latent, p[n]) for n in ("k_up", "v_up"))
    shared = turned((x @ p["k_rope"])[:, :, None])[:, :, 0]
    logits = jnp.einsum("bqhd,bkd->bhqk", turned(cut(x @ p["q_rope"])), shared)
    return end(p, x, mixed(soft(scores(q, k) + 0.3 * logits), v))


@one_layer(
    "read",
    says="q1 q2 k1 k2 v o 0|1; mix vector; head head",
    **dict.fromkeys("qk"),
    **dict.fromkeys(("q1", "q2", "k1", "k2"), (D, D)),
    mix=(H,),
)
def difference_of_two_softmaxes(p, x):
    q1, q2, k1, k2, v = (cut(x @ p[n]) for n in ("q1", "q2", "k1", "k2", "v"))
    a = soft(scores(q1, k1), layer="first")
    b = soft(scores(q2, k2), layer="second")
    return end(p, x, mixed(a - p["mix"][:, None, None] * b, v))


@heads("said")
def heads_in_a_fori_loop(q, k, v):
    def step(h, y):
        q_, k_, v_ = (jax.lax.dynamic_index_in_dim(t, h, 2, False) for t in (q, k, v))
        logits = jnp.einsum("bqd,bkd->bqk", q_, k_) * K**-0.5
        w = soft(logits, heads=(), layer="all", merge="heads")
        return jax.lax.dynamic_update_index_in_dim(y, w @ v_, h, 2)

    return jax.lax.fori_loop(0, H, step, jnp.zeros_like(v))


# Heads in other places of their leaves.


GROUPED = {"q": (D, 16), "k": (D, 8), "v": (D, 8), "o": (16, D)}


@one_layer("read", **GROUPED)
def groups_by_tile(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1))
    return end(p, x, attend(q, k, v))


@one_layer("read", **GROUPED)
def heads_backwards_and_keys_in_turn(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = (jnp.tile(y, (1, 1, 2, 1)) for y in (k, v))
    return end(p, x, attend(q[:, :, ::-1], k, v))


@one_layer("read", **GROUPED)
def heads_by_their_place_in_a_group(p, x):
    q = (x @ p["q"]).reshape(B, T, 2, 2, 4).swapaxes(2, 3).reshape(B, T, 4, 4)
    k, v = (jnp.repeat(cut(x @ p[n], 2), 2, 2) for n in "kv")
    return end(p, x, attend(q, k, v))


@one_layer("read", also="q 2|01", q=(4, 6, D), k=(D, 24))
def heads_that_are_tiles_of_two_axes(p, x):
    y = jnp.einsum("btd,mnd->btmn", x, p["q"]).reshape(B, T, 2, 2, 2, 3)
    q = y.transpose(0, 1, 4, 2, 3, 5).reshape(B, T, 4, 6)
    w = soft(scores(q, cut(x @ p["k"], 4)))
    return end(p, x, mixed(w, (x @ p["v"]).reshape(B, T, 4, 3)))


@one_layer(
    "read",
    also="q1 q2 0|1",
    **{"q": None, "q1": (D, 8), "q2": (D, 8), "k": (D, 16), "v": (D, 16), "o": (16, D)},
)
def heads_of_two_kernels_in_a_row(p, x):
    q = jnp.concatenate([cut(x @ p["q1"], 2), cut(x @ p["q2"], 2)], 2)
    k = cut(x @ p["k"], 4)
    k = jnp.concatenate([k[:, :, 2:], k[:, :, :2]], 2)
    return end(p, x, attend(q, k, cut(x @ p["v"], 4)))


@fused(D, 32, says="qkv o 0|1; qkv_bias vector; head head", qkv_bias=(32,), o=(16, D))
def heads_of_queries_then_of_keys(p, x):
    """Phi-3's."""
    y = cut(x @ p["qkv"] + p["qkv_bias"], 8)
    k, v = (jnp.repeat(y[:, :, i : i + 2], 2, 2) for i in (4, 6))
    return end(p, x, attend(y[:, :, :4], k, v))


@fused(D, 8, K, says="qkv any; o 0|1; head head", o=(16, D))
def heads_of_queries_then_of_keys_on_an_axis(p, x):
    y = jnp.einsum("btd,dhk->bthk", x, p["qkv"])
    q, k, v = jnp.split(y, [4, 6], axis=2)
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    return end(p, x, attend(q, k, v))


@one_layer("read", says="qk v o 0|1; head head", q=None, k=None, qk=(D, 42))
def first_and_last_entries_of_a_head_are_its_query(p, x):
    y = cut(x @ p["qk"])
    q = jnp.concatenate([y[..., :2], y[..., 10:]], -1)
    return end(p, x, attend(q, y[..., 2:8], cut(x @ p["v"])))


@fused(D, 3, H, 2 * K, says="qkv any; o 0|1; head head")
def query_and_key_in_corners_of_one_array(p, x):
    y = jnp.einsum("btd,dahk->btahk", x, p["qkv"])
    w = soft(scores(y[:, :, 0, :, :K], y[:, :, 2, :, K:]))
    return end(p, x, mixed(w, y[:, :, 1, :, :K]))


@one_layer("read", also="q2 k2 0|1", q2=(D, D), k2=(D, D))
def two_streams_that_meet_in_the_logits(p, x):
    """Image and text have kernels of their own."""
    q, k = (
        cut(jnp.concatenate([x[:, :2] @ p[n], x[:, 2:] @ p[n + "2"]], 1)) for n in "qk"
    )
    return end(p, x, attend(q, k, cut(x @ p["v"])))


@heads("read")
def features_padded_with_zeros(q, k, v):
    q, k = (jnp.pad(y, ((0, 0),) * 3 + ((0, 2),)) for y in (q, k))
    return attend(q, k, v)


# What is done to query and key: norms, gains, clamps and positions.


@heads(
    "read",
    also="*_gain vector",
    q_gain=gains((H, K), "qg"),
    k_gain=gains((H, K), "kg"),
)
def normalized_with_gains_for_each_head(q, k, v, q_gain, k_gain):
    return attend(rms(q, q_gain), rms(k, k_gain), v)


@one_layer("read", also="q_gain vector", q_gain=gains(D, "qg"))
def query_normalized_across_heads(p, x):
    _, k, v = qkv(p, x)
    return end(p, x, attend(cut(rms(x @ p["q"], p["q_gain"])), k, v))


@one_layer(
    "said",
    also="*_gain *_shift vector",
    **{n: gains(K, n) for n in ("q_gain", "k_gain")},
    q_shift=(K,),
    k_shift=(K,),
)
def layer_norm_with_gains_and_shifts(p, x):
    def norm(y, n):
        y = y - y.mean(-1, keepdims=True)
        return rms(y, p[n + "_gain"]) + p[n + "_shift"]

    q, k, v = qkv(p, x)
    return end(p, x, attend(norm(q, "q"), norm(k, "k"), v))


@one_layer("said")
def clamped(p, x):
    return end(p, x, attend(*(cut(jnp.clip(x @ p[n], -0.8, 0.8)) for n in "qkv")))


@one_layer("said")
def without_nans(p, x):
    return end(p, x, attend(*(cut(jnp.nan_to_num(x @ p[n])) for n in "qkv")))


@heads("read")
def query_and_key_through_relus(q, k, v):
    return attend(jax.nn.relu(q), jax.nn.relu(k), v)


# Positions.


@heads("read")
def rotary_interleaved(q, k, v):
    def turn(y):
        angle = jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(K // 2)
        a, b = y[..., ::2], y[..., 1::2]
        s, c = jnp.sin(angle), jnp.cos(angle)
        return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(y.shape)

    return attend(turn(q), turn(k), v)


@heads("said", also="table any", table=(2 * T - 1, K), scaled="table")
def relative_keys_by_a_product(q, k, v, table):
    far = jnp.einsum("bqhd,rd->bhqr", q, table)
    at = jnp.broadcast_to(DISTANCE, (B, H, T, T))
    logits = scores(q, k) + jnp.take_along_axis(far, at, -1)
    return mixed(soft(logits), v)


@heads("said", also="table any", table=(H, T, K), scaled="table")
def relative_keys_by_a_skew(q, k, v, table):
    far = jnp.einsum("bqhd,hrd->bhqr", q, table)
    far = jnp.pad(far, ((0, 0), (0, 0), (0, 0), (1, 0)))
    far = far.reshape(B, H, T + 1, T)[:, :, 1:]
    return mixed(soft(jnp.where(CAUSAL, scores(q, k) + far, -1e9)), v)
