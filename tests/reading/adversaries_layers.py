"""Layers of all kinds, without attention."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint
from pieces_of_cases import (
    B,
    C,
    case,
    D,
    F,
    gains,
    rms,
    T,
    TOKENS,
    V,
    weights,
    X,
)


# Embeddings and heads.


@case(
    "embed embedding; up 0|1; head head",
    weights(embed=(V, D), up=(D, D), head=(D, V)),
    TOKENS,
)
def language_model(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


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
    weights(embed=(V, D), up=(D, D), head=(D, C)),
    np.eye(V, dtype=np.float32)[np.asarray(TOKENS)],
    taste=True,
)
def words_by_one_hot_among_the_arguments(p, x):
    return jax.nn.gelu(x @ p["embed"] @ p["up"]) @ p["head"]


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


@case(
    "embed embedding; up 0|1; head head; codebook embedding; paint any",
    weights(embed=(V, D), up=(D, D), head=(D, V), codebook=(V, 8), paint=(8, C)),
    TOKENS,
)
def head_whose_argmax_is_looked_up(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()
    return loss, p["codebook"][jnp.argmax(logits, -1)] @ p["paint"]


@case(
    "embed embedding; up 0|1; head head; bias vector",
    weights(embed=(V, D), up=(D, D), head=(D, C), bias=(C,)),
    TOKENS,
)
def bag_of_words(p, tokens):
    x = p["embed"][tokens].mean(1)
    return jax.nn.relu(x @ p["up"]) @ p["head"] + p["bias"]


@case(
    "up 0|1; policy value head~vector",
    weights(up=(D, D), policy=(D, C), value=(D, 1)),
    X,
)
def two_heads(p, x):
    y = jax.nn.tanh(x @ p["up"])
    return jax.nn.log_softmax(y @ p["policy"]), (y @ p["value"])[..., 0]


@case(
    "up 0|1; head head; gain bias vector",
    {**weights(up=(D, D), head=(D, C), bias=(D,)), "gain": gains(D)},
    X,
)
def normed_layers(p, x):
    return (x + rms(x, p["gain"]) @ p["up"] + p["bias"]) @ p["head"]


@case(
    "up down 0|1; head head; gain vector",
    {**weights(up=(D, F), down=(F, D), head=(D, C)), "gain": gains(())},
    X,
)
def gate_of_one_number(p, x):
    y = jax.nn.gelu(x @ p["up"]) @ p["down"]
    return (x + jnp.tanh(p["gain"]) * y) @ p["head"]


# Products of activations.


@case(
    "embed embedding; up 0|1; head head~vector",
    weights(embed=(V, D), up=(D, D), head=(15, 1)),
    np.arange(12, dtype=np.int32).reshape(2, 6) % V,
)
def dot_interactions(p, tokens):
    """DLRM."""
    x = jax.nn.relu(p["embed"][tokens] @ p["up"])
    pairs = jnp.einsum("bid,bjd->bij", x, x)[:, *np.triu_indices(6, 1)]
    return pairs @ p["head"]


@case(
    "factors embedding; first vector~embedding",
    weights(factors=(V, 4), first=(V,)),
    np.arange(12, dtype=np.int32).reshape(2, 6) % V,
)
def factorization_machine(p, tokens):
    x = p["factors"][tokens]
    both = x.sum(1) ** 2 - (x**2).sum(1)
    return p["first"][tokens].sum(1) + 0.5 * both.sum(-1)


@case("up 0|1; w any; head head", weights(up=(D, D), w=(5, D, D), head=(5, C)), X)
def bilinear_layer(p, x):
    y = jax.nn.gelu(x @ p["up"])
    z = jnp.einsum("btd,ode,bte->bto", y, p["w"], x)
    return jax.nn.gelu(z) @ p["head"]


@case("a b c 0|1; head head", weights(a=(D, F), b=(D, F), c=(F, D), head=(D, C)), X)
def products_of_two_projections(p, x):
    return (x + ((x @ p["a"]) * (x @ p["b"])) @ p["c"]) @ p["head"]


@case(
    "inner 0|1; maker any; head head",
    weights(inner=(D, 4), maker=(4, D * D), head=(D, C)),
    X,
)
def hypernetwork(p, x):
    made = (jax.nn.tanh(x.mean(1) @ p["inner"]) @ p["maker"]).reshape(B, D, D)
    return jax.nn.gelu(x @ made) @ p["head"]


@case(
    "tokens channels 0|1~1|0; head head",
    weights(tokens=(T, T), channels=(D, D), head=(D, C)),
    X,
)
def mixer(p, x):
    x = x + jax.nn.gelu(jnp.einsum("btd,ts->bsd", x, p["tokens"]))
    return (x + jax.nn.gelu(x @ p["channels"])) @ p["head"]


@case(
    "a b 0|1; spatial 0|1~1|0; bias vector; head head",
    weights(a=(D, F), b=(8, D), spatial=(T, T), bias=(T, 1), head=(D, C)),
    X,
)
def spatial_gate(p, x):
    u, v = jnp.split(jax.nn.gelu(x @ p["a"]), 2, -1)
    v = jnp.einsum("ts,bsf->btf", p["spatial"], v) + p["bias"]
    return (x + (u * v) @ p["b"]) @ p["head"]


@case("a b c 0|1", weights(a=(D, D), b=(D, D), c=(D, D)), X, taste=True)
def solved(p, x):
    y = jnp.linalg.solve(jnp.eye(D) + 0.1 * p["a"], (x @ p["b"]).mT).mT
    return jax.nn.relu(y) @ p["c"]


@case("b 0|1; a any; head head", weights(a=(D, D), b=(D, D), head=(D, C)), X)
def solve_of_a_parameter(p, x):
    y = jnp.linalg.solve(jnp.eye(D) + 0.1 * p["a"], (x @ p["b"]).mT).mT
    return jax.nn.relu(y) @ p["head"]


@case("a b 0|1; head head", weights(a=(D, D), b=(D, D), head=(D, C)), X)
def solve_of_activations(p, x):
    y, z = x @ p["a"], x @ p["b"]
    gram = jnp.eye(D) + y.mT @ y
    return jax.nn.relu(z @ jnp.linalg.solve(gram, x.mT @ z)) @ p["head"]


@case("a b 0|1; head head", weights(a=(D, F), b=(F, D), head=(D, C)), X)
def ordinary_differential_equation(p, x):
    def slope(y, t, a, b):
        return jnp.tanh(y @ a) @ b

    times = jnp.asarray([0.0, 0.3])
    return odeint(slope, x, times, p["a"], p["b"], mxstep=50)[-1] @ p["head"]


@case("up 0|1; head head", weights(up=(D, D), head=(D, C)), X)
def mixed_by_fourier(p, x):
    y = jnp.fft.fft2(x, axes=(1, 2)).real
    return (x + jax.nn.gelu(y @ p["up"])) @ p["head"]


@case("w any; head head", weights(w=(2, D, D, 3), head=(D, C)), X)
def fourier_operator(p, x):
    y = jnp.fft.rfft(x, axis=1)
    w = jax.lax.complex(p["w"][0], p["w"][1])
    y = jnp.einsum("bfd,def->bfe", y, w)
    return jax.nn.gelu(jnp.fft.irfft(y, n=T, axis=1)) @ p["head"]


@case(
    "inner 0|1; spline any; head head",
    weights(inner=(D, D), spline=(D, 6, D), head=(D, C)),
    X,
)
def splines(p, x):
    """KAN: every input is a row of bases, and every edge has coefficients."""
    y = jnp.tanh(x @ p["inner"])
    bases = jnp.exp(-((y[..., None] - jnp.linspace(-1, 1, 6)) ** 2) * 4)
    return jax.nn.silu(jnp.einsum("btdg,dgo->bto", bases, p["spline"])) @ p["head"]


# Recurrence.


@case(
    "inner 0|1; decay vector; out 0|1; head head",
    weights(inner=(D, F), decay=(F,), out=(F, D), head=(D, C)),
    X,
)
def diagonal_state_space(p, x):
    u, decay = x @ p["inner"], jax.nn.sigmoid(p["decay"])

    def step(h, u):
        h = decay * h + u
        return h, h

    _, y = jax.lax.scan(step, jnp.zeros((B, F)), u.swapaxes(0, 1))
    return (x + jax.nn.gelu(y.swapaxes(0, 1)) @ p["out"]) @ p["head"]


@case(
    "inner 0|1; decay vector; b c 0|1; out 0|1; head head",
    weights(inner=(D, F), decay=(F, 4), b=(D, 4), c=(D, 4), out=(F, D), head=(D, C)),
    X,
)
def selective_state_space(p, x):
    u, b, c = x @ p["inner"], x @ p["b"], x @ p["c"]
    decay = jnp.exp(-jnp.exp(p["decay"]))

    def step(h, t):
        u, b, c = t
        h = decay * h + u[..., None] * b[:, None]
        return h, jnp.einsum("bfn,bn->bf", h, c)

    by_time = tuple(t.swapaxes(0, 1) for t in (u, b, c))
    _, y = jax.lax.scan(step, jnp.zeros((B, F, 4)), by_time)
    return (x + jax.nn.silu(y.swapaxes(0, 1)) @ p["out"]) @ p["head"]


@case(
    "w u 0|1; bias vector; head head",
    weights(w=(D, 4 * D), u=(D, 4 * D), bias=(4 * D,), head=(D, C)),
    X,
)
def long_short_term_memory(p, x):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    first = jnp.zeros((B, D)), jnp.zeros((B, D))
    _, y = jax.lax.scan(step, first, x.swapaxes(0, 1))
    return y @ p["head"]


@case("w u 0|1; head head", weights(w=(D, D), u=(D, D), head=(D, C)), X)
def recurrent_by_a_while_loop(p, x):
    def step(i, h):
        return jnp.tanh(x[:, i] @ p["w"] + h @ p["u"])

    return jax.lax.fori_loop(0, T, step, jnp.zeros((B, D))) @ p["head"]
