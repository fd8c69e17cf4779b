"""Convolutions, and whole systems: adversaries, teachers, codes, fields."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pieces_of_cases import (
    array,
    B,
    C,
    case,
    D,
    F,
    gains,
    rms,
    T,
    unit,
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
    "a b 012|3; head head", weights(a=(3, 3, 4, 8), b=(3, 3, 8, 8), head=(8, C)), IMAGE
)
def convolutions(p, x):
    y = jax.nn.relu(conv(jax.nn.relu(conv(x, p["a"])), p["b"], 2))
    return y.mean((1, 2)) @ p["head"]


@case(
    "window vector; point 012|3~2|3; head head",
    weights(window=(3, 3, 1, 4), point=(1, 1, 4, 8), head=(8, C)),
    IMAGE,
)
def depthwise_then_pointwise(p, x):
    y = conv(x, p["window"], feature_group_count=4)
    return jax.nn.relu(conv(y, p["point"])).mean((1, 2)) @ p["head"]


@case("w any; head head", weights(w=(3, 3, 2, 8), head=(8, C)), IMAGE)
def grouped_convolution(p, x):
    return jax.nn.relu(conv(x, p["w"], feature_group_count=2)).mean((1, 2)) @ p["head"]


@case("w 012|3; head head", weights(w=(3, 3, 4, 8), head=(8, C)), IMAGE)
def dilated_convolution(p, x):
    return jax.nn.relu(conv(x, p["w"], rhs_dilation=(2, 2))).mean((1, 2)) @ p["head"]


@case(
    "down 012|3; up 012|3~013|2; out any",
    weights(down=(3, 3, 4, 8), up=(2, 2, 8, 4), out=(1, 1, 8, 3)),
    IMAGE,
)
def u_net(p, x):
    y = jax.nn.relu(conv(x, p["down"], 2))
    y = jax.lax.conv_transpose(y, p["up"], (2, 2), "SAME")
    return conv(jnp.concatenate([x, jax.nn.relu(y)], -1), p["out"])


@case("a b any; head head", weights(a=(3, D, D), b=(D, D), head=(D, C)), X, taste=True)
def convolution_as_a_sum_of_shifts(p, x):
    y = sum(jnp.roll(x, i - 1, 1) @ p["a"][i] for i in range(3))
    return jax.nn.gelu(y) @ p["b"] @ p["head"]


@case(
    "patch 0|1~012|3; place vector~embedding; up 0|1; head head",
    weights(patch=(36, D), place=(4, D), up=(D, D), head=(D, C)),
    IMAGE,
)
def patches(p, x):
    x = x.reshape(B, 2, 3, 2, 3, 4).swapaxes(2, 3).reshape(B, 4, 36)
    x = x @ p["patch"] + p["place"]
    return jax.nn.gelu(x.mean(1) @ p["up"]) @ p["head"]


# Whole systems.


@case(
    "g/up 0|1; g/out any; d/up 0|1; d/out any",
    {"g": weights(up=(4, F), out=(F, D)), "d": weights(up=(D, F), out=(F, 1))},
    array("noise", B, 4),
    X[:, 0],
)
def adversarial_pair(p, noise, real):
    def judge(x):
        return (jax.nn.relu(x @ p["d"]["up"]) @ p["d"]["out"])[:, 0]

    fake = jnp.tanh(jax.nn.relu(noise @ p["g"]["up"]) @ p["g"]["out"])
    return jax.nn.softplus(judge(fake)) + jax.nn.softplus(-judge(real))


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


@case(
    "up down 0|1; codebook any; out head",
    weights(up=(D, 4), codebook=(9, 4), down=(4, F), out=(F, D)),
    X,
)
def codes_straight_through(p, x):
    z = x @ p["up"]
    far = jnp.sum((z[..., None, :] - p["codebook"]) ** 2, -1)
    code = p["codebook"][jnp.argmin(far, -1)]
    commit = jnp.mean((z - jax.lax.stop_gradient(code)) ** 2)
    pull = jnp.mean((jax.lax.stop_gradient(z) - code) ** 2)
    y = z + jax.lax.stop_gradient(code - z)
    out = jax.nn.relu(y @ p["down"]) @ p["out"]
    return jnp.mean((out - x) ** 2) + commit + pull


@case(
    "up out 0|1; codebook frozen; head head",
    weights(up=(D, 4), codebook=(9, 4), out=(4, F), head=(F, C)),
    X,
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
    X,
)
def teacher_among_the_params(p, x):
    a, b = (jax.nn.gelu(x @ p[n]["up"]) @ p[n]["out"] for n in ("student", "teacher"))
    b = jax.nn.softmax(jax.lax.stop_gradient(b))
    return -jnp.sum(b * jax.nn.log_softmax(a))


@case(
    "up 0|1; base frozen; table frozen; head head",
    weights(base=(D, D), up=(D, F), table=(T, D), head=(F, C)),
    X,
)
def frozen_below(p, x):
    x = x + jax.lax.stop_gradient(p["table"])
    x = jax.lax.stop_gradient(jax.nn.gelu(x @ p["base"]))
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case("both up 0|1; head head", weights(both=(D, D), up=(D, F), head=(F, C)), X)
def stopped_on_one_way_of_two(p, x):
    y = jax.nn.gelu(x @ p["both"])
    return jax.nn.gelu((x + y - jax.lax.stop_gradient(y)) @ p["up"]) @ p["head"]


@case(
    "steps any; up 0|1; head head",
    {**weights(up=(D, D), head=(D, C)), "steps": gains(())},
    X,
    taste=True,
)
def inner_gradient_steps(p, x):
    inner = {k: p[k] for k in ("up", "head")}

    def loss(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["head"]) ** 2)

    slopes = jax.grad(loss)(inner)
    moved = jax.tree.map(lambda w, g: w - p["steps"] * g, inner, slopes)
    return jax.nn.gelu(x @ moved["up"]) @ moved["head"]


@case("up 0|1~1|0~head; out head~vector", weights(up=(D, F), out=(F, 1)), X[:, 0])
def slope_of_an_energy(p, x):
    def energy(x):
        return (jax.nn.softplus(x @ p["up"]) @ p["out"])[0]

    return jax.vmap(jax.value_and_grad(energy))(x)


@case(
    "up down 0|1; out any",
    weights(up=(18, F), down=(F + 18, F), out=(F, 4)),
    array("points", B, T, 3),
)
def radiance_field(p, points):
    waves = points[..., None] * 2.0 ** jnp.arange(3)
    x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).reshape(B, T, 18)
    y = jax.nn.relu(x @ p["up"])
    y = jax.nn.relu(jnp.concatenate([y, x], -1) @ p["down"]) @ p["out"]
    alpha = 1 - jnp.exp(-jax.nn.softplus(y[..., 3]))
    seen = alpha * jnp.cumprod(1 - alpha + 1e-6, -1)
    return jnp.sum(seen[..., None] * jax.nn.sigmoid(y[..., :3]), 1)


@case(
    "up head any; scale bias vector",
    {**weights(up=(D, F), head=(F, C), bias=(F,)), "scale": gains(F)},
    X,
)
def feature_wise_modulation(p, x):
    y = x @ p["up"]
    y = (y - y.mean((0, 1))) / (y.std((0, 1)) + 1e-5)
    return jax.nn.relu(y * p["scale"] + p["bias"]) @ p["head"]


@case(
    "cond 0|1; up 0|1; head head",
    weights(cond=(4, 2 * D), up=(D, D), head=(D, C)),
    X,
    array("c", B, 4),
)
def modulation_by_a_condition(p, x, condition):
    scale, shift = jnp.split((condition @ p["cond"])[:, None], 2, -1)
    y = rms(x) * (1 + scale) + shift
    return (x + jax.nn.gelu(y @ p["up"])) @ p["head"]


@case(
    "unused any; up 0|1; head head", weights(unused=(D, D), up=(D, D), head=(D, C)), X
)
def leaf_without_use(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["head"]


@case(
    "up head any",
    weights(up=(D, F), head=(F, C)),
    X[:, 0],
    np.arange(B, dtype=np.int32) % C,
)
def angular_margins(p, x, labels):
    y = unit(jax.nn.gelu(x @ p["up"])) @ unit(p["head"].T).T
    margin = 0.2 * jax.nn.one_hot(labels, C)
    return optax.softmax_cross_entropy_with_integer_labels(8 * (y - margin), labels)


@case("up 0|1~1|0~head; inner 0|1", weights(up=(D, F), inner=(F, F)), X)
def decoder_tied_to_its_encoder(p, x):
    y = jax.nn.gelu(jax.nn.gelu(x @ p["up"]) @ p["inner"])
    return y @ p["up"].T
