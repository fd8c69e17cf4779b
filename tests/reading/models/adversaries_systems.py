"""Convolutions, tables, heads, solvers, experts; whole systems."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint
from pieces_of_cases import (
    array,
    attend,
    B,
    C,
    case,
    cut,
    D,
    F,
    gains,
    network,
    scores,
    soft,
    T,
    TOKENS,
    V,
    weights,
    X,
)


IMAGE = array("image", B, 6, 6, 4)


def conv(x, w, stride=1, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, **options
    )


# Convolutions.


@case(
    "window vector; point 012|3~2|3; head head",
    weights(window=(3, 3, 1, 4), point=(1, 1, 4, 8), head=(8, C)),
    IMAGE,
)
def depthwise_then_pointwise(p, x):
    y = conv(x, p["window"], feature_group_count=4)
    return jax.nn.relu(conv(y, p["point"])).mean((1, 2)) @ p["head"]


@network("w any", IMAGE, w=(3, 3, 2, 8), head=(8, C))
def grouped_convolution(p, x):
    return jax.nn.relu(conv(x, p["w"], feature_group_count=2)).mean((1, 2)) @ p["head"]


# Whole systems.


@case(
    "up mean spread down 0|1; out head",
    weights(up=(D, F), mean=(F, 4), spread=(F, 4), down=(4, F), out=(F, D)),
    X,
    array("noise", B, T, 4),
)
def variational_autoencoder(p, x, noise):
    y = jax.nn.relu(x @ p["up"])
    mean, spread = y @ p["mean"], y @ p["spread"]
    z = mean + jnp.exp(0.5 * spread) * noise
    out = jax.nn.relu(z @ p["down"]) @ p["out"]
    kl = 0.5 * (mean**2 + jnp.exp(spread) - spread - 1).sum()
    return jnp.mean((out - x) ** 2) + kl


@network(
    "up out 0|1; codebook frozen", up=(D, 4), codebook=(9, 4), out=(4, F), head=(F, C)
)
def codebook_that_is_moved_by_averages(p, x):
    z = x @ p["up"]
    book = jax.lax.stop_gradient(p["codebook"])
    code = book[jnp.argmin(jnp.sum((z[..., None, :] - book) ** 2, -1), -1)]
    y = z + jax.lax.stop_gradient(code - z)
    loss = jnp.mean((z - code) ** 2)
    return jax.nn.relu(y @ p["out"]) @ p["head"], loss


@case(
    "student/* 0|1~head; teacher/* frozen",
    {
        "student": weights(up=(D, F), out=(F, C)),
        "teacher": weights(up=(D, F), out=(F, C)),
    },
)
def teacher_among_the_params(p, x):
    a, b = (jax.nn.gelu(x @ p[n]["up"]) @ p[n]["out"] for n in ("student", "teacher"))
    b = jax.nn.softmax(jax.lax.stop_gradient(b))
    return -jnp.sum(b * jax.nn.log_softmax(a))


@network("both up 0|1", both=(D, D), up=(D, F), head=(F, C))
def stopped_on_one_way_of_two(p, x):
    y = jax.nn.gelu(x @ p["both"])
    return jax.nn.gelu((x + y - jax.lax.stop_gradient(y)) @ p["up"]) @ p["head"]


@case(
    "steps any; up 0|1; head head",
    {**weights(up=(D, D), head=(D, C)), "steps": gains(())},
    taste=True,
)
def inner_gradient_steps(p, x):
    inner = {k: p[k] for k in ("up", "head")}

    def loss(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["head"]) ** 2)

    slopes = jax.grad(loss)(inner)
    moved = jax.tree.map(lambda w, g: w - p["steps"] * g, inner, slopes)
    return jax.nn.gelu(x @ moved["up"]) @ moved["head"]


@case("up 0|1; out vector", weights(up=(D, F), out=(F, 1)), X[:, 0])
def slope_of_an_energy(p, x):
    def energy(x):
        return (jax.nn.softplus(x @ p["up"]) @ p["out"])[0]

    return jax.vmap(jax.value_and_grad(energy))(x)


@case("up 0|1~1|0~head; inner 0|1", weights(up=(D, F), inner=(F, F)))
def decoder_tied_to_its_encoder(p, x):
    y = jax.nn.gelu(jax.nn.gelu(x @ p["up"]) @ p["inner"])
    return y @ p["up"].T


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


@network("up 0|1", up=(D, D))
def nearest_of_learned_points(p, x):
    x = jax.nn.gelu(x @ p["up"]).reshape(-1, D)
    squares = jnp.square(x).sum(-1)[:, None] + jnp.square(p["head"]).sum(0)
    return jax.nn.softmax((2 * jnp.einsum("nd,dc->nc", x, p["head"]) - squares) / D)


of_words = case(
    "embed embedding; up 0|1; head head",
    weights(embed=(V, D), up=(D, D), head=(D, V)),
    TOKENS,
)


@of_words
def words_by_one_hot(p, tokens):
    x = jax.nn.one_hot(tokens, V) @ p["embed"]
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@of_words
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


@network("b 0|1; a any", a=(D, D), b=(D, D))
def solve_of_a_parameter(p, x):
    y = jnp.linalg.solve(jnp.eye(D) + 0.1 * p["a"], (x @ p["b"]).mT).mT
    return jax.nn.relu(y) @ p["head"]


@network("a b 0|1", a=(D, F), b=(F, D))
def ordinary_differential_equation(p, x):
    def slope(y, t, a, b):
        return jnp.tanh(y @ a) @ b

    times = jnp.asarray([0.0, 0.3])
    return odeint(slope, x, times, p["a"], p["b"], mxstep=50)[-1] @ p["head"]


# Each was once read wrong.


@network("up down 0|1", up=(D, F), down=(F, D))
def scales_that_products_are_multiplied_with(p, x):
    """Eight bits: a scale found from a weight is no norm that divides it."""

    def dot(x, w):
        a, b = (jnp.max(jnp.abs(y)) / 448 for y in (x, w))
        x, w = ((y / s).astype(jnp.float8_e4m3fn) for y, s in ((x, a), (w, b)))
        return (x.astype(jnp.float32) @ w.astype(jnp.float32)) * a * b

    return jax.nn.gelu(dot(x, p["up"])) @ p["down"] @ p["head"]


@network("a b c 0|1", a=(D, 4), b=(4, 4), c=(4, D))
def factor_between_two_others(p, x):
    return jax.nn.gelu(x @ (p["a"] @ p["b"] @ p["c"])) @ p["head"]


@case(
    "up 1|2; head head; share any",
    {"up": array("ups", 3, D, F), **weights(head=(F, C)), "share": array("share", 3)},
)
def kernel_that_is_a_mean_of_several(p, x):
    share = jax.nn.softmax(p["share"])
    return jax.nn.gelu(x @ jnp.einsum("l,lij->ij", share, p["up"])) @ p["head"]


@network("up gate down 0|1", up=(D, F), gate=(D, F), down=(F, D))
def gate_of_features_by_a_softmax(p, x):
    y = jax.nn.softmax(x @ p["gate"]) * (x @ p["up"])
    return jax.nn.gelu(y @ p["down"]) @ p["head"]


@case(
    "inner steps 0|1; decay bias any; small b c out 0|1; head head",
    weights(
        inner=(D, F), small=(F, 2), steps=(2, F), decay=(F, 4), bias=(F,),
        b=(F, 4), c=(F, 4), out=(F, D), head=(D, C),
    ),
)  # fmt: skip
def state_space_by_an_associative_scan(p, x):
    """Exponentials that no sum divides are decays, and no attention."""
    u = jax.nn.silu(x @ p["inner"])
    steps = jax.nn.softplus(u @ p["small"] @ p["steps"] + p["bias"])[..., None]
    a = jnp.exp(-jnp.exp(p["decay"]) * steps)
    b = steps * u[..., None] * (u @ p["b"])[:, :, None]

    def joined(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    _, h = jax.lax.associative_scan(joined, (a, b), axis=1)
    y = jnp.einsum("btfn,btn->btf", h, u @ p["c"])
    return (x + y @ p["out"]) @ p["head"]


@network("router router; wi wo 1|2", router=(D, 4), wi=(4, D, F), wo=(4, F, D))
def experts_by_one_hot_rows_twice(p, x):
    """What one-hot rows have weighed is weighed by them again."""
    logits = x @ p["router"]
    rows = jax.nn.one_hot(logits.argmax(-1), 4)
    y = jnp.einsum("btd,edf,bte->btf", x, p["wi"], rows)
    y = jnp.einsum("btf,efd,bte->btd", jax.nn.gelu(y), p["wo"], rows)
    return jax.nn.gelu(x + jax.nn.sigmoid(logits.max(-1))[..., None] * y) @ p["head"]


# Experts, however they are picked: what picks them is a router.


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


@network("router frozen; a b 0|1", router=(D, 2), a=(D, D), b=(D, D))
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


@network(
    "which router; code embedding; inner 0|1", inner=(D, D), which=(D, 4), code=(4, D)
)
def codes_by_one_hot_rows_with_another_gradient(p, x):
    """Straight through, as a Gumbel softmax is."""
    soft_rows = jax.nn.softmax(jax.nn.gelu(x @ p["inner"]) @ p["which"], -1)
    rows = jax.nn.one_hot(jnp.argmax(soft_rows, -1), 4)
    rows = rows - jax.lax.stop_gradient(soft_rows) + soft_rows
    return jax.nn.gelu(jnp.einsum("kd,btk->btd", p["code"], rows)) @ p["head"]
