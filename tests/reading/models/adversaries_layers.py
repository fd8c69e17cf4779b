"""Heads that are shared, mixed, looped over or a loop's trips."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint
from pieces_of_cases import (
    array,
    B,
    C,
    case,
    cut,
    D,
    end,
    F,
    gains,
    H,
    K,
    KEY,
    mixed,
    one,
    qkv,
    SAYS,
    scores,
    soft,
    T,
    TOKENS,
    turned,
    V,
    weights,
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


# Kernels that meet data, noise, masks or one another before activations.


MLP = weights(up=(D, F), down=(F, D), head=(D, C))
MASK = np.asarray(np.arange(D)[:, None] % 2 * np.ones(F), np.float32)
SAYS = "up down 0|1; head head"


def mlp(p, x, up, down=None):
    down = p["down"] if down is None else down
    return (x + jax.nn.gelu(x @ up) @ down) @ p["head"]


@case(SAYS, MLP, X, MASK)
def mask_among_the_arguments(p, x, mask):
    return mlp(p, x, jnp.where(mask > 0, p["up"], 0))


@case(SAYS, MLP, X, KEY)
def dropped_connections(p, x, key):
    key = jax.random.wrap_key_data(key)
    keep = jax.random.bernoulli(key, 0.7, (D, F))
    return mlp(p, x, jnp.where(keep, p["up"] / 0.7, 0))


@case(SAYS, MLP, X, {"up": array("t", D, F), "down": array("u", F, D)})
def averages_of_all_as_a_teacher(p, x, teacher):
    return mlp(p, x, p["up"]), mlp({**p, **teacher}, x, teacher["up"])


@case(SAYS, MLP, X)
def signs_with_a_mean_size(p, x):
    def ternary(w):
        size = jnp.mean(jnp.abs(w))
        low = jnp.clip(jnp.round(w / size), -1, 1) * size
        return w + jax.lax.stop_gradient(low - w)

    return mlp(p, x, ternary(p["up"]))


class _Float8(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(D, name="mix", use_bias=False, dot_general_cls=nn.Fp8DotGeneralOp)
        return nn.Dense(C, name="head", use_bias=False)(x + y(x))


def flax_of_eight_bits(p, rest, x):
    return _Float8().apply({"params": p, **rest}, x)


_FLOAT8 = jax.eval_shape(_Float8().init, jax.random.key(0), X)
case(
    "mix/kernel 0|1; head/kernel head",
    {"mix": {"kernel": array("mix", D, D)}, "head": {"kernel": array("head", D, C)}},
    jax.tree.map(  # scales and the largest entries so far
        lambda x: np.ones(x.shape, x.dtype),
        {k: v for k, v in _FLOAT8.items() if k != "params"},
    ),
    X,
)(flax_of_eight_bits)


@case(SAYS, MLP, X, array("u", D), array("w", F))
def spectral_norm_by_vectors_among_the_arguments(p, x, u, w):
    return mlp(p, x, p["up"] / jnp.einsum("d,df,f->", u, p["up"], w))


@case(SAYS + "; gain vector", {**MLP, "gain": gains(F)}, X)
def weight_norm(p, x):
    up = p["up"] / jnp.linalg.norm(p["up"], axis=0, keepdims=True)
    return mlp(p, x, up * p["gain"])


@case(
    SAYS + "; a b 0|1; gain vector",
    {**MLP, **weights(a=(D, 2), b=(2, F)), "gain": gains(F)},
    X,
)
def low_rank_with_a_gain(p, x):
    w = p["up"] + p["a"] @ p["b"]
    return mlp(p, x, p["gain"] * w / jnp.linalg.norm(w, axis=0))


@case(
    "a b 0|1; head head",
    weights(a=(D, 2), b=(2, D), head=(D, C)),
    X,
    array("base", D, D),
)
def adapters_alone_on_a_kernel_of_the_arguments(p, x, base):
    return (x + jax.nn.gelu(x @ (base + p["a"] @ p["b"]))) @ p["head"]


@case(
    "blocks 1|2; down 0|1; head head",
    weights(blocks=(3, 4, 8), down=(24, D), head=(D, C)),
    X,
)
def block_diagonal(p, x):
    y = jnp.einsum("btnd,ndf->btnf", x.reshape(B, T, 3, 4), p["blocks"])
    return (x + jax.nn.gelu(y.reshape(B, T, 24)) @ p["down"]) @ p["head"]


@case(
    "up 1|2; down 1|2; head 1|2~head",
    weights(up=(2, D, F), down=(2, F, D), head=(2, D, C)),
    X,
)
def an_ensemble_by_vmap(p, x):
    return jax.vmap(lambda p: mlp(p, x, p["up"]))(p)


# Attention whose kernels meet data.


def _attended(p, x, q, k):
    q, k, v = cut(x @ q), cut(x @ k), cut(x @ p["v"])
    return (x + mixed(soft(scores(q, k)), v) @ p["o"]) @ p["head"]


QKV = weights(q=(D, D), k=(D, D), v=(D, D), o=(D, D), head=(D, C))
READ = "q k v o 0|1; head head"


@case(READ, QKV, X, array("b", D, D), array("c", D, D), attention="said")
def both_with_kernels_of_the_arguments_added(p, x, b, c):
    return _attended(p, x, p["q"] + b, p["k"] + c)


@case(READ + "; *_gain vector", {**QKV, "q_gain": gains(D)}, X, attention="read")
def query_by_weight_norm(p, x):
    q = p["q_gain"] * p["q"] / jnp.linalg.norm(p["q"], axis=0)
    return _attended(p, x, q, p["k"] / jnp.linalg.norm(p["k"], axis=0))


@case(
    "q k frozen; v o 0|1; q_a q_b k_a k_b 0|1; head head",
    {**QKV, **weights(q_a=(D, 2), q_b=(2, D), k_a=(D, 2), k_b=(2, D))},
    X,
    attention="said",
)
def adapters_of_frozen_query_and_key(p, x):
    q, k = (jax.lax.stop_gradient(p[n]) + p[n + "_a"] @ p[n + "_b"] for n in "qk")
    return _attended(p, x, q, k)


# Layers of all kinds, without attention.


# Embeddings and heads.


@case("embed embedding; up 0|1", weights(embed=(V, D), up=(D, D)), TOKENS)
def tied_to_its_head(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@case(
    "up 0|1; head head; moves any; first vector",
    weights(up=(D, D), head=(D, C), moves=(C, C), first=(C,)),
    X,
    jnp.asarray(np.random.default_rng(4).integers(0, C, (B, T))),
)
def emissions_of_a_random_field(p, x, tags):
    """What is scored besides the emissions comes of no layer."""
    emitted = jax.nn.gelu(x @ p["up"]) @ p["head"]
    sums = p["first"] + emitted[:, 0]
    score = (p["first"] * jax.nn.one_hot(tags[:, 0], C)).sum(-1)
    score = score + jnp.take_along_axis(emitted, tags[..., None], -1).sum((1, 2))
    for t in range(1, T):
        sums = jax.nn.logsumexp(sums[:, :, None] + p["moves"], 1) + emitted[:, t]
        score = score + p["moves"][tags[:, t - 1], tags[:, t]]
    return jnp.mean(jax.nn.logsumexp(sums, -1) - score)


@case("up 0|1; head head", weights(up=(D, D), head=(D, C)), X)
def nearest_of_learned_points(p, x):
    x = jax.nn.gelu(x @ p["up"]).reshape(-1, D)
    squares = jnp.square(x).sum(-1)[:, None] + jnp.square(p["head"]).sum(0)
    return jax.nn.softmax((2 * jnp.einsum("nd,dc->nc", x, p["head"]) - squares) / D)


@case(
    "embed embedding; up 0|1; head head",
    weights(embed=(V, D), up=(D, D), head=(D, V)),
    TOKENS,
)
def words_by_one_hot(p, tokens):
    x = jax.nn.one_hot(tokens, V) @ p["embed"]
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case(
    "embed embedding; up 0|1; head head",
    weights(embed=(V, D), up=(D, D), head=(D, V)),
    TOKENS,
)
def words_of_a_part_of_the_vocabulary(p, tokens):
    """Vocabulary in two parts, as devices hold it."""
    x = 0
    for i, part in enumerate(jnp.split(p["embed"][: V - 1], 2)):
        at = tokens - i * 5
        is_here = (at >= 0) & (at < 5)
        x = x + jnp.where(is_here[..., None], part[jnp.where(is_here, at, 0)], 0)
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case(
    "embeds embedding; up 0|1; heads head",
    weights(embeds=(3, V, D), up=(D, D), heads=(3, D, V)),
    (np.asarray(TOKENS) + np.arange(3, dtype=np.int32)[:, None, None]) % V,
)
def codebooks_with_a_head_each(p, codes):
    x = sum(p["embeds"][i][codes[i]] for i in range(3))
    return jnp.einsum("btd,cdv->cbtv", jax.nn.gelu(x @ p["up"]), p["heads"])


# Products of activations.


@case("b 0|1; a any; head head", weights(a=(D, D), b=(D, D), head=(D, C)), X)
def solve_of_a_parameter(p, x):
    y = jnp.linalg.solve(jnp.eye(D) + 0.1 * p["a"], (x @ p["b"]).mT).mT
    return jax.nn.relu(y) @ p["head"]


@case("a b 0|1; head head", weights(a=(D, F), b=(F, D), head=(D, C)), X)
def ordinary_differential_equation(p, x):
    def slope(y, t, a, b):
        return jnp.tanh(y @ a) @ b

    times = jnp.asarray([0.0, 0.3])
    return odeint(slope, x, times, p["a"], p["b"], mxstep=50)[-1] @ p["head"]


# Recurrence.
