"""Query and key that look alike: gathered, split, of channels, gated by each other."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from jax.nn import sigmoid
from pieces_of_cases import (
    array,
    attend,
    B,
    case,
    cut,
    D,
    end,
    formulas,
    gains,
    H,
    heads,
    K,
    mixed,
    one_layer,
    qkv,
    rms,
    scores,
    soft,
    T,
    unit,
    X,
)


generator = np.random.default_rng(3)
NEAR = generator.integers(0, T, (T, 3), np.int32)
EDGES = jnp.asarray(np.stack([np.arange(20) % T, generator.integers(0, T, 20)]))


@heads("read", X, NEAR)
def neighbours_by_multiply_and_sum(q, k, v, near):
    logits = noted((q[:, :, None] * k[:, near]).sum(-1) / 2, heads=-1)
    w = jax.nn.softmax(logits, 2)[..., None]
    return (w * v[:, near]).sum(2)


@heads("read", X, np.stack([NEAR, NEAR[::-1]]))
def neighbours_of_each_example(q, k, v, near):
    def attend(q, k, v, near):
        logits = noted(jnp.sum(k[near] * q[:, None], -1) / 2, heads=-1)
        return jnp.sum(jax.nn.softmax(logits, 1)[..., None] * v[near], 1)

    return jax.vmap(attend)(q, k, v, near)


@heads("read", X, np.stack([EDGES, EDGES[::-1]]))
def edges_of_each_example(q, k, v, edges):
    def attend(q, k, v, edges):
        to, come = edges
        w = jnp.exp(noted((q[to] * k[come]).sum(-1) / 2, heads=-1))
        w = w / jax.ops.segment_sum(w, to, T)[to]
        return jax.ops.segment_sum(w[..., None] * v[come], to, T)

    return jax.vmap(attend)(q, k, v, edges)


@heads("read", X[0], EDGES)
def edges_by_multiply_and_sum(q, k, v, edges):
    to, come = edges
    logits = noted((q[to] * k[come]).sum(-1) / 2, heads=-1)
    w = jnp.exp(logits - jax.ops.segment_max(logits, to, T)[to])
    w = w / jax.ops.segment_sum(w, to, T)[to]
    return jax.ops.segment_sum(w[..., None] * v[come], to, T)


@heads("said")
def logits_split_by_heads(q, k, v):
    logits = noted(scores(q, k))
    a = mixed(jax.nn.softmax(logits[:, :1]), v[:, :, :1])
    b = mixed(jax.nn.softmax(logits[:, 1:]), v[:, :, 1:])
    return jnp.concatenate([a, b], -1)


@heads("said")
def each_head_by_itself_from_one_product(q, k, v):
    logits = noted(scores(q, k))
    rows = [jax.nn.softmax(logits[:, h]) @ v[:, :, h] for h in range(H)]
    return jnp.concatenate(rows, -1)


@heads("said")
def queries_split_after_the_product(q, k, v):
    logits = noted(scores(q, k))
    halves = [mixed(jax.nn.softmax(z), v) for z in jnp.split(logits, [2], 2)]
    return jnp.concatenate(halves, 1)


# XCiT: channels attend to channels.


def _channels(q, k, v, weigh):
    q, k, v = (y.transpose(0, 2, 3, 1) for y in (q, k, v))
    return (soft(weigh(unit(q) @ unit(k).mT)) @ v).transpose(0, 3, 1, 2)


@heads("read", also="heat vector", heat=gains((H, 1, 1), "heat"), scaled="heat")
def channels_with_a_temperature(q, k, v, heat):
    return _channels(q, k, v, lambda s: s * heat)


@heads("jointly", also="heat vector", heat=gains((), "all"), scaled="heat")
def channels_with_one_temperature(q, k, v, heat):
    return _channels(q, k, v, lambda s: heat * s)


@heads("said")
def channels_without_a_temperature(q, k, v):
    return _channels(q, k, v, lambda s: 3 * s)


@heads("read", 3 * X[:, :1])
def batch_of_one_token(q, k, v):
    return attend(q, k, v)


@one_layer("read", also="probe any", probe=array("probe", 1, 1, D))
def pool_over_one_token(p, x):
    """The head of Octo: a learned query, and one token to read out."""
    q, k, v = qkv(p, x[:, -1:])
    q = cut(jnp.broadcast_to(p["probe"], (B, 1, D)) @ p["q"])
    return end(p, x[:, -1:], attend(q, k, v))


@one_layer("read", 3 * X[:, :1], k=(D, K), v=(D, K))
def one_token_with_a_key_for_all_heads(p, x):
    q, k, v = cut(x @ p["q"]), x @ p["k"], x @ p["v"]
    w = soft(jnp.einsum("bqhd,bkd->bhqk", q, k))
    return end(p, x, jnp.einsum("bhqk,bkd->bqhd", w, v).reshape(B, 1, D))


@one_layer(
    "said",
    also="qp kp 0|1; weight vector",
    q=3 * array("q", D, D),
    qp=(D, H * 6),
    kp=(D, H * 6),
    weight=gains(H, "weight"),
)
def invariant_points(p, x):
    """AlphaFold's attention by points: their distances are added to the logits."""
    q, k, v = qkv(p, x)
    a, b = ((x @ p[n]).reshape(B, T, H, 2, 3) for n in ("qp", "kp"))
    apart = jnp.sum((a[:, :, None] - b[:, None]) ** 2, (-1, -2)).transpose(0, 3, 1, 2)
    logits = scores(q, k) - 0.02 * p["weight"][:, None, None] * apart
    return end(p, x, mixed(soft(logits), v))


# Logits that choose other logits, that are joined with others, or share a query.


def indexed(choose):
    """Keys that the indexer of DeepSeek-V3.2 scores (arXiv:2512.02556) and one chooses.

    The function makes logits of those of query and key, and of the scores.
    """

    def fun(p, x):
        q, k, v = qkv(p, x)
        index = jnp.einsum("bqd,bkd->bqk", x @ p["iq"], x @ p["ik"])
        index = jax.nn.relu(index) * (x @ p["iw"])
        return end(p, x, mixed(soft(choose(scores(q, k), index)), v))

    fun.__name__ = choose.__name__
    shapes = {"iq": (D, 4), "ik": (D, 4), "iw": (D, 1)}
    return one_layer("read", also="iq ik iw frozen", **shapes)(fun)


@indexed
def keys_chosen_by_an_indexer(logits, index):
    least = jax.lax.top_k(index, 3)[0][..., -1:]
    return jnp.where((index >= least)[:, None], logits, -1e9)


@indexed
def keys_chosen_by_places_of_an_indexer(logits, index):
    at = jax.lax.top_k(index, 3)[1]
    row = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    bias = jnp.full((B, T, T), -1e9).at[*row, at].set(0.0)
    return logits + bias[:, None]


@indexed
def keys_chosen_by_one_hot_rows_of_an_indexer(logits, index):
    chosen = jax.nn.one_hot(jax.lax.top_k(index, 3)[1], T).sum(-2)
    return logits + (chosen[:, None] - 1) * 1e9


@indexed
def keys_sorted_by_an_indexer(logits, index):
    rank = jnp.argsort(jnp.argsort(-index, -1), -1)
    return jnp.where((rank < 3)[:, None], logits, -1e9)


@heads("read")
def blocks_of_keys_chosen_by_their_means(q, k, v):
    """As MoBA has it (arXiv:2502.13189): the choice is made by the same kernels."""
    q, k, v = (jnp.pad(y, ((0, 0), (0, 1), (0, 0), (0, 0))) for y in (q, k, v))
    gate = jnp.einsum("bqhd,bnhd->bhqn", q, k.reshape(B, 3, 2, H, K).mean(2))
    chosen = gate >= jax.lax.top_k(gate, 2)[0][..., -1:]
    logits = jnp.where(jnp.repeat(chosen, 2, -1), scores(q, k), -1e9)
    return mixed(soft(logits), v)[:, :T]


@heads("said")
def relus_by_a_mask(q, k, v):
    logits = noted(scores(q, k))
    logits = logits * (logits > 0)
    return mixed(logits / (logits.sum(-1, keepdims=True) + 1e-6), v)


def _of_means(x, kernel):
    return cut(x[:, :4].reshape(B, 2, 2, D).mean(2) @ kernel)


@one_layer("read", also="kc 0|1", kc=(D, D))
def keys_and_their_means_in_one_softmax(p, x):
    q, k, v = qkv(p, x)
    of_means = scores(q, _of_means(x, p["kc"]))
    w = soft(jnp.concatenate([scores(q, k), of_means], -1))
    return end(p, x, mixed(w, jnp.concatenate([v, _of_means(x, p["v"])], 1)))


@one_layer("read", also="sink any", sink=30 * array("sink", H, 1, 1))
def keys_and_their_means_with_a_sink_between(p, x):
    q, k, v = qkv(p, x)
    of_keys, of_means = scores(q, k), scores(q, _of_means(x, p["k"]))
    noted(jnp.concatenate([of_keys, of_means], -1))
    sink = jnp.broadcast_to(p["sink"], (B, H, T, 1))
    w = jax.nn.softmax(jnp.concatenate([of_keys, sink, of_means], -1))
    w = jnp.concatenate([w[..., :T], w[..., T + 1 :]], -1)
    return end(p, x, mixed(w, jnp.concatenate([v, _of_means(x, p["v"])], 1)))


@one_layer("said", also="q2 k2 0|1", q2=(D, D), k2=(D, D))
def heads_of_two_kinds_in_one_softmax(p, x):
    q, k, v = qkv(p, x)
    others = scores(cut(x @ p["q2"]), cut(x @ p["k2"]))
    w = soft(jnp.concatenate([scores(q, k), others], 1))
    y = mixed(w, jnp.concatenate([v, 2 * v], 2))
    return end(p, x, y[..., :D] + y[..., D:])


@heads("said", also="share any", share=(H,))
def query_with_a_share_of_the_head_before(q, k, v, share):
    return attend(q + share[:, None] * jnp.roll(q, 1, 2), k, v)


# Gates of query, key and logits, made of what the clip scales or of something else.

formulas(
    "read",
    query_gated_by_the_key=lambda q, k, v: attend(q * sigmoid(2 * k), k, v),
    key_gated_by_the_query_of_all_tokens=lambda q, k, v: attend(
        q, k * jnp.tanh(q.mean(1, keepdims=True)), v
    ),
    query_times_the_mean_key=lambda q, k, v: attend(q * k.mean(1, keepdims=True), k, v),
)
formulas(
    "said",
    each_gated_by_the_other=lambda q, k, v: attend(q * sigmoid(k), k * sigmoid(q), v),
    logits_divided_by_the_norm_of_the_key=lambda q, k, v: mixed(
        soft(scores(q, k) / jnp.linalg.norm(k, axis=-1).swapaxes(1, 2)[:, :, None]), v
    ),
    key_normed_and_query_gated_by_it=lambda q, k, v: attend(q * sigmoid(k), unit(k), v),
    # A Hopfield network: what was retrieved from the keys asks again.
    two_steps_of_retrieval=lambda q, k, v: attend(
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), k), k, v
    ),
)


@heads("said", also="k any")
def query_gated_by_sorted_keys(q, k, v):
    return attend(q * sigmoid(jnp.sort(k, 1)), k, v)


def _pooled(p, x, name):
    """The heads of all tokens together."""
    return cut(x.mean(1, keepdims=True) @ p[name])


@one_layer("read")
def query_gated_by_its_kernel_on_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, attend(q * jax.nn.softplus(_pooled(p, x, "q")), k, v))


@one_layer("said")
def both_gated_by_their_kernels_on_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    one, other = (_pooled(p, x, n) for n in "qk")
    return end(p, x, attend(q * sigmoid(one), k * jnp.exp(other), v))


@one_layer("said")
def logits_gated_by_the_query_of_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    gate = sigmoid(cut(x.mean(1) @ p["q"]).max(-1))[:, :, None, None]
    return end(p, x, mixed(soft(scores(q, k) * gate), v))


@one_layer("read")
def summand_of_the_query_of_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    own = jnp.tanh(cut(x.mean(1) @ p["q"]).max(-1))[:, :, None, None]
    w = jax.nn.softmax(noted(scores(q, k)) + own * jnp.arange(T))
    return end(p, x, mixed(w, v))


def _input_gated_by(p, x, name):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    q = cut((x * sigmoid(x @ p[name])) @ p["q"])
    return end(p, x, attend(q, k, v))


@one_layer("read")
def input_of_the_query_gated_by_the_keys_kernel(p, x):
    return _input_gated_by(p, x, "k")


@one_layer("read")
def input_of_the_query_gated_by_its_own_kernel(p, x):
    return _input_gated_by(p, x, "q")


def _with_one_key(p, x):
    """Query, key and value, of which all heads share the last two."""
    q = cut(x @ p["q"])
    return q, *(jnp.broadcast_to((x @ p[n])[:, :, None], q.shape) for n in "kv")


@one_layer("read", k=(D, K), v=(D, K))
def queries_gated_by_the_key_that_they_share(p, x):
    q, k, v = _with_one_key(p, x)
    return end(p, x, attend(q * sigmoid(k), k, v))


@one_layer("said", k=(D, K), v=(D, K))
def shared_key_gated_by_the_queries(p, x):
    q, k, v = _with_one_key(p, x)
    return end(p, x, attend(q, k * sigmoid(q.mean(1, keepdims=True)), v))


SAYS_FUSED = "qkv o 0|1; head head"
APART = dict.fromkeys("qkv")


@one_layer("said", says=SAYS_FUSED, qkv=(D, 3 * D), **APART)
def fused_query_gated_by_the_key(p, x):
    q, k, v = (cut(y) for y in jnp.split(x @ p["qkv"], 3, -1))
    return end(p, x, attend(q * sigmoid(k), k, v))


@one_layer("said", says=SAYS_FUSED, qkv=(D, 4 * D), **APART)
def fused_query_with_a_gate_of_its_own(p, x):
    q, k, v, gate = (cut(y) for y in jnp.split(x @ p["qkv"], 4, -1))
    return end(p, x, attend(q * sigmoid(gate), k, v))


@one_layer("read", also="gate 0|1", gate=(D, D))
def query_and_key_with_gates_of_their_own(p, x):
    q, k, v = qkv(p, x)
    gate = sigmoid(cut(x @ p["gate"]))
    return end(p, x, attend(q * gate, k * gate.mean(1, keepdims=True), v))


STACK = {n: array("stack" + n, 2, D, D) for n in "qkvo"} | {"head": array("head", D, 7)}


@case("q k v o 1|2; head head", STACK, attention="read")
def gated_by_keys_in_a_scan(p, x):
    def layer(x, w):
        q, k, v = (cut(rms(x) @ w[n]) for n in "qkv")
        return x + attend(q * sigmoid(k), k, v) @ w["o"], None

    x, _ = jax.lax.scan(layer, x, {n: p[n] for n in "qkvo"})
    return x @ p["head"]


@one_layer("read")
def gated_by_what_an_earlier_call_of_it_made(p, x):
    """The layer twice: its kernels are in its own input, as in ALBERT."""
    for _ in range(2):
        q, k, v = qkv(p, x)
        gate = sigmoid(x[..., :H])[..., None]
        x = x + attend(q * gate, k, v, layer="all", merge="largest") @ p["o"]
    return jax.nn.gelu(x) @ p["head"]
