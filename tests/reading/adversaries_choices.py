"""Logits that choose other logits, that are joined with others, or share a query."""

import jax
import jax.numpy as jnp
from by_numbers import noted
from pieces_of_cases import (
    array,
    B,
    case,
    cut,
    D,
    end,
    H,
    K,
    mixed,
    one,
    qkv,
    SAYS,
    scores,
    soft,
    T,
    X,
)


INDEXED = one(iq=(D, 4), ik=(D, 4), iw=(D, 1))
INDEXER = SAYS + "; iq ik 0|1; iw any"


def _index(p, x):
    """The scores of DeepSeek-V3.2's indexer, which chooses keys (arXiv:2512.02556)."""
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["iq"], x @ p["ik"])
    return jax.nn.relu(scores) * (x @ p["iw"])


@case(INDEXER, INDEXED, X, attention="read")
def keys_chosen_by_an_indexer(p, x):
    q, k, v = qkv(p, x)
    index = _index(p, x)
    least = jax.lax.top_k(index, 3)[0][..., -1:]
    logits = jnp.where((index >= least)[:, None], scores(q, k), -1e9)
    return end(p, x, mixed(soft(logits), v))


@case(INDEXER, INDEXED, X, attention="read")
def keys_chosen_by_places_of_an_indexer(p, x):
    q, k, v = qkv(p, x)
    at = jax.lax.top_k(_index(p, x), 3)[1]
    row = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    bias = jnp.full((B, T, T), -1e9).at[*row, at].set(0.0)
    return end(p, x, mixed(soft(scores(q, k) + bias[:, None]), v))


@case(INDEXER, INDEXED, X, attention="read")
def keys_chosen_by_one_hot_rows_of_an_indexer(p, x):
    q, k, v = qkv(p, x)
    chosen = jax.nn.one_hot(jax.lax.top_k(_index(p, x), 3)[1], T).sum(-2)
    bias = (chosen[:, None] - 1) * 1e9
    return end(p, x, mixed(soft(scores(q, k) + bias), v))


@case(INDEXER, INDEXED, X, attention="read")
def keys_sorted_by_an_indexer(p, x):
    q, k, v = qkv(p, x)
    rank = jnp.argsort(jnp.argsort(-_index(p, x), -1), -1)
    logits = jnp.where((rank < 3)[:, None], scores(q, k), -1e9)
    return end(p, x, mixed(soft(logits), v))


@case(SAYS, one(), X, attention="read")
def blocks_of_keys_chosen_by_their_means(p, x):
    """As MoBA has it (arXiv:2502.13189): the choice is made by the same kernels."""
    q, k, v = (jnp.pad(y, ((0, 0), (0, 1), (0, 0), (0, 0))) for y in qkv(p, x))
    gate = jnp.einsum("bqhd,bnhd->bhqn", q, k.reshape(B, 3, 2, H, K).mean(2))
    chosen = gate >= jax.lax.top_k(gate, 2)[0][..., -1:]
    logits = jnp.where(jnp.repeat(chosen, 2, -1), scores(q, k), -1e9)
    return end(p, x, mixed(soft(logits), v)[:, :T])


@case(SAYS, one(), X, attention="said")
def relus_by_a_mask(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    logits = logits * (logits > 0)
    return end(p, x, mixed(logits / (logits.sum(-1, keepdims=True) + 1e-6), v))


def _means(x):
    return x[:, :4].reshape(B, 2, 2, D).mean(2)


@case(SAYS + "; kc 0|1", one(kc=(D, D)), X, attention="read")
def keys_and_their_means_in_one_softmax(p, x):
    q, k, v = qkv(p, x)
    of_means = scores(q, cut(_means(x) @ p["kc"]))
    w = soft(jnp.concatenate([scores(q, k), of_means], -1))
    return end(p, x, mixed(w, jnp.concatenate([v, cut(_means(x) @ p["v"])], 1)))


@case(SAYS + "; sink any", one(sink=30 * array("sink", H, 1, 1)), X, attention="read")
def keys_and_their_means_with_a_sink_between(p, x):
    q, k, v = qkv(p, x)
    of_keys, of_means = scores(q, k), scores(q, cut(_means(x) @ p["k"]))
    noted(jnp.concatenate([of_keys, of_means], -1))
    sink = jnp.broadcast_to(p["sink"], (B, H, T, 1))
    w = jax.nn.softmax(jnp.concatenate([of_keys, sink, of_means], -1))
    w = jnp.concatenate([w[..., :T], w[..., T + 1 :]], -1)
    return end(p, x, mixed(w, jnp.concatenate([v, cut(_means(x) @ p["v"])], 1)))


@case("q* k* v* o* 0|1; head head", one(q2=(D, D), k2=(D, D)), X, attention="said")
def heads_of_two_kinds_in_one_softmax(p, x):
    q, k, v = qkv(p, x)
    others = scores(cut(x @ p["q2"]), cut(x @ p["k2"]))
    w = soft(jnp.concatenate([scores(q, k), others], 1))
    y = mixed(w, jnp.concatenate([v, 2 * v], 2))
    return end(p, x, y[..., :D] + y[..., D:])


@case(SAYS + "; share any", one(share=(H,)), X, attention="said")
def query_with_a_share_of_the_head_before(p, x):
    q, k, v = qkv(p, x)
    q = q + p["share"][:, None] * jnp.roll(q, 1, 2)
    return end(p, x, mixed(soft(scores(q, k)), v))
