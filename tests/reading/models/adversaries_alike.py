"""Query and key that look alike: gathered, split, of channels, of one token."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
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
    unit,
    X,
)


generator = np.random.default_rng(3)
NEAR = generator.integers(0, T, (T, 3), np.int32)
EDGES = jnp.asarray(np.stack([np.arange(20) % T, generator.integers(0, T, 20)]))


@case(SAYS, one(), X, NEAR, attention="read")
def neighbours_by_multiply_and_sum(p, x, near):
    q, k, v = qkv(p, x)
    logits = noted((q[:, :, None] * k[:, near]).sum(-1) / 2, heads=-1)
    w = jax.nn.softmax(logits, 2)[..., None]
    return end(p, x, (w * v[:, near]).sum(2).reshape(B, T, D))


@case(SAYS, one(), X, np.stack([NEAR, NEAR[::-1]]), attention="read")
def neighbours_of_each_example(p, x, near):
    def attend(q, k, v, near):
        logits = noted(jnp.sum(k[near] * q[:, None], -1) / 2, heads=-1)
        return jnp.sum(jax.nn.softmax(logits, 1)[..., None] * v[near], 1)

    y = jax.vmap(attend)(*qkv(p, x), near)
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X, np.stack([EDGES, EDGES[::-1]]), attention="read")
def edges_of_each_example(p, x, edges):
    def attend(q, k, v, edges):
        to, come = edges
        w = jnp.exp(noted((q[to] * k[come]).sum(-1) / 2, heads=-1))
        w = w / jax.ops.segment_sum(w, to, T)[to]
        return jax.ops.segment_sum(w[..., None] * v[come], to, T)

    y = jax.vmap(attend)(*qkv(p, x), edges)
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X[0], EDGES, attention="read")
def edges_by_multiply_and_sum(p, x, edges):
    to, come = edges
    q, k, v = (cut(x @ p[n]) for n in "qkv")
    logits = noted((q[to] * k[come]).sum(-1) / 2, heads=-1)
    w = jnp.exp(logits - jax.ops.segment_max(logits, to, T)[to])
    w = w / jax.ops.segment_sum(w, to, T)[to]
    y = jax.ops.segment_sum(w[..., None] * v[come], to, T)
    return end(p, x, y.reshape(T, D))


@case(SAYS, one(), X, attention="said")
def logits_split_by_heads(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    a = mixed(jax.nn.softmax(logits[:, :1]), v[:, :, :1])
    b = mixed(jax.nn.softmax(logits[:, 1:]), v[:, :, 1:])
    return end(p, x, jnp.concatenate([a, b], -1))


@case(SAYS, one(), X, attention="said")
def each_head_by_itself_from_one_product(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    heads = [jax.nn.softmax(logits[:, h]) @ v[:, :, h] for h in range(H)]
    return end(p, x, jnp.concatenate(heads, -1))


@case(SAYS, one(), X, attention="said")
def queries_split_after_the_product(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    halves = [mixed(jax.nn.softmax(z), v) for z in jnp.split(logits, [2], 2)]
    return end(p, x, jnp.concatenate(halves, 1))


HEAT = {"heat": gains((H, 1, 1), "heat")}


@case(SAYS + "; heat vector", one(**HEAT), X, attention="read", scaled="heat")
def channels_with_a_temperature(p, x):
    """XCiT: channels attend to channels."""
    q, k, v = (y.transpose(0, 2, 3, 1) for y in qkv(p, x))
    w = soft(unit(q) @ unit(k).mT * p["heat"])
    return end(p, x, (w @ v).transpose(0, 3, 1, 2).reshape(B, T, D))


ALL = {"heat": gains((), "all")}


@case(SAYS + "; heat vector", one(**ALL), X, attention="jointly", scaled="heat")
def channels_with_one_temperature(p, x):
    q, k, v = (y.transpose(0, 2, 3, 1) for y in qkv(p, x))
    w = soft(p["heat"] * (unit(q) @ unit(k).mT))
    return end(p, x, (w @ v).transpose(0, 3, 1, 2).reshape(B, T, D))


@case(SAYS, one(), X, attention="said")
def channels_without_a_temperature(p, x):
    q, k, v = (y.transpose(0, 2, 3, 1) for y in qkv(p, x))
    w = soft(3 * (unit(q) @ unit(k).mT))
    return end(p, x, (w @ v).transpose(0, 3, 1, 2).reshape(B, T, D))


@case(SAYS, one(), 3 * X[:, :1], attention="read")
def batch_of_one_token(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; probe any", one(probe=array("probe", 1, 1, D)), X, attention="read")
def pool_over_one_token(p, x):
    """The head of Octo: a learned query, and one token to read out."""
    q, k, v = qkv(p, x[:, -1:])
    q = cut(jnp.broadcast_to(p["probe"], (B, 1, D)) @ p["q"])
    return end(p, x[:, -1:], mixed(soft(scores(q, k)), v))


@case(SAYS, one(k=(D, K), v=(D, K)), 3 * X[:, :1], attention="read")
def one_token_with_a_key_for_all_heads(p, x):
    q, k, v = cut(x @ p["q"]), x @ p["k"], x @ p["v"]
    w = soft(jnp.einsum("bqhd,bkd->bhqk", q, k))
    return end(p, x, jnp.einsum("bhqk,bkd->bqhd", w, v).reshape(B, 1, D))


POINTS = one(
    q=3 * array("q", D, D), qp=(D, H * 6), kp=(D, H * 6), weight=gains(H, "weight")
)


@case(SAYS + "; qp kp 0|1; weight vector", POINTS, X, attention="said")
def invariant_points(p, x):
    """AlphaFold's attention by points: their distances are added to the logits."""
    q, k, v = qkv(p, x)
    a, b = ((x @ p[n]).reshape(B, T, H, 2, 3) for n in ("qp", "kp"))
    apart = jnp.sum((a[:, :, None] - b[:, None]) ** 2, (-1, -2)).transpose(0, 3, 1, 2)
    logits = scores(q, k) - 0.02 * p["weight"][:, None, None] * apart
    return end(p, x, mixed(soft(logits), v))


# Logits that choose other logits, that are joined with others, or share a query.


INDEXED = one(iq=(D, 4), ik=(D, 4), iw=(D, 1))
INDEXER = SAYS + "; iq ik iw frozen"


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
