"""Experts, however they are picked: what picks them is a router. Gates of attention."""

import jax
import jax.numpy as jnp
from by_numbers import noted
from jax.nn import sigmoid
from pieces_of_cases import (
    array,
    attend,
    C,
    case,
    cut,
    D,
    end,
    F,
    formulas,
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
    weights,
)


# Experts.


@case(
    "inner 0|1; router router; wi wo 1|2; head head",
    weights(inner=(D, D), router=(D, 4), wi=(4, D, F), wo=(4, F, D), head=(D, C)),
)
def experts_with_a_capacity(p, x):
    x = jax.nn.gelu(x @ p["inner"])
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    gate = (jax.nn.one_hot(chosen, 4) * weight[..., None]).sum(-2).reshape(-1, 4)
    place = jnp.cumsum(gate > 0, 0) - 1
    slots = jax.nn.one_hot(place, 3) * (gate > 0)[..., None]
    y = jnp.einsum("nec,nd->ecd", slots, x.reshape(-1, D))
    y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", y, p["wi"]))
    y = jnp.einsum("ecf,efd->ecd", y, p["wo"])
    y = jnp.einsum("nec,ne,ecd->nd", slots, gate, y)
    return (x + y.reshape(x.shape)) @ p["head"]


@case(
    "router frozen; a b 0|1; head head",
    weights(router=(D, 2), a=(D, D), b=(D, D), head=(D, C)),
)
def experts_by_a_branch(p, x):
    of = jnp.argmax(x.mean((0, 1)) @ p["router"])
    y = jax.lax.switch(of, [lambda: x @ p["a"], lambda: jax.nn.gelu(x @ p["b"])])
    return (x + y) @ p["head"]


@case(
    "router frozen; q k v 1|2; o 0|1; head head",
    weights(router=(D, 2), **dict.fromkeys("qkv", (2, D, D)), o=(D, D), head=(D, C)),
    attention="said",
)
def attention_of_the_expert_that_is_chosen(p, x):
    of = jnp.argmax(x.mean(1) @ p["router"], -1)
    q, k, v = (cut(jnp.einsum("btd,bde->bte", x, p[n][of])) for n in "qkv")
    return (x + attend(q, k, v) @ p["o"]) @ p["head"]


@case(
    "q k o 0|1; wv 1|2~1|02; router router; head head",
    weights(q=(D, D), k=(D, D), router=(D, 4), wv=(4, D, D), o=(D, D), head=(D, C)),
    attention="read",
)
def values_of_experts_that_are_mixed_after_attention(p, x):
    """No state of linear attention: experts and features are of one product."""
    v = jnp.einsum("btd,edf->btef", x, p["wv"])
    w = soft(scores(cut(x @ p["q"], 1), cut(x @ p["k"], 1)))[:, 0]
    y = jnp.einsum("bqk,bkef->bqef", w, v)
    y = jnp.einsum("bqe,bqef->bqf", jax.nn.softmax(x @ p["router"]), y)
    return jax.nn.gelu(x + y @ p["o"]) @ p["head"]


@case(
    "which router; code embedding; inner 0|1; head head",
    weights(inner=(D, D), which=(D, 4), code=(4, D), head=(D, C)),
)
def codes_by_one_hot_rows_with_another_gradient(p, x):
    """Straight through, as a Gumbel softmax is."""
    soft_rows = jax.nn.softmax(jax.nn.gelu(x @ p["inner"]) @ p["which"], -1)
    rows = jax.nn.one_hot(jnp.argmax(soft_rows, -1), 4)
    rows = rows - jax.lax.stop_gradient(soft_rows) + soft_rows
    return jax.nn.gelu(jnp.einsum("kd,btk->btd", p["code"], rows)) @ p["head"]


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
