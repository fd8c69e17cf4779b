"""Attention in rare forms, and layers that only look like attention."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    attend,
    attended,
    B,
    case,
    CAUSAL,
    cut,
    D,
    end,
    H,
    heads,
    K,
    mixed,
    ONE,
    one_layer,
    qkv,
    rms,
    scores,
    soft,
    sums_of_both,
    T,
    weights,
    X,
)


LONG = array("long", B, 8, D, scale=1.5)

# Pooled between the projection and the heads, as in MViT.


def windows(y, size, step, of=jax.lax.add, start=0.0, axis=1):
    """Sums or maxima over windows along one axis."""
    dims, steps = ([n if d == axis else 1 for d in range(3)] for n in (size, step))
    return jax.lax.reduce_window(y, start, of, dims, steps, "SAME")


@one_layer("read", LONG)
def queries_pooled_in_windows_that_overlap(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    q = windows(q, 3, 2) / 3
    return end(p, q, attend(cut(q), cut(k), cut(v)))


@one_layer("read", LONG)
def keys_pooled_by_their_maximum(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    k, v = (windows(y, 2, 2, jax.lax.max, -jnp.inf) for y in (k, v))
    return end(p, x, attend(cut(q), cut(k), cut(v)))


@one_layer("read", LONG)
def all_pooled_by_reshape_and_mean(p, x):
    q, k, v = ((x @ p[name]).reshape(B, 4, 2, D).mean(2) for name in "qkv")
    return end(p, q, attend(cut(q), cut(k), cut(v)))


@one_layer("read", o=(D // 2, D))
def features_pooled_within_heads(p, x):
    q, k, v = (cut(windows(x @ p[name], 2, 2, axis=2)) for name in "qkv")
    return end(p, x, attend(q, k, v))


@one_layer("read")
def patches_of_keys_averaged(p, x):
    """Patches are a convolution with one group for each feature, and no weights."""
    q, k, v = (x @ p[name] for name in "qkv")
    k = jax.lax.conv_general_dilated_patches(k.swapaxes(1, 2), (2,), (1,), "SAME")
    k = k.reshape(B, D, 2, T).mean(2).swapaxes(1, 2)
    return end(p, x, attend(cut(q), cut(k), cut(v)))


@heads("read")
def logits_pooled_over_keys(q, k, v):
    window = (1, 1, 1, 3), (1, 1, 1, 1), "SAME"
    most = jax.lax.reduce_window(scores(q, k), -jnp.inf, jax.lax.max, *window)
    return mixed(soft(most), v)


# Learned queries, and softmaxes that are summed key by key.


def by_a_learned_query(weigh):
    """Registers what weighs values by logits of a query, at the last token."""

    def fun(p, x):
        k, v = cut(x @ p["k"]), cut(x @ p["v"])
        logits = noted(jnp.einsum("bthd,hd->bth", k, p["query"]), heads=-1)
        y = weigh(logits, v)[:, -1].reshape(B, D)
        return jax.nn.gelu(y @ p["o"]) @ p["head"]

    fun.__name__ = weigh.__name__
    leaves = {"q": None, "query": (H, K)}
    says = "query vector; k v o 0|1; head head"
    return one_layer("read", says=says, scaled="query", **leaves)(fun)


@by_a_learned_query
def learned_query_of_running_sums(logits, v):
    e = jnp.exp(logits - logits.max(1, keepdims=True))
    return jnp.cumsum(e[..., None] * v, 1) / jnp.cumsum(e, 1)[..., None]


@by_a_learned_query
def learned_query_of_an_associative_scan(logits, v):
    """Attention as a recurrent network (arXiv:2405.13956)."""
    start = logits, jnp.ones_like(logits), v
    _, total, values = jax.lax.associative_scan(sums_of_both, start, axis=1)
    return values / total[..., None]


# Gates by exponentials: no product of query and key is under them.

GATED = {"also": "i f any", "i": (D, H), "f": (D, H)}


def gates(p, x):
    """The input and the forget gate of each head, in logarithms."""
    return x @ p["i"], jax.nn.log_sigmoid(x @ p["f"])


@one_layer("none", **GATED)
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


@one_layer("named", **GATED)
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


@one_layer("none", also="pos any", pos=(T, T))
def exponentials_of_keys_alone(p, x):
    """An attention-free transformer (arXiv:2105.14103)."""
    k, v, w = x @ p["k"], x @ p["v"], jnp.exp(p["pos"])
    e = jnp.exp(k - k.max(1, keepdims=True))
    y = jnp.einsum("ts,bsd->btd", w, e * v) / jnp.einsum("ts,bsd->btd", w, e)
    return end(p, x, jax.nn.sigmoid(x @ p["q"]) * y)


@one_layer("none", also="r 0|1; decay any", r=(D, D), q=None, decay=(D,))
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


names = [f"{layer}_{name}" for layer in ("lin", "att") for name in "qkvo"]
before_attention = case(
    "lin_* att_* 0|1; head head",
    weights(**dict.fromkeys(names, (D, D)), head=(D, 7)),
    attention="read",
    scaled="att_q att_k",
)


def part(p, layer):
    return {name: p[f"{layer}_{name}"] for name in "qkvo"}


def then_attention(p, x):
    a = part(p, "att")
    return (x + attend(*qkv(a, x)) @ a["o"]) @ p["head"]


@before_attention
def delta_rule_by_a_solve_before_attention(p, x):
    """Kimi Linear and Qwen3-Next alternate both kinds of layers."""
    a = part(p, "lin")
    q, k, v = qkv(a, x)
    within = jnp.eye(T) + jnp.where(CAUSAL, scores(k, k), 0) * (1 - jnp.eye(T))
    u = jax.scipy.linalg.solve_triangular(within, v.swapaxes(1, 2), lower=True)
    y = jnp.where(CAUSAL, scores(q, k), 0) @ u
    x = x + rms(y.swapaxes(1, 2)).reshape(x.shape) @ a["o"]
    return then_attention(p, x)


@before_attention
def retention_before_attention(p, x):
    """Products weigh values with a fixed decay (arXiv:2307.08621), then norms."""
    a = part(p, "lin")
    q, k, v = qkv(a, x)
    decay = jnp.where(CAUSAL, 0.9 ** jnp.arange(T)[:, None] * 0.9 ** -jnp.arange(T), 0)
    y = rms(cut(mixed(scores(q, k) * decay, v))).reshape(x.shape)
    x = x + jax.nn.silu(x @ a["q"]) * y @ a["o"]
    return then_attention(p, x)


# Weights that no softmax makes.


@heads("named")
def weights_of_one_bit(q, k, v):
    """The sign of a logit, with the gradient of the logit."""
    logits = scores(q, k)
    w = logits + jax.lax.stop_gradient(jnp.where(logits > 0, 1.0, -1.0) - logits)
    return mixed(w, v)


@jax.custom_jvp
def step_of(y):
    return (y >= 0).astype(y.dtype)


step_of.defjvp(lambda y, t: (step_of(*y), t[0] * jnp.exp(-jnp.abs(y[0]))))


@heads("named")
def weights_of_one_bit_with_a_derivative_of_their_own(q, k, v):
    return mixed(step_of(scores(q, k)), v)


@heads("maybe", also="q k frozen")
def values_of_the_greatest_logit(q, k, v):
    """Query and key only choose, and get no gradient."""
    return mixed(jax.nn.one_hot(scores(q, k).argmax(-1), T), v)


@heads("named")
def exponentials_that_nothing_divides(q, k, v):
    return mixed(jnp.where(CAUSAL, jnp.exp(scores(q, k) - 2), 0), v)


@heads("named")
def sticks_that_break_by_a_product(q, k, v):
    w = jax.nn.sigmoid(scores(q, k))
    left = jnp.cumprod(1 - w, -1) / (1 - w)
    return mixed(w * left, v)


# Retrieved patterns that are queries again, as in Hopfield networks.


def retrieved(steps, q, k, v, heat):
    """A query that moves towards the keys, a step at a time (arXiv:2008.02217).

    The clip scales query and key of the first step. The logits of later ones change
    with the same leaves in a second way.
    """
    for step in range(steps + 1):
        layer = "first" if step == 0 else "later"
        w = soft(heat * scores(q, k), layer=layer, merge="largest")
        q = jnp.einsum("bhqk,bkhd->bqhd", w, k)
    return mixed(w, v)


HEATED = {"also": "heat vector", "heat": jnp.float32(1.5), "scaled": "heat"}


@heads("said", **HEATED)
def one_retrieval_with_a_temperature(q, k, v, heat):
    return retrieved(1, q, k, v, heat)


@heads("said", **HEATED)
def three_retrievals_with_a_temperature(q, k, v, heat):
    return retrieved(3, q, k, v, heat)


# Adapters of several tasks, looked up for each example.


@one_layer("read", X, jnp.asarray([1, 3]), also="a b any", a=(4, D, 2), b=(4, 2, D))
def adapters_by_example(p, x, task):
    """No clip of the query knows whose adapter it scales: the key takes the whole."""
    down = jnp.einsum("btd,bdr->btr", x, p["a"][task])
    q, k, v = qkv(p, x)
    q = q + cut(jnp.einsum("btr,bre->bte", down, p["b"][task]))
    return end(p, x, attend(q, k, v))


# Each was once read wrong.


@heads("maybe", also="features any", features=(K, 8))
def random_features(q, k, v, features):
    """Performer: the query's own kernel makes no key of relative positions."""
    features = jax.lax.stop_gradient(features)

    def positive(y):
        return jnp.exp(y @ features - jnp.sum(y * y, -1, keepdims=True) / 2)

    q, k = positive(q / 2), positive(k / 2)
    sums = jnp.einsum("bqhf,bhf->bqh", q, k.sum(1))
    y = jnp.einsum("bqhf,bhfd->bqhd", q, jnp.einsum("bkhf,bkhd->bhfd", k, v))
    return y / sums[..., None]


@heads("said")
def values_of_the_largest_keys(q, k, v):
    """The values are picked by what the logits say."""
    largest, at = jax.lax.top_k(noted(scores(q, k)), 2)
    v = v.swapaxes(1, 2)[:, :, None]
    v = jnp.take_along_axis(v, at[..., None], 3)
    return jnp.einsum("bhqk,bhqkd->bqhd", jax.nn.softmax(largest), v)


@heads("read")
def two_hops(q, k, v):
    w = soft(scores(q, k))
    return mixed(w @ w, v)


@one_layer("read", k=None)
def keys_that_are_the_input(p, x):
    """Luong's general score: no parameter made the keys."""
    logits = noted(jnp.einsum("bqd,bkd->bqk", x @ p["q"], x), heads=())
    return end(p, x, jax.nn.softmax(logits) @ (x @ p["v"]))


@one_layer("jointly", also="q k v o 0|1~1|0")
def kernels_of_query_and_key_multiplied_first(p, x):
    q, k = (p[n].reshape(D, H, K) for n in "qk")
    both = jnp.einsum("dhk,chk->hdc", q, k)
    logits = jnp.einsum("btd,hdc,buc->bhtu", x, both, x)
    return end(p, x, mixed(soft(logits / 2), cut(x @ p["v"])))


@heads("said")
def temperature_by_the_query(q, k, v):
    by = 1 + jnp.abs(q).mean(-1).swapaxes(1, 2)[..., None]
    return mixed(soft(scores(q, k) / by), v)


@heads("said")
def logits_of_unit_variance(q, k, v):
    s = scores(q, k)
    s = (s - s.mean(-1, keepdims=True)) / (s.std(-1, keepdims=True) + 1e-6)
    return mixed(soft(s), v)


@heads("said")
def logits_as_distances(q, k, v):
    """No product is written, but a square has one inside."""
    s = 20 - jnp.sum((q[:, :, None] - k[:, None]) ** 2, -1).transpose(0, 3, 1, 2)
    return mixed(soft(s), v)


@one_layer(
    "said",
    says="q k v o 1|2; share any; head head",
    share=(2,),
    **{n: np.stack([ONE[n], array("two" + n, D, D)]) for n in "qkvo"},
)
def kernels_that_are_means_of_layers(p, x):
    share = jax.nn.softmax(p["share"])
    kernels = {n: jnp.einsum("l,lij->ij", share, p[n]) for n in "qkvo"}
    return attended({**kernels, "head": p["head"]}, x)


# Well-known models.


@one_layer(
    "read",
    array("xl", B, 4, D),
    array("memory of xl", B, 3, D),
    also="k_place 0|1; q_content q_place vector",
    k_place=(D, D),
    q_content=(H, K),
    q_place=(H, K),
)
def memory_of_transformer_xl(p, x, memory):
    """Its keys are made of activations that the segment before left."""
    n, m = x.shape[1], memory.shape[1]

    def shifted(x):  # so that each query has its distances
        x = jnp.pad(x, [(0, 0)] * 3 + [(1, 0)])
        return x.reshape(B, H, n + m + 1, n)[:, :, 1:].reshape(B, H, n, n + m)

    both = jnp.concatenate([jax.lax.stop_gradient(memory), x], 1)
    q, k, v = cut(x @ p["q"]), cut(both @ p["k"]), cut(both @ p["v"])
    angle = jnp.arange(n + m)[::-1, None] / 10.0 ** jnp.arange(D // 2)
    places = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    content = scores(q + p["q_content"], k)
    place = jnp.einsum("bqhd,khd->bhqk", q + p["q_place"], cut(places @ p["k_place"]))
    causal = np.tri(n, n + m, m, dtype=bool)
    logits = jnp.where(causal, content + shifted(place * K**-0.5), -1e30)
    return end(p, x, mixed(soft(logits), v))


BANDS = np.ones((3, 1, 3, 1, 2, 2), bool)
BANDS[1, :, -1] = BANDS[2, :, 0] = BANDS[0, 0, 1, 0, 0, 1] = False


@heads("read", array("mesh", B, 3, 2, D), BANDS)
def block_banded_attention_of_gencast(q, k, v, masks):
    """Blocks attend to themselves and both neighbors, under one maximum."""
    k, v = (jnp.pad(t, [(0, 0), (1, 1), *[(0, 0)] * 3]) for t in (k, v))
    near = [slice(1, -1), slice(2, None), slice(None, -2)]
    tiles = []
    for mask, at in zip(masks, near, strict=True):
        logits = jnp.einsum("...qhd,...khd->...hqk", q, k[:, at]) * K**-0.5
        logits = jnp.where(mask, logits, -1e30)
        tiles.append(noted(logits, layer="one", merge="largest"))
    tops = [jax.lax.stop_gradient(t.max(-1, keepdims=True)) for t in tiles]
    top = jnp.stack(tops).max(0)
    e = [jnp.exp(t - top) for t in tiles]
    total = sum(t.sum(-1, keepdims=True) for t in e)
    return sum(
        jnp.einsum("bnhqk,bnkhd->bnqhd", t / total, v[:, at])
        for t, at in zip(e, near, strict=True)
    )
