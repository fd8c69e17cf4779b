"""Convolutions, and whole systems: adversaries, teachers, codes, fields."""

import jax
import jax.numpy as jnp
from pieces_of_cases import array, B, C, case, D, F, gains, T, weights, X


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


@case("w any; head head", weights(w=(3, 3, 2, 8), head=(8, C)), IMAGE)
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


@case("up 0|1; out vector", weights(up=(D, F), out=(F, 1)), X[:, 0])
def slope_of_an_energy(p, x):
    def energy(x):
        return (jax.nn.softplus(x @ p["up"]) @ p["out"])[0]

    return jax.vmap(jax.value_and_grad(energy))(x)


@case("up 0|1~1|0~head; inner 0|1", weights(up=(D, F), inner=(F, F)), X)
def decoder_tied_to_its_encoder(p, x):
    y = jax.nn.gelu(jax.nn.gelu(x @ p["up"]) @ p["inner"])
    return y @ p["up"].T
