"""Layers of all kinds, without attention: what an expert would call their leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint
from pieces_of_cases import (
    array, B, C, case, D, F, gains, rms, T, TOKENS, unit, V, weights, X,
)  # fmt: skip


IMAGE = array("image", B, 6, 6, 4)


def conv(x, w, stride=1, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, **options
    )


# Embeddings and heads.


@case("embed embedding; up 0|1; head head", weights(embed=(V, D), up=(D, D),
      head=(D, V)), TOKENS)  # fmt: skip
def language_model(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@case("embed embedding; up 0|1", weights(embed=(V, D), up=(D, D)), TOKENS)
def tied_to_its_head(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@case("embed embedding; up 0|1; head head", weights(embed=(V, D), up=(D, D),
      head=(D, V)), TOKENS)  # fmt: skip
def words_by_one_hot(p, tokens):
    x = jax.nn.one_hot(tokens, V) @ p["embed"]
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case("embed embedding; up 0|1; head head", weights(embed=(V, D), up=(D, D),
      head=(D, C)), jax.nn.one_hot(TOKENS, V), taste=True)  # fmt: skip
def words_by_one_hot_among_the_arguments(p, x):
    return jax.nn.gelu(x @ p["embed"] @ p["up"]) @ p["head"]


@case("embed embedding; up 0|1; head head", weights(embed=(V, D), up=(D, D),
      head=(D, V)), TOKENS)  # fmt: skip
def words_of_a_part_of_the_vocabulary(p, tokens):
    """Vocabulary in two parts, as devices hold it."""
    x = 0
    for i, part in enumerate(jnp.split(p["embed"][: V - 1], 2)):
        at = tokens - i * 5
        is_here = (at >= 0) & (at < 5)
        x = x + jnp.where(is_here[..., None], part[jnp.where(is_here, at, 0)], 0)
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case("embeds embedding; up 0|1; heads head",
      weights(embeds=(3, V, D), up=(D, D), heads=(3, D, V)),
      jnp.stack([TOKENS, (TOKENS + 1) % V, (TOKENS + 2) % V]))  # fmt: skip
def codebooks_with_a_head_each(p, codes):
    x = sum(p["embeds"][i][codes[i]] for i in range(3))
    return jnp.einsum("btd,cdv->cbtv", jax.nn.gelu(x @ p["up"]), p["heads"])


@case("embed embedding; up 0|1; head head; codebook embedding; paint any",
      weights(embed=(V, D), up=(D, D), head=(D, V), codebook=(V, 8), paint=(8, C)),
      TOKENS)  # fmt: skip
def head_whose_argmax_is_looked_up(p, tokens):
    logits = jax.nn.gelu(p["embed"][tokens] @ p["up"]) @ p["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()
    return loss, p["codebook"][jnp.argmax(logits, -1)] @ p["paint"]


@case("embed embedding; up 0|1; head head; bias vector",
      weights(embed=(V, D), up=(D, D), head=(D, C), bias=(C,)), TOKENS)  # fmt: skip
def bag_of_words(p, tokens):
    x = p["embed"][tokens].mean(1)
    return jax.nn.relu(x @ p["up"]) @ p["head"] + p["bias"]


@case("up 0|1; policy value head~vector",
      weights(up=(D, D), policy=(D, C), value=(D, 1)), X)  # fmt: skip
def two_heads(p, x):
    y = jax.nn.tanh(x @ p["up"])
    return jax.nn.log_softmax(y @ p["policy"]), (y @ p["value"])[..., 0]


@case("up 0|1; head head; gain bias vector", {**weights(up=(D, D), head=(D, C),
      bias=(D,)), "gain": gains(D)}, X)  # fmt: skip
def normed_layers(p, x):
    return (x + rms(x, p["gain"]) @ p["up"] + p["bias"]) @ p["head"]


@case("up down 0|1; head head; gain vector", {**weights(up=(D, F), down=(F, D),
      head=(D, C)), "gain": gains(())}, X)  # fmt: skip
def gate_of_one_number(p, x):
    y = jax.nn.gelu(x @ p["up"]) @ p["down"]
    return (x + jnp.tanh(p["gain"]) * y) @ p["head"]


# Products of activations.


@case("embed embedding; up 0|1; head head~vector", weights(embed=(V, D), up=(D, D),
      head=(15, 1)), jnp.arange(12).reshape(2, 6) % V)  # fmt: skip
def dot_interactions(p, tokens):
    """DLRM."""
    x = jax.nn.relu(p["embed"][tokens] @ p["up"])
    pairs = jnp.einsum("bid,bjd->bij", x, x)[:, *np.triu_indices(6, 1)]
    return pairs @ p["head"]


@case("factors embedding; first vector~embedding", weights(factors=(V, 4), first=(V,)),
      jnp.arange(12).reshape(2, 6) % V)  # fmt: skip
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


@case("inner 0|1; maker any; head head", weights(inner=(D, 4), maker=(4, D * D),
      head=(D, C)), X)  # fmt: skip
def hypernetwork(p, x):
    made = (jax.nn.tanh(x.mean(1) @ p["inner"]) @ p["maker"]).reshape(B, D, D)
    return jax.nn.gelu(x @ made) @ p["head"]


@case("tokens channels 0|1~1|0; head head", weights(tokens=(T, T), channels=(D, D),
      head=(D, C)), X)  # fmt: skip
def mixer(p, x):
    x = x + jax.nn.gelu(jnp.einsum("btd,ts->bsd", x, p["tokens"]))
    return (x + jax.nn.gelu(x @ p["channels"])) @ p["head"]


@case("a b 0|1; spatial 0|1~1|0; bias vector; head head",
      weights(a=(D, F), b=(8, D), spatial=(T, T), bias=(T, 1), head=(D, C)),
      X)  # fmt: skip
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


@case("inner 0|1; spline any; head head", weights(inner=(D, D), spline=(D, 6, D),
      head=(D, C)), X)  # fmt: skip
def splines(p, x):
    """KAN: every input is a row of bases, and every edge has coefficients."""
    y = jnp.tanh(x @ p["inner"])
    bases = jnp.exp(-((y[..., None] - jnp.linspace(-1, 1, 6)) ** 2) * 4)
    return jax.nn.silu(jnp.einsum("btdg,dgo->bto", bases, p["spline"])) @ p["head"]


# Recurrence.


@case("inner 0|1; decay vector; out 0|1; head head",
      weights(inner=(D, F), decay=(F,), out=(F, D), head=(D, C)), X)  # fmt: skip
def diagonal_state_space(p, x):
    u, decay = x @ p["inner"], jax.nn.sigmoid(p["decay"])

    def step(h, u):
        h = decay * h + u
        return h, h

    _, y = jax.lax.scan(step, jnp.zeros((B, F)), u.swapaxes(0, 1))
    return (x + jax.nn.gelu(y.swapaxes(0, 1)) @ p["out"]) @ p["head"]


@case("inner 0|1; decay vector; b c 0|1; out 0|1; head head",
      weights(inner=(D, F), decay=(F, 4), b=(D, 4), c=(D, 4), out=(F, D),
              head=(D, C)), X)  # fmt: skip
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


@case("w u 0|1; bias vector; head head", weights(w=(D, 4 * D), u=(D, 4 * D),
      bias=(4 * D,), head=(D, C)), X)  # fmt: skip
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


# Convolutions.


@case("a b 012|3; head head", weights(a=(3, 3, 4, 8), b=(3, 3, 8, 8), head=(8, C)),
      IMAGE)  # fmt: skip
def convolutions(p, x):
    y = jax.nn.relu(conv(jax.nn.relu(conv(x, p["a"])), p["b"], 2))
    return y.mean((1, 2)) @ p["head"]


@case("window vector; point 012|3~2|3; head head",
      weights(window=(3, 3, 1, 4), point=(1, 1, 4, 8), head=(8, C)), IMAGE)  # fmt: skip
def depthwise_then_pointwise(p, x):
    y = conv(x, p["window"], feature_group_count=4)
    return jax.nn.relu(conv(y, p["point"])).mean((1, 2)) @ p["head"]


@case("w any; head head", weights(w=(3, 3, 2, 8), head=(8, C)), IMAGE)
def grouped_convolution(p, x):
    return jax.nn.relu(conv(x, p["w"], feature_group_count=2)).mean((1, 2)) @ p["head"]


@case("w 012|3; head head", weights(w=(3, 3, 4, 8), head=(8, C)), IMAGE)
def dilated_convolution(p, x):
    return jax.nn.relu(conv(x, p["w"], rhs_dilation=(2, 2))).mean((1, 2)) @ p["head"]


@case("down 012|3; up 012|3~013|2; out any",
      weights(down=(3, 3, 4, 8), up=(2, 2, 8, 4), out=(1, 1, 8, 3)), IMAGE)  # fmt: skip
def u_net(p, x):
    y = jax.nn.relu(conv(x, p["down"], 2))
    y = jax.lax.conv_transpose(y, p["up"], (2, 2), "SAME")
    return conv(jnp.concatenate([x, jax.nn.relu(y)], -1), p["out"])


@case("a b any; head head", weights(a=(3, D, D), b=(D, D), head=(D, C)), X, taste=True)
def convolution_as_a_sum_of_shifts(p, x):
    y = sum(jnp.roll(x, i - 1, 1) @ p["a"][i] for i in range(3))
    return jax.nn.gelu(y) @ p["b"] @ p["head"]


@case("patch 0|1~012|3; place vector~embedding; up 0|1; head head",
      weights(patch=(36, D), place=(4, D), up=(D, D), head=(D, C)), IMAGE)  # fmt: skip
def patches(p, x):
    x = x.reshape(B, 2, 3, 2, 3, 4).swapaxes(2, 3).reshape(B, 4, 36)
    x = x @ p["patch"] + p["place"]
    return jax.nn.gelu(x.mean(1) @ p["up"]) @ p["head"]


# Whole systems.


@case("g/up 0|1; g/out any; d/up 0|1; d/out any",
      {"g": weights(up=(4, F), out=(F, D)), "d": weights(up=(D, F), out=(F, 1))},
      array("noise", B, 4), X[:, 0])  # fmt: skip
def adversarial_pair(p, noise, real):
    def judge(x):
        return (jax.nn.relu(x @ p["d"]["up"]) @ p["d"]["out"])[:, 0]

    fake = jnp.tanh(jax.nn.relu(noise @ p["g"]["up"]) @ p["g"]["out"])
    return jax.nn.softplus(judge(fake)) + jax.nn.softplus(-judge(real))


@case("up mean spread down 0|1; out head", weights(up=(D, F), mean=(F, 4),
      spread=(F, 4), down=(4, F), out=(F, D)), X, array("noise", B, T, 4))  # fmt: skip
def variational_autoencoder(p, x, noise):
    y = jax.nn.relu(x @ p["up"])
    mean, spread = y @ p["mean"], y @ p["spread"]
    z = mean + jnp.exp(0.5 * spread) * noise
    out = jax.nn.relu(z @ p["down"]) @ p["out"]
    kl = 0.5 * (mean**2 + jnp.exp(spread) - spread - 1).sum()
    return jnp.mean((out - x) ** 2) + kl


@case("up down 0|1; codebook any; out head",
      weights(up=(D, 4), codebook=(9, 4), down=(4, F), out=(F, D)), X)  # fmt: skip
def codes_straight_through(p, x):
    z = x @ p["up"]
    far = jnp.sum((z[..., None, :] - p["codebook"]) ** 2, -1)
    code = p["codebook"][jnp.argmin(far, -1)]
    commit = jnp.mean((z - jax.lax.stop_gradient(code)) ** 2)
    pull = jnp.mean((jax.lax.stop_gradient(z) - code) ** 2)
    y = z + jax.lax.stop_gradient(code - z)
    out = jax.nn.relu(y @ p["down"]) @ p["out"]
    return jnp.mean((out - x) ** 2) + commit + pull


@case("up out 0|1; codebook frozen; head head",
      weights(up=(D, 4), codebook=(9, 4), out=(4, F), head=(F, C)), X)  # fmt: skip
def codebook_that_is_moved_by_averages(p, x):
    z = x @ p["up"]
    book = jax.lax.stop_gradient(p["codebook"])
    code = book[jnp.argmin(jnp.sum((z[..., None, :] - book) ** 2, -1), -1)]
    y = z + jax.lax.stop_gradient(code - z)
    loss = jnp.mean((z - code) ** 2)
    return jax.nn.relu(y @ p["out"]) @ p["head"], loss


@case("student/* 0|1~head; teacher/* frozen",
      {"student": weights(up=(D, F), out=(F, C)),
       "teacher": weights(up=(D, F), out=(F, C))}, X)  # fmt: skip
def teacher_among_the_params(p, x):
    a, b = (jax.nn.gelu(x @ p[n]["up"]) @ p[n]["out"] for n in ("student", "teacher"))
    b = jax.nn.softmax(jax.lax.stop_gradient(b))
    return -jnp.sum(b * jax.nn.log_softmax(a))


@case("up 0|1; base frozen; table frozen; head head",
      weights(base=(D, D), up=(D, F), table=(T, D), head=(F, C)), X)  # fmt: skip
def frozen_below(p, x):
    x = x + jax.lax.stop_gradient(p["table"])
    x = jax.lax.stop_gradient(jax.nn.gelu(x @ p["base"]))
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case("both up 0|1; head head", weights(both=(D, D), up=(D, F), head=(F, C)), X)
def stopped_on_one_way_of_two(p, x):
    y = jax.nn.gelu(x @ p["both"])
    return jax.nn.gelu((x + y - jax.lax.stop_gradient(y)) @ p["up"]) @ p["head"]


@case("steps any; up 0|1; head head", {**weights(up=(D, D), head=(D, C)),
      "steps": gains(())}, X, taste=True)  # fmt: skip
def inner_gradient_steps(p, x):
    inner = {k: p[k] for k in ("up", "head")}

    def loss(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["head"]) ** 2)

    slopes = jax.grad(loss)(inner)
    moved = jax.tree.map(lambda w, g: w - p["steps"] * g, inner, slopes)
    return jax.nn.gelu(x @ moved["up"]) @ moved["head"]


@case("up 0|1; out head~vector", weights(up=(D, F), out=(F, 1)), X[:, 0])
def slope_of_an_energy(p, x):
    def energy(x):
        return (jax.nn.softplus(x @ p["up"]) @ p["out"])[0]

    return jax.vmap(jax.value_and_grad(energy))(x)


@case("up down 0|1; out any", weights(up=(18, F), down=(F + 18, F), out=(F, 4)),
      array("points", B, T, 3))  # fmt: skip
def radiance_field(p, points):
    waves = points[..., None] * 2.0 ** jnp.arange(3)
    x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).reshape(B, T, 18)
    y = jax.nn.relu(x @ p["up"])
    y = jax.nn.relu(jnp.concatenate([y, x], -1) @ p["down"]) @ p["out"]
    alpha = 1 - jnp.exp(-jax.nn.softplus(y[..., 3]))
    seen = alpha * jnp.cumprod(1 - alpha + 1e-6, -1)
    return jnp.sum(seen[..., None] * jax.nn.sigmoid(y[..., :3]), 1)


@case("up head any; scale bias vector", {**weights(up=(D, F), head=(F, C), bias=(F,)),
      "scale": gains(F)}, X)  # fmt: skip
def feature_wise_modulation(p, x):
    y = x @ p["up"]
    y = (y - y.mean((0, 1))) / (y.std((0, 1)) + 1e-5)
    return jax.nn.relu(y * p["scale"] + p["bias"]) @ p["head"]


@case("cond 0|1; up 0|1; head head", weights(cond=(4, 2 * D), up=(D, D), head=(D, C)),
      X, array("c", B, 4))  # fmt: skip
def modulation_by_a_condition(p, x, condition):
    scale, shift = jnp.split((condition @ p["cond"])[:, None], 2, -1)
    y = rms(x) * (1 + scale) + shift
    return (x + jax.nn.gelu(y @ p["up"])) @ p["head"]


@case("unused any; up 0|1; head head", weights(unused=(D, D), up=(D, D), head=(D, C)),
      X)  # fmt: skip
def leaf_without_use(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case("up head any", weights(up=(D, F), head=(F, C)), X[:, 0],
      jnp.arange(B) % C)  # fmt: skip
def angular_margins(p, x, labels):
    y = unit(jax.nn.gelu(x @ p["up"])) @ unit(p["head"].T).T
    margin = 0.2 * jax.nn.one_hot(labels, C)
    return optax.softmax_cross_entropy_with_integer_labels(8 * (y - margin), labels)
