"""A gradient of the network inside the loss changes nothing that is read of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, is_numbers
from pieces_of_cases import weights

import muonclip_jax as mc


# Examples, atoms, width inside.
N, T, D, F = 3, 4, 6, 10


def mlp(p, x):
    y = jnp.tanh(x.reshape(-1) @ p["in"] + p["bias"])
    return (jax.nn.silu(y @ p["mid"]) @ p["out"])[0]


def residual(p, x):
    y = x.reshape(-1) @ p["in"]
    for i in "01":
        z = y * jax.lax.rsqrt(jnp.mean(y * y) + 1e-6) * p["gain" + i]
        y = y + jax.nn.gelu(z @ p["up" + i]) @ p["down" + i]
    return (y @ p["out"])[0]


def fields(p, x):
    """Several numbers at each point."""
    return jnp.tanh(jnp.tanh(x.reshape(-1) @ p["in"]) @ p["mid"]) @ p["head"]


def messages(p, x):
    """A graph network of distances with vectors, as PaiNN (arXiv:2102.03150)."""
    apart = x[:, None] - x
    far = jnp.sqrt(jnp.square(apart).sum(-1, keepdims=True) + 1e-3)
    scalars, vectors = p["atom"][jnp.arange(T) % 2], jnp.zeros((T, 3, F))
    filters = jnp.exp(-jnp.square(far - jnp.arange(5.0))) @ p["filter"]
    sent = jax.nn.silu(scalars @ p["phi"]) @ p["three"] * filters
    one, two, three = jnp.split(sent, 3, -1)
    along = (apart / far)[..., None, :3].swapaxes(-1, -2)
    vectors = vectors + (two[..., None, :] * along + three[..., None, :]).sum(1)
    scalars = scalars + one.sum(1) + jnp.square(vectors @ p["u"]).sum(1)
    return (jax.nn.silu(scalars @ p["up"]) @ p["out"]).sum()


def attention(p, x):
    q, k, v = ((x @ p[n]).reshape(T, 2, -1) for n in "qkv")
    seen = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    y = jnp.einsum("hqk,khd->qhd", seen, v).reshape(T, -1) @ p["o"]
    return (jnp.tanh(y @ p["up"]) @ p["out"]).sum()


SHAPES = {
    mlp: {"in": (T * 3, D), "bias": (1, D), "mid": (D, F), "out": (F, 1)},
    residual: {
        **{"in": (T * 3, D), "up0": (D, F), "up1": (D, F), "down0": (F, D)},
        **{"down1": (F, D), "gain0": (1, D), "gain1": (1, D), "out": (D, 1)},
    },
    fields: {"in": (T * 3, D), "mid": (D, F), "head": (F, 2)},
    messages: {
        **{"atom": (2, F), "filter": (5, 3 * F), "phi": (F, D), "three": (D, 3 * F)},
        **{"u": (F, F), "up": (F, D), "out": (D, 1)},
    },
    attention: {
        **{"q": (3, F), "k": (3, F), "v": (3, F), "o": (F, D), "up": (D, F)},
        **{"out": (F, 1)},
    },
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, T, 3)), jnp.float32)


def value(net, p, x):
    return jnp.mean(jnp.square(net(p, x)))


def forces(net, p, x):
    return jnp.mean(jnp.square(jax.grad(lambda x: net(p, x).sum())(x) + x))


def energy_and_forces(net, p, x):
    energy, slope = jax.value_and_grad(lambda x: net(p, x).sum())(x)
    return (energy - 1) ** 2 + jnp.mean(jnp.square(slope + x))


def forces_of_a_jitted_network(net, p, x):
    return forces(jax.jit(net), p, x)


def forces_of_a_network_computed_again(net, p, x):
    return forces(jax.checkpoint(net), p, x)


def hessian(net, p, x):
    return jnp.mean(jnp.square(jax.hessian(lambda x: net(p, x).sum())(x)))


def forward_slopes(net, p, x):
    ones = jnp.eye(x.size).reshape(-1, *x.shape)
    tangents = jax.vmap(lambda v: jax.jvp(lambda x: net(p, x), (x,), (v,))[1])(ones)
    return jnp.mean(jnp.square(tangents))


def residual_of_an_equation(net, p, x):
    def slope(x):
        return jax.grad(lambda x: net(p, x).sum())(x)

    first, second = jax.jvp(slope, (x,), (jnp.ones_like(x),))
    return jnp.mean(jnp.square(net(p, x).sum() * first - 0.1 * second))


def slope_of_a_jitted_slope(net, p, x):
    """JAX drops the value of the inner network."""
    slope = jax.jit(lambda x: jax.grad(lambda x: net(p, x).sum())(x))
    return jnp.mean(jnp.square(jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)))


def noise_by_slopes(net, p, x):
    def step(x, _):
        return x - 0.1 * jax.grad(lambda x: net(p, x).sum())(x), None

    last, _ = jax.lax.scan(step, x, None, length=2)
    return net(p, x).sum() - net(p, jax.lax.stop_gradient(last)).sum()


LOSSES = [
    forces, energy_and_forces, forces_of_a_jitted_network, hessian, forward_slopes,
    forces_of_a_network_computed_again, residual_of_an_equation, noise_by_slopes,
    slope_of_a_jitted_slope,
]  # fmt: skip
PAIRS = {
    f"{net.__name__}-{loss.__name__}": (net, loss)
    for net in SHAPES
    for loss in LOSSES
    # Steps along the slopes move the keys, so the layer is called in two ways.
    if (net, loss) != (attention, noise_by_slopes)
}


def read(loss, net, params):
    """Labels and axes, and of each layer its leaves."""

    def every(p, x):
        return jnp.mean(jax.vmap(lambda x: loss(net, p, x))(x))

    reading = mc.read_model(every, params, X)
    assert not reading.unknown
    assert not reading.refused
    axes = jax.tree.leaves(reading.dimension_numbers, is_leaf=is_numbers)
    layers = [(x.path, x.query, x.key) for x in reading.attention]
    return reading.labels, axes, str(layers)


@pytest.mark.parametrize(
    "name", few(PAIRS, "mlp-forces", "fields-slope_of_a_jitted_slope", "fields-hessian")
)
def test_slopes_change_nothing(name):
    net, loss = PAIRS[name]
    params = weights(**SHAPES[net])
    assert read(loss, net, params) == read(value, net, params)


def test_the_network_without_slopes_is_read_as_an_expert_would():
    labels, axes, _ = read(value, residual, weights(**SHAPES[residual]))
    right = {"out": "vector", "gain0": "vector", "gain1": "vector"}
    assert labels == {n: right.get(n, "matrix") for n in SHAPES[residual]}
    assert {tuple(x) for x in axes if x} == {(0, 1)}
    assert read(value, fields, weights(**SHAPES[fields]))[0]["head"] == "head"


@pytest.mark.more
def test_logits_of_a_network_of_which_only_forces_are_used():
    params = weights(**SHAPES[attention])

    def loss(p, x):
        return jnp.mean(jax.vmap(lambda x: forces(attention, p, x))(x))

    out, stats = mc.record_attention(loss)(params, X)
    q, k = ((X @ params[n]).reshape(N, T, 2, -1) for n in "qk")
    right = np.einsum("nqhd,nkhd->hnqk", q, k).reshape(2, -1).max(-1)
    assert abs(right[0] - right[1]) > 0.1
    np.testing.assert_allclose(jax.tree.leaves(stats)[0], right, rtol=1e-5)
    np.testing.assert_allclose(out, loss(params, X), rtol=1e-5)


def test_a_backward_pass_written_by_hand():
    @jax.custom_vjp
    def dense(x, w):
        return x @ w

    dense.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (g @ kept[1].T, jnp.outer(kept[0], g)),
    )

    def net(p, x):
        y = jnp.tanh(dense(x.reshape(-1), p["in"]))
        return dense(jnp.tanh(dense(y, p["mid"])), p["head"])

    params = weights(**SHAPES[fields])
    assert read(forces, net, params) == read(value, fields, params)


def test_an_inner_step_of_training():
    """Labels are those of the network, and a refusal says what moves its logits."""
    params = weights(**SHAPES[attention])

    def loss(p, x):
        def inner(p):
            return jnp.mean(jax.vmap(lambda x: value(attention, p, x))(x[:2]))

        moved = jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(inner)(p))
        return jnp.mean(jax.vmap(lambda x: value(attention, moved, x))(x[2:]))

    reading = mc.read_model(loss, params, X)
    assert reading.labels == read(value, attention, params)[0]
    assert [x.query[0].path for x in reading.attention] == ["q"]
    (refused,) = reading.refused
    assert "a gradient, as in an inner step of training, is added to" in refused


def test_updates_of_tokens_by_the_slope_of_an_energy_are_attention():
    """The energy transformer (arXiv:2302.07253) has its softmax in the slope alone."""
    params = weights(inner=(3, D), q=(D, F), k=(D, F), head=(D, 5))

    def energy(p, x):
        q, k = ((x @ p[n]).reshape(T, 2, -1) for n in "qk")
        return -jax.nn.logsumexp(jnp.einsum("qhd,khd->hqk", q, k), axis=-1).sum()

    def loss(p, x):
        x = jnp.tanh(x @ p["inner"])
        x = x - 0.1 * jax.vmap(jax.grad(energy, 1), (None, 0))(p, x)
        return jnp.mean(jnp.square(jnp.tanh(x) @ p["head"]))

    reading = mc.read_model(loss, params, X)
    (layer,) = reading.attention
    assert [x.path for x in (*layer.query, *layer.key)] == ["q", "k"]
    assert reading.labels == {
        "inner": "matrix", "q": "matrix", "k": "matrix", "head": "head"
    }  # fmt: skip
