"""Attention in rare forms, and layers that only look like attention."""

import jax
import jax.numpy as jnp
from by_numbers import noted
from pieces_of_cases import (
    array,
    B,
    case,
    CAUSAL,
    cut,
    D,
    end,
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


LONG = array("long", B, 8, D, scale=1.5)

# Pooled between the projection and the heads, as in MViT.


def windows(y, size, step, of=jax.lax.add, start=0.0, axis=1):
    """Sums or maxima over windows along one axis."""
    dims, steps = ([n if d == axis else 1 for d in range(3)] for n in (size, step))
    return jax.lax.reduce_window(y, start, of, dims, steps, "SAME")


@case(SAYS, one(), LONG, attention="read")
def queries_pooled_in_windows_that_overlap(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    q = windows(q, 3, 2) / 3
    y = mixed(soft(scores(cut(q), cut(k))), cut(v))
    return jax.nn.gelu(q + y @ p["o"]) @ p["head"]


@case(SAYS, one(), LONG, attention="read")
def keys_pooled_by_their_maximum(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    k, v = (windows(y, 2, 2, jax.lax.max, -jnp.inf) for y in (k, v))
    return end(p, x, mixed(soft(scores(cut(q), cut(k))), cut(v)))


@case(SAYS, one(), LONG, attention="read")
def all_pooled_by_reshape_and_mean(p, x):
    q, k, v = ((x @ p[name]).reshape(B, 4, 2, D).mean(2) for name in "qkv")
    y = mixed(soft(scores(cut(q), cut(k))), cut(v))
    return jax.nn.gelu(q + y @ p["o"]) @ p["head"]


@case(SAYS, one(o=(D // 2, D)), X, attention="read")
def features_pooled_within_heads(p, x):
    q, k, v = (cut(windows(x @ p[name], 2, 2, axis=2)) for name in "qkv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="read")
def patches_of_keys_averaged(p, x):
    """Patches are a convolution with one group for each feature, and no weights."""
    q, k, v = (x @ p[name] for name in "qkv")
    k = jax.lax.conv_general_dilated_patches(k.swapaxes(1, 2), (2,), (1,), "SAME")
    k = k.reshape(B, D, 2, T).mean(2).swapaxes(1, 2)
    return end(p, x, mixed(soft(scores(cut(q), cut(k))), cut(v)))


@case(SAYS, one(), X, attention="read")
def logits_pooled_over_keys(p, x):
    q, k, v = qkv(p, x)
    logits, window = scores(q, k), (1, 1, 1, 3)
    most = jax.lax.reduce_window(
        logits, -jnp.inf, jax.lax.max, window, (1, 1, 1, 1), "SAME"
    )
    return end(p, x, mixed(soft(most), v))


# Learned queries, and softmaxes that are summed key by key.

LABELS = "query vector; k v o 0|1; head head"


def pooled(p, x, weigh):
    """The values that a learned query weighs, at the last token."""
    k, v = cut(x @ p["k"]), cut(x @ p["v"])
    logits = noted(jnp.einsum("bthd,hd->bth", k, p["query"]), heads=-1)
    return jax.nn.gelu(weigh(logits, v).reshape(B, D) @ p["o"]) @ p["head"]


QUERY = one(q=None, query=(H, K))


@case(LABELS, QUERY, X, attention="read", scaled="query")
def learned_query_of_running_sums(p, x):
    def weigh(logits, v):
        e = jnp.exp(logits - logits.max(1, keepdims=True))
        return (jnp.cumsum(e[..., None] * v, 1) / jnp.cumsum(e, 1)[..., None])[:, -1]

    return pooled(p, x, weigh)


@case(LABELS, QUERY, X, attention="read", scaled="query")
def learned_query_of_an_associative_scan(p, x):
    """Attention as a recurrent network (arXiv:2405.13956)."""

    def joined(a, b):
        most = jnp.maximum(a[0], b[0])
        one, two = jnp.exp(a[0] - most), jnp.exp(b[0] - most)
        values = a[2] * one[..., None] + b[2] * two[..., None]
        return most, a[1] * one + b[1] * two, values

    def weigh(logits, v):
        start = logits, jnp.ones_like(logits), v
        _, total, values = jax.lax.associative_scan(joined, start, axis=1)
        return (values / total[..., None])[:, -1]

    return pooled(p, x, weigh)


# Gates by exponentials: no product of query and key is under them.

GATES = "q k v o 0|1; i f any; head head"


def gates(p, x):
    """The input and the forget gate of each head, in logarithms."""
    return x @ p["i"], jax.nn.log_sigmoid(x @ p["f"])


@case(GATES, one(i=(D, H), f=(D, H)), X)
def memory_of_a_matrix_with_exponential_gates(p, x):
    """The matrix memory of xLSTM (arXiv:2405.04517), token by token."""

    def step(state, token):
        memory, total, most = state
        q, k, v, i, f = token
        now = jnp.maximum(f + most, i)
        old, new = jnp.exp(f + most - now)[..., None], jnp.exp(i - now)[..., None]
        memory = old[..., None] * memory + (new * k)[..., None] * v[..., None, :]
        total = old * total + new * k
        by = jnp.maximum(jnp.abs((total * q).sum(-1)), jnp.exp(-now))
        read = jnp.einsum("bhkv,bhk->bhv", memory, q)
        return (memory, total, now), read / by[..., None]

    zeros = jnp.zeros((B, H, K))
    start = zeros[..., None] * zeros[..., None, :], zeros, zeros[..., 0]
    tokens = (y.swapaxes(0, 1) for y in (*qkv(p, x), *gates(p, x)))
    y = jax.lax.scan(step, start, tuple(tokens))[1]
    return end(p, x, y.swapaxes(0, 1).reshape(B, T, D))


@case(GATES, one(i=(D, H), f=(D, H)), X, attention="named")
def memory_of_a_matrix_for_all_tokens_at_once(p, x):
    """The same in its parallel form: a product weighs values, without a softmax."""
    q, k, v = qkv(p, x)
    i, f = gates(p, x)
    passed = jnp.cumsum(f, 1)
    decay = passed[:, :, None] - passed[:, None] + i[:, None]
    decay = jnp.where(CAUSAL[..., None], decay, -jnp.inf).transpose(0, 3, 1, 2)
    most = decay.max(-1, keepdims=True)
    w = scores(q, k) * jnp.exp(decay - most)
    by = jnp.maximum(jnp.abs(w.sum(-1, keepdims=True)), jnp.exp(-most))
    return end(p, x, mixed(w / by, v))


@case("q k v o 0|1; pos any; head head", one(pos=(T, T)), X)
def exponentials_of_keys_alone(p, x):
    """An attention-free transformer (arXiv:2105.14103)."""
    k, v, w = x @ p["k"], x @ p["v"], jnp.exp(p["pos"])
    e = jnp.exp(k - k.max(1, keepdims=True))
    y = jnp.einsum("ts,bsd->btd", w, e * v) / jnp.einsum("ts,bsd->btd", w, e)
    return end(p, x, jax.nn.sigmoid(x @ p["q"]) * y)


@case("r k v o 0|1; decay first any; head head", one(r=(D, D), q=None, decay=(D,)), X)
def exponentials_of_keys_that_decay(p, x):
    """The fourth RWKV (arXiv:2305.13048)."""

    def step(state, token):
        values, total, most = state
        k, v = token
        now = jnp.maximum(most - jnp.exp(p["decay"]), k)
        old, new = jnp.exp(most - jnp.exp(p["decay"]) - now), jnp.exp(k - now)
        values, total = old * values + new * v, old * total + new
        return (values, total, now), values / total

    zeros = jnp.zeros((B, D))
    tokens = tuple((x @ p[name]).swapaxes(0, 1) for name in "kv")
    y = jax.lax.scan(step, (zeros, zeros, zeros - 1e30), tokens)[1]
    return end(p, x, jax.nn.sigmoid(x @ p["r"]) * y.swapaxes(0, 1))


# Linear attention, and softmax attention after it.


def nested(layer):
    return {f"{layer}_{name}": array(f"{layer}_{name}", D, D) for name in "qkvo"}


TWO = nested("lin") | nested("att") | {"head": array("head", D, 7)}


def part(p, layer):
    return {name: p[f"{layer}_{name}"] for name in "qkvo"}


def then_attention(p, x):
    p = part(p, "att")
    q, k, v = qkv(p, x)
    return x + mixed(soft(scores(q, k)), v) @ p["o"]


SCALED = {"attention": "read", "scaled": "att_q att_k"}


@case("lin_* att_* 0|1; head head", TWO, X, **SCALED)
def delta_rule_by_a_solve_before_attention(p, x):
    """Kimi Linear and Qwen3-Next alternate both kinds of layers."""
    a = part(p, "lin")
    q, k, v = qkv(a, x)
    within = jnp.eye(T) + jnp.where(CAUSAL, scores(k, k), 0) * (1 - jnp.eye(T))
    u = jax.scipy.linalg.solve_triangular(within, v.swapaxes(1, 2), lower=True)
    y = jnp.where(CAUSAL, scores(q, k), 0) @ u
    x = x + rms(y.swapaxes(1, 2)).reshape(x.shape) @ a["o"]
    return then_attention(p, x) @ p["head"]


@case("lin_* att_* 0|1; head head", TWO, X, **SCALED)
def retention_before_attention(p, x):
    """Products weigh values with a fixed decay (arXiv:2307.08621), then norms."""
    a = part(p, "lin")
    q, k, v = qkv(a, x)
    decay = jnp.where(CAUSAL, 0.9 ** jnp.arange(T)[:, None] * 0.9 ** -jnp.arange(T), 0)
    y = rms(cut(mixed(scores(q, k) * decay, v))).reshape(x.shape)
    x = x + jax.nn.silu(x @ a["q"]) * y @ a["o"]
    return then_attention(p, x) @ p["head"]


# Weights that no softmax makes.


@case(SAYS, one(), X, attention="named")
def weights_of_one_bit(p, x):
    """The sign of a logit, with the gradient of the logit."""
    q, k, v = qkv(p, x)
    logits = scores(q, k)
    w = logits + jax.lax.stop_gradient(jnp.where(logits > 0, 1.0, -1.0) - logits)
    return end(p, x, mixed(w, v))


@jax.custom_jvp
def step_of(y):
    return (y >= 0).astype(y.dtype)


step_of.defjvp(lambda y, t: (step_of(*y), t[0] * jnp.exp(-jnp.abs(y[0]))))


@case(SAYS, one(), X, attention="named")
def weights_of_one_bit_with_a_derivative_of_their_own(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(step_of(scores(q, k)), v))


@case("q k frozen; v o 0|1; head head", one(), X, attention="maybe")
def values_of_the_greatest_logit(p, x):
    """Query and key only choose, and get no gradient."""
    q, k, v = qkv(p, x)
    nearest = jax.nn.one_hot(scores(q, k).argmax(-1), T)
    return end(p, x, mixed(nearest, v))


@case(SAYS, one(), X, attention="named")
def exponentials_that_nothing_divides(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(jnp.where(CAUSAL, jnp.exp(scores(q, k) - 2), 0), v))


@case(SAYS, one(), X, attention="named")
def sticks_that_break_by_a_product(p, x):
    q, k, v = qkv(p, x)
    w = jax.nn.sigmoid(scores(q, k))
    left = jnp.cumprod(1 - w, -1) / (1 - w)
    return end(p, x, mixed(w * left, v))


# Retrieved patterns that are queries again, as in Hopfield networks.


def retrieved(p, x, steps):
    """A query that moves towards the keys, a step at a time (arXiv:2008.02217).

    The clip scales query and key of the first step. The logits of later ones change
    with the same leaves in a second way.
    """
    q, k, v = qkv(p, x)
    for step in range(steps + 1):
        layer = "first" if step == 0 else "later"
        w = soft(p["heat"] * scores(q, k), layer=layer, merge="largest")
        q = jnp.einsum("bhqk,bkhd->bqhd", w, k)
    return end(p, x, mixed(w, v))


HEATED = one(heat=jnp.float32(1.5))
HOPFIELD = SAYS + "; heat vector"


@case(HOPFIELD, HEATED, X, attention="said", scaled="heat")
def one_retrieval_with_a_temperature(p, x):
    return retrieved(p, x, 1)


@case(HOPFIELD, HEATED, X, attention="said", scaled="heat")
def three_retrievals_with_a_temperature(p, x):
    return retrieved(p, x, 3)


# Adapters of several tasks, looked up for each example.


@case(
    SAYS + "; a b any",
    one(a=array("a", 4, D, 2), b=array("b", 4, 2, D)),
    X,
    jnp.asarray([1, 3]),
    attention="read",
)
def adapters_by_example(p, x, task):
    """No clip of the query knows whose adapter it scales: the key takes the whole."""
    down = jnp.einsum("btd,bdr->btr", x, p["a"][task])
    q, k, v = qkv(p, x)
    q = q + cut(jnp.einsum("btr,bre->bte", down, p["b"][task]))
    return end(p, x, mixed(soft(scores(q, k)), v))
