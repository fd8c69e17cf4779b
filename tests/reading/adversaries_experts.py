"""Experts, however they are picked: what picks them is a router."""

import jax
import jax.numpy as jnp
import numpy as np
from pieces_of_cases import (
    array,
    B,
    C,
    case,
    cut,
    D,
    F,
    mixed,
    scores,
    soft,
    T,
    weights,
    X,
)


MOE = weights(inner=(D, D), router=(D, 4), wi=(4, D, F), wo=(4, F, D), head=(D, C))
EXPERTS = "inner 0|1; router router; wi wo 1|2; head head"


def _moe(p, x, experts):
    x = jax.nn.gelu(x @ p["inner"])
    return (x + experts(p, x)) @ p["head"]


@case(EXPERTS, MOE, X)
def experts_gathered_for_each_token(p, x):
    def experts(p, x):
        weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        y = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, p["wi"][chosen]))
        return jnp.einsum("btkf,btkfd,btk->btd", y, p["wo"][chosen], weight)

    return _moe(p, x, experts)


@case(EXPERTS, MOE, X)
def experts_gathered_by_the_largest(p, x):
    def experts(p, x):
        gate = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(gate, -1)
        y = jax.nn.silu(jnp.einsum("btd,btdf->btf", x, p["wi"][chosen]))
        y = jnp.einsum("btf,btfd->btd", y, p["wo"][chosen])
        return y * jnp.take_along_axis(gate, chosen[..., None], -1)

    return _moe(p, x, experts)


@case(
    "inner 0|1; wi wo 1|2; head head",
    {k: v for k, v in MOE.items() if k != "router"},
    X,
    jnp.asarray([1, 3]),
)
def experts_of_tasks_among_the_arguments(p, x, task):
    def experts(p, x):
        y = jax.nn.silu(jnp.einsum("btd,bdf->btf", x, p["wi"][task]))
        return jnp.einsum("btf,bfd->btd", y, p["wo"][task])

    return _moe(p, x, experts)


@case(
    "inner 0|1; wi wo 1|2; head head",
    {k: v for k, v in MOE.items() if k != "router"},
    X,
    np.arange(B * T, dtype=np.int32).reshape(B, T) % 4,
)
def experts_by_a_hash_of_the_token(p, x, of):
    def experts(p, x):
        mask = jax.nn.one_hot(of, 4)
        y = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["wi"]))
        return jnp.einsum("btef,efd,bte->btd", y, p["wo"], mask)

    return _moe(p, x, experts)


def _two_largest(p, x):
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    return (jax.nn.one_hot(chosen, 4) * weight[..., None]).sum(-2)


@case(EXPERTS, MOE, X)
def experts_weighed_before_the_down_product(p, x):
    def experts(p, x):
        y = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["wi"]))
        y = y * _two_largest(p, x)[..., None]
        return jnp.einsum("btef,efd->btd", y, p["wo"])

    return _moe(p, x, experts)


@case(EXPERTS, MOE, X)
def experts_weighed_after(p, x):
    def experts(p, x):
        y = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["wi"]))
        y = jnp.einsum("btef,efd->bted", y, p["wo"])
        return jnp.einsum("bted,bte->btd", y, _two_largest(p, x))

    return _moe(p, x, experts)


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
    "inner 0|1; router router; w 1|2; head head",
    weights(inner=(D, D), router=(D, 4), w=(4, D, D), head=(D, C)),
    X,
)
def experts_by_sorting(p, x):
    x = jax.nn.gelu(x @ p["inner"]).reshape(-1, D)
    of = jnp.argmax(x @ p["router"], -1)
    order = jnp.argsort(of)
    y = jax.lax.ragged_dot(x[order], p["w"], jnp.bincount(of, length=4))
    return (x + y[jnp.argsort(order)]) @ p["head"]


@case(EXPERTS, MOE, X)
def experts_by_sorting_with_weights(p, x):
    def experts(p, x):
        flat = x.reshape(-1, D)
        weight, chosen = jax.lax.top_k(jax.nn.softmax(flat @ p["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=4)
        y = jax.lax.ragged_dot(flat[order // 2], p["wi"], sizes)
        y = jax.lax.ragged_dot(jax.nn.silu(y), p["wo"], sizes)
        y = y[jnp.argsort(order)].reshape(-1, 2, D)
        return jnp.einsum("nkd,nk->nd", y, weight).reshape(x.shape)

    return _moe(p, x, experts)


@case(EXPERTS, MOE, X)
def experts_that_choose_tokens(p, x):
    def experts(p, x):
        flat = x.reshape(-1, D)
        gate = jax.nn.softmax(flat @ p["router"])
        weight, chosen = jax.lax.top_k(gate.T, 3)
        y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", flat[chosen], p["wi"]))
        y = jnp.einsum("ecf,efd->ecd", y, p["wo"]) * weight[..., None]
        return jnp.zeros_like(flat).at[chosen].add(y).reshape(x.shape)

    return _moe(p, x, experts)


@case(EXPERTS + "; bias vector", {**MOE, "bias": array("bias", 4)}, X)
def experts_by_sigmoids_with_a_bias_for_balance(p, x):
    def experts(p, x):
        gate = jax.nn.sigmoid(x @ p["router"])
        _, chosen = jax.lax.top_k(gate + p["bias"], 2)
        weight = jnp.take_along_axis(gate, chosen, -1)
        weight = weight / weight.sum(-1, keepdims=True)
        mask = (jax.nn.one_hot(chosen, 4) * weight[..., None]).sum(-2)
        y = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["wi"]))
        return jnp.einsum("btef,efd,bte->btd", y, p["wo"], mask)

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


@case(EXPERTS, MOE, X, taste=True)
def experts_mixed_softly(p, x):
    def experts(p, x):
        gate = jax.nn.softmax(x @ p["router"])
        y = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["wi"]))
        return jnp.einsum("btef,efd,bte->btd", y, p["wo"], gate)

    return _moe(p, x, experts)


@case(
    "inner slots wi wo any; head head",
    weights(inner=(D, D), slots=(D, 4, 2), wi=(4, D, F), wo=(4, F, D), head=(D, C)),
    X,
    taste=True,
)
def experts_of_slots(p, x):
    x = jax.nn.gelu(x @ p["inner"])
    logits = jnp.einsum("btd,des->btes", x, p["slots"])
    y = jnp.einsum("btes,btd->besd", jax.nn.softmax(logits, 1), x)
    y = jax.nn.silu(jnp.einsum("besd,edf->besf", y, p["wi"]))
    y = jnp.einsum("besf,efd->besd", y, p["wo"])
    w = jax.nn.softmax(logits.reshape(B, T, 8)).reshape(logits.shape)
    return (x + jnp.einsum("btes,besd->btd", w, y)) @ p["head"]


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
