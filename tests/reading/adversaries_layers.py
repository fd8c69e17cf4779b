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
    T,
    TOKENS,
    V,
    weights,
    X,
)


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
