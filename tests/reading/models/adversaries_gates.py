"""Experts, however they are picked: what picks them is a router."""

import jax
import jax.numpy as jnp
from by_numbers import noted
from pieces_of_cases import (
    array,
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
    one,
    qkv,
    rms,
    SAYS,
    scores,
    soft,
    T,
    unit,
    weights,
    X,
)


MOE = weights(inner=(D, D), router=(D, 4), wi=(4, D, F), wo=(4, F, D), head=(D, C))
EXPERTS = "inner 0|1; router router; wi wo 1|2; head head"


def _moe(p, x, experts):
    x = jax.nn.gelu(x @ p["inner"])
    return (x + experts(p, x)) @ p["head"]


def _two_largest(p, x):
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    return (jax.nn.one_hot(chosen, 4) * weight[..., None]).sum(-2)


@case(EXPERTS, MOE, X)
def experts_with_a_capacity(p, x):
    def experts(p, x):
        gate = _two_largest(p, x).reshape(-1, 4)
        place = jnp.cumsum(gate > 0, 0) - 1
        slots = jax.nn.one_hot(place, 3) * (gate > 0)[..., None]
        y = jnp.einsum("nec,nd->ecd", slots, x.reshape(-1, D))
        y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", y, p["wi"]))
        y = jnp.einsum("ecf,efd->ecd", y, p["wo"])
        y = jnp.einsum("nec,ne,ecd->nd", slots, gate, y)
        return y.reshape(x.shape)

    return _moe(p, x, experts)


@case(
    "router frozen; a b 0|1; head head",
    weights(router=(D, 2), a=(D, D), b=(D, D), head=(D, C)),
    X,
)
def experts_by_a_branch(p, x):
    of = jnp.argmax(x.mean((0, 1)) @ p["router"])
    y = jax.lax.switch(of, [lambda: x @ p["a"], lambda: jax.nn.gelu(x @ p["b"])])
    return (x + y) @ p["head"]


@case(
    "router frozen; q k v 1|2; o 0|1; head head",
    weights(
        router=(D, 2), q=(2, D, D), k=(2, D, D), v=(2, D, D), o=(D, D), head=(D, C)
    ),
    X,
    attention="said",
)
def attention_of_the_expert_that_is_chosen(p, x):
    of = jnp.argmax(x.mean(1) @ p["router"], -1)
    q, k, v = (cut(jnp.einsum("btd,bde->bte", x, p[n][of])) for n in "qkv")
    return (x + mixed(soft(scores(q, k)), v) @ p["o"]) @ p["head"]


@case(
    "q k o 0|1; wv 1|2~1|02; router router; head head",
    weights(q=(D, D), k=(D, D), router=(D, 4), wv=(4, D, D), o=(D, D), head=(D, C)),
    X,
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
    X,
)
def codes_by_one_hot_rows_with_another_gradient(p, x):
    """Straight through, as a Gumbel softmax is."""
    soft_rows = jax.nn.softmax(jax.nn.gelu(x @ p["inner"]) @ p["which"], -1)
    rows = jax.nn.one_hot(jnp.argmax(soft_rows, -1), 4)
    rows = rows - jax.lax.stop_gradient(soft_rows) + soft_rows
    return jax.nn.gelu(jnp.einsum("kd,btk->btd", p["code"], rows)) @ p["head"]


# Gates of query, key and logits, made of what the clip scales or of something else.


def finished(p, x, q, k, v, **where):
    return end(p, x, mixed(soft(scores(q, k), **where), v))


@case(SAYS, one(), X, attention="read")
def query_gated_by_the_key(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q * jax.nn.sigmoid(2 * k), k, v)


@case(SAYS, one(), X, attention="read")
def key_gated_by_the_query_of_all_tokens(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q, k * jnp.tanh(q.mean(1, keepdims=True)), v)


@case(SAYS, one(), X, attention="read")
def query_times_the_mean_key(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q * k.mean(1, keepdims=True), k, v)


@case(SAYS, one(), X, attention="read")
def input_of_the_query_gated_by_the_keys_kernel(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    q = cut((x * jax.nn.sigmoid(x @ p["k"])) @ p["q"])
    return finished(p, x, q, k, v)


@case(SAYS, one(), X, attention="read")
def query_gated_by_its_kernel_on_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    gate = jax.nn.softplus(cut(x.mean(1, keepdims=True) @ p["q"]))
    return finished(p, x, q * gate, k, v)


@case(SAYS, one(), X, attention="said")
def both_gated_by_their_kernels_on_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    one, other = (cut(x.mean(1, keepdims=True) @ p[n]) for n in "qk")
    return finished(p, x, q * jax.nn.sigmoid(one), k * jnp.exp(other), v)


@case(SAYS, one(), X, attention="read")
def input_of_the_query_gated_by_its_own_kernel(p, x):
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    q = cut((x * jax.nn.sigmoid(x @ p["q"])) @ p["q"])
    return finished(p, x, q, k, v)


@case(SAYS, one(), X, attention="said")
def each_gated_by_the_other(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q * jax.nn.sigmoid(k), k * jax.nn.sigmoid(q), v)


@case(SAYS, one(k=(D, K), v=(D, K)), X, attention="read")
def queries_gated_by_the_key_that_they_share(p, x):
    q = cut(x @ p["q"])
    k, v = (jnp.broadcast_to((x @ p[n])[:, :, None], q.shape) for n in "kv")
    return finished(p, x, q * jax.nn.sigmoid(k), k, v)


@case(SAYS, one(k=(D, K), v=(D, K)), X, attention="said")
def shared_key_gated_by_the_queries(p, x):
    q = cut(x @ p["q"])
    k, v = (jnp.broadcast_to((x @ p[n])[:, :, None], q.shape) for n in "kv")
    return finished(p, x, q, k * jax.nn.sigmoid(q.mean(1, keepdims=True)), v)


FUSED = one(q=None, k=None, v=None, qkv=(D, 3 * D))
SAYS_FUSED = "qkv o 0|1; head head"


@case(SAYS_FUSED, FUSED, X, attention="said")
def fused_query_gated_by_the_key(p, x):
    q, k, v = (cut(y) for y in jnp.split(x @ p["qkv"], 3, -1))
    return finished(p, x, q * jax.nn.sigmoid(k), k, v)


@case(SAYS_FUSED, one(q=None, k=None, v=None, qkv=(D, 4 * D)), X, attention="said")
def fused_query_with_a_gate_of_its_own(p, x):
    q, k, v, gate = (cut(y) for y in jnp.split(x @ p["qkv"], 4, -1))
    return finished(p, x, q * jax.nn.sigmoid(gate), k, v)


@case(SAYS + "; gate 0|1", one(gate=(D, D)), X, attention="read")
def query_and_key_with_gates_of_their_own(p, x):
    q, k, v = qkv(p, x)
    gate = jax.nn.sigmoid(cut(x @ p["gate"]))
    return finished(p, x, q * gate, k * gate.mean(1, keepdims=True), v)


@case(SAYS, one(), X, attention="said")
def logits_gated_by_the_query_of_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    gate = jax.nn.sigmoid(cut(x.mean(1) @ p["q"]).max(-1))[:, :, None, None]
    return end(p, x, mixed(soft(scores(q, k) * gate), v))


@case(SAYS, one(), X, attention="said")
def logits_divided_by_the_norm_of_the_key(p, x):
    q, k, v = qkv(p, x)
    norms = jnp.linalg.norm(k, axis=-1).swapaxes(1, 2)[:, :, None]
    return end(p, x, mixed(soft(scores(q, k) / norms), v))


@case(SAYS, one(), X, attention="read")
def summand_of_the_query_of_pooled_tokens(p, x):
    q, k, v = qkv(p, x)
    own = jnp.tanh(cut(x.mean(1) @ p["q"]).max(-1))[:, :, None, None]
    return end(
        p, x, mixed(jax.nn.softmax(noted(scores(q, k)) + own * jnp.arange(T)), v)
    )


@case(SAYS, one(), X, attention="said")
def key_normed_and_query_gated_by_it(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q * jax.nn.sigmoid(k), unit(k), v)


@case(SAYS.replace("q k v o", "k any; q v o"), one(), X, attention="said")
def query_gated_by_sorted_keys(p, x):
    q, k, v = qkv(p, x)
    return finished(p, x, q * jax.nn.sigmoid(jnp.sort(k, 1)), k, v)


@case(SAYS, one(), X, attention="said")
def two_steps_of_retrieval(p, x):
    """A Hopfield network: what was retrieved from the keys asks again."""
    q, k, v = qkv(p, x)
    q = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), k)
    return finished(p, x, q, k, v)


STACK = {n: array("stack" + n, 2, D, D) for n in "qkvo"} | {"head": array("head", D, 7)}


@case("q k v o 1|2; head head", STACK, X, attention="read")
def gated_by_keys_in_a_scan(p, x):
    def layer(x, w):
        q, k, v = (cut(rms(x) @ w[n]) for n in "qkv")
        return x + mixed(soft(scores(q * jax.nn.sigmoid(k), k)), v) @ w["o"], None

    x, _ = jax.lax.scan(layer, x, {n: p[n] for n in "qkvo"})
    return x @ p["head"]


@case(SAYS, one(), X, attention="read")
def gated_by_what_an_earlier_call_of_it_made(p, x):
    """The layer twice: its kernels are in its own input, as in ALBERT."""
    for _ in range(2):
        q, k, v = qkv(p, x)
        gate = jax.nn.sigmoid(x[..., :H])[..., None]
        logits = scores(q * gate, k)
        x = x + mixed(soft(logits, layer="all", merge="largest"), v) @ p["o"]
    return jax.nn.gelu(x) @ p["head"]


assert X.shape == (B, T, D)
