"""Experts, however they are picked: what picks them is a router."""

import jax
import jax.numpy as jnp
from pieces_of_cases import (
    C,
    case,
    cut,
    D,
    F,
    mixed,
    scores,
    soft,
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
    "router router; a b 0|1; head head",
    weights(router=(D, 2), a=(D, D), b=(D, D), head=(D, C)),
    X,
)
def experts_by_a_branch(p, x):
    of = jnp.argmax(x.mean((0, 1)) @ p["router"])
    y = jax.lax.switch(of, [lambda: x @ p["a"], lambda: jax.nn.gelu(x @ p["b"])])
    return (x + y) @ p["head"]


@case(
    "router router; q k v 1|2; o 0|1; head head",
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
