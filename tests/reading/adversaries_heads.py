"""Heads that are shared, mixed, looped over or a loop's trips."""

import jax
import jax.numpy as jnp
from pieces_of_cases import (
    B,
    case,
    cut,
    D,
    end,
    gains,
    H,
    K,
    mixed,
    one,
    qkv,
    SAYS,
    scores,
    soft,
    T,
    turned,
    X,
)


GROUPED = one(q=(D, 16), k=(D, 8), v=(D, 8), o=(16, D))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_tile(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1))
    return end(p, x, mixed(soft(scores(q, k)), v))


@case("qk v o 0|1; head head", one(q=None, k=None, qk=(D, D)), X, attention="read")
def tied_query_and_key(p, x):
    q, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, mixed(soft(scores(q, q)), v))


@case(
    "qk v o 0|1; *_gain vector; head head",
    one(
        q=None, k=None, qk=(D, D), q_gain=gains((H, K), "a"), k_gain=gains((H, K), "b")
    ),
    X,
    attention="read",
)
def tied_query_and_key_with_gains(p, x):
    y, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, mixed(soft(scores(y * p["q_gain"], y * p["k_gain"])), v))


@case(
    "kv q o 0|1; k_up any; v_up any; k_rope q_rope 0|1; head head",
    one(
        k=None,
        v=None,
        kv=(D, 6),
        k_up=(6, H, K),
        v_up=(6, H, K),
        q_rope=(D, D),
        k_rope=(D, K),
    ),
    X,
    attention="read",
)
def latent_with_rotary_parts(p, x):
    q, latent = cut(x @ p["q"]), x @ p["kv"]
    k = jnp.einsum("btc,chk->bthk", latent, p["k_up"])
    v = jnp.einsum("btc,chk->bthk", latent, p["v_up"])
    shared = turned((x @ p["k_rope"])[:, :, None])[:, :, 0]
    logits = jnp.einsum("bqhd,bkd->bhqk", turned(cut(x @ p["q_rope"])), shared)
    return end(p, x, mixed(soft(scores(q, k) + 0.3 * logits), v))


@case(
    "q1 q2 k1 k2 v o 0|1; mix vector; head head",
    one(q=None, k=None, q1=(D, D), q2=(D, D), k1=(D, D), k2=(D, D), mix=(H,)),
    X,
    attention="read",
)
def difference_of_two_softmaxes(p, x):
    q1, q2, k1, k2, v = (cut(x @ p[n]) for n in ("q1", "q2", "k1", "k2", "v"))
    a = soft(scores(q1, k1), layer="first")
    b = soft(scores(q2, k2), layer="second")
    return end(p, x, mixed(a - p["mix"][:, None, None] * b, v))


# Loops of heads, and of everything else.


def _one_head(q, k, v):
    w = soft(
        jnp.einsum("bqd,bkd->bqk", q, k) * K**-0.5, heads=(), layer="all", merge="heads"
    )
    return w @ v


@case(SAYS, one(), X, attention="said")
def heads_in_a_fori_loop(p, x):
    q, k, v = qkv(p, x)

    def step(h, y):
        own = [jax.lax.dynamic_index_in_dim(t, h, 2, False) for t in (q, k, v)]
        return jax.lax.dynamic_update_index_in_dim(y, _one_head(*own), h, 2)

    y = jax.lax.fori_loop(0, H, step, jnp.zeros_like(v))
    return end(p, x, y.reshape(B, T, D))
