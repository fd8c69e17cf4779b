"""What is done to query and key: norms, gains, clamps and positions."""

import jax
import jax.numpy as jnp
from pieces_of_cases import (
    B,
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
    X,
)


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
