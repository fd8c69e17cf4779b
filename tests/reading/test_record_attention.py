"""The largest logits next to a function's result, in which nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import few, more, naive_logits, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_read_attention import PARAMS, WAYS
from variants import B, CASES, cut, D, DIM, H, normed, T

import muonclip_jax as mc


X = normal(9, B, T, D)


def _assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _leaf(stats):
    (leaf,) = jax.tree.leaves(stats)
    return np.asarray(leaf)


def _expected(p, x, mask=None, bias=None):
    """In float64, over batch, queries and keys."""
    query, key = (np.asarray(cut(x @ p[name])) for name in "qk")
    return naive_logits(query * DIM**0.5, key, mask, bias).max((0, 2, 3))


@pytest.mark.parametrize("name", few(list(CASES), "latent", "fused", "grouped"))
def test_statistics_are_the_largest_logits_written_out(name):
    case = CASES[name]
    params = case.params()
    loss, stats = jax.jit(mc.record_attention(case.loss))(params, X)
    np.testing.assert_allclose(_leaf(stats), case.largest(params, X), rtol=1e-5)
    np.testing.assert_allclose(loss, case.loss(params, X), rtol=1e-5)
    (layer,) = mc.read_model(case.loss, params, X).attention
    mc.clip_qk(params, stats, 1.0, attention=[layer])  # it finds them where it looks


def _of_the_masked(p, x):
    slopes = 2.0 ** -np.arange(1, H + 1)
    distance = np.arange(T)[:, None] - np.arange(T)
    bias = -slopes[:, None, None] * distance
    mask = np.tril(np.ones((T, T), bool))
    return _expected({**p, "q": p["q"] / DIM**0.5}, x, mask, bias)


def _of_the_second(p, x):
    logits = np.einsum("bqhd,bkhd->bhqk", cut(x @ p["q"]), cut(x @ p["k"]))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = np.einsum("bhqk,bkd->bqhd", weights, x @ p["v"]).mean(2)
    return np.maximum(_expected(p, np.asarray(X)), _expected(p, x))


EXPECTED = {
    "of data": _expected,
    "with statistics of its own": _expected,
    "heads folded into the batch": _expected,
    "the batch folded into heads": _expected,
    "softcapped": _expected,  # before the cap
    "masked": _of_the_masked,
    "mapped": _expected,
    "in a branch": _expected,
    "by exponentials": lambda p, x: _expected(p, x) / 100,
    "called twice": _of_the_second,
    "in two blocks": lambda p, x: _expected(p, x, (np.arange(T) < 4)[None, None, None]),
    "stock": lambda p, x: _expected(
        {**p, "q": p["q"] / DIM**0.5}, x, np.tril(np.ones((T, T), bool))
    ),
}


@pytest.mark.parametrize(
    "way",
    few(
        list(WAYS),
        "heads folded into the batch",
        "softcapped",
        "in two blocks",
        "in a branch",
    ),
)
def test_nothing_changes_however_attention_is_computed(way):
    def loss(p, x):
        return jnp.sum(WAYS[way](p, x) ** 2)

    recorded = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
    with jax.disable_jit():  # operation by operation
        (value, stats), grads = recorded(PARAMS, X)
        plain = jax.value_and_grad(loss)(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), EXPECTED[way](PARAMS, X), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), plain)


def _loss(p, x):
    return jnp.sum(WAYS["stock"](p, x) ** 2)


def _jitted(p, x):
    return jax.jit(_loss)(p, x)


def _remat(p, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(_loss, policy=policy)(p, x)


def _custom_jvp(p, x):
    f = jax.custom_jvp(_loss)
    f.defjvp(lambda x, t: (_loss(*x), 3 * jax.jvp(_loss, x, t)[1]))
    return f(p, x)


def _custom_vjp(p, x):
    f = jax.custom_vjp(_loss)

    def backward(inputs, cotangent):
        return jax.tree.map(
            lambda g: 3 * cotangent * g, jax.grad(_loss, (0, 1))(*inputs)
        )

    f.defvjp(lambda p, x: (_loss(p, x), (p, x)), backward)
    return f(p, x)


@pytest.mark.parametrize(
    "call", few([_jitted, _remat, _custom_jvp, _custom_vjp], _remat)
)
def test_inside_calls_whose_rules_stay(call):
    recorded = jax.value_and_grad(mc.record_attention(call), has_aux=True)
    (_, stats), grads = jax.jit(recorded)(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), EXPECTED["stock"](PARAMS, X), rtol=1e-5)
    plain = jax.grad(call)(PARAMS, X)
    jax.tree.map(_assert_close, grads, plain)


def test_remat_stays():
    text = str(jax.make_jaxpr(mc.record_attention(_remat))(PARAMS, X))
    # JAX 0.10 writes the policy as the name of a class.
    policy = text.lower().replace("_", "")
    assert text.count("policy=") == 1 and "dotssaveable" in policy


def test_a_loop_of_unknown_length():
    def fun(p, x):
        def step(x):
            return normed(x + WAYS["masked"](p, x).mean(2)) - 9

        return jax.lax.while_loop(lambda x: x.max() > 0, step, x)

    _, stats = mc.record_attention(fun)(PARAMS, X)  # one trip
    np.testing.assert_allclose(_leaf(stats), EXPECTED["masked"](PARAMS, X), rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, more(True)])
def test_a_row_for_every_layer_of_a_scan(reverse):
    params = {n: jnp.stack([PARAMS[n], PARAMS[n] / 2]) for n in PARAMS}

    def layer(x, p):
        return normed(x + WAYS["stock"](p, x).mean((2, 3), keepdims=True)[..., 0]), None

    def loss(params, x):
        return jax.lax.scan(jax.checkpoint(layer), x, params, reverse=reverse)[0].sum()

    value, stats = jax.jit(mc.record_attention(loss))(params, X)
    assert value == pytest.approx(float(loss(params, X)), rel=1e-5)
    x, rows = X, [None, None]
    for i in [1, 0] if reverse else [0, 1]:
        p = {n: params[n][i] for n in params}
        rows[i] = EXPECTED["stock"](p, np.asarray(x))
        x, _ = layer(x, p)
    np.testing.assert_allclose(_leaf(stats), rows, rtol=1e-4)


def test_a_sink_is_no_logit_of_query_and_key():
    def fun(p, x):
        query, key = cut(x @ p["q"]), cut(x @ p["k"])
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        sink = jnp.broadcast_to(p["sink"][:, None, None], (B, H, T, 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], -1))[..., :-1]
        return jnp.einsum("bhqk,bkd->bqhd", weights, x @ p["v"])

    params = {**PARAMS, "sink": jnp.full(H, 1e4)}
    _, stats = mc.record_attention(fun)(params, X)
    np.testing.assert_allclose(_leaf(stats), _expected(PARAMS, X), rtol=1e-5)


def test_mapped_from_outside():
    each = jax.vmap(mc.record_attention(_loss), in_axes=(None, 0))
    _, stats = each(PARAMS, jnp.stack([X, 2 * X]))
    one = EXPECTED["stock"](PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), [one, 4 * one], rtol=1e-5)


def test_auxiliary_results_and_arguments_that_are_no_arrays():
    def loss(p, x, name, *, scale):
        return _loss(p, x) * scale, {"name": name, "mean": x.mean()}

    out = mc.record_attention(loss, has_aux=True)(PARAMS, X, "this", scale=2)
    value, (aux, stats) = out
    assert value == pytest.approx(2 * float(_loss(PARAMS, X)), rel=1e-5)
    assert set(aux) == {"name", "mean"} and set(stats) == {"max_logits"}


def test_modules_of_nnx_keep_the_state_that_the_function_changes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.attention(self.norm(x))

    def loss(net, x):
        return jnp.sum(net(x) ** 2)

    x = normal(3, 2, 5, 8)
    nets = [Net(nnx.Rngs(0)) for _ in range(2)]
    value, grads = nnx.value_and_grad(loss)(nets[0], x)
    step = nnx.jit(nnx.value_and_grad(mc.record_attention(loss), has_aux=True))
    (recorded, stats), new_grads = step(nets[1], x)
    assert stats["attention"]["max_logits"].shape == (2,)
    jax.tree.map(_assert_close, (value, grads), (recorded, new_grads))
    jax.tree.map(_assert_close, *(nnx.state(net) for net in nets))
    assert nets[1].norm.mean[...].any()


def test_a_cap_that_is_no_number_is_an_error_with_its_line():
    def loss(p, x):
        logits = jnp.einsum("bqhd,bkhd->bhqk", cut(x @ p["q"]), cut(x @ p["k"]))
        weights = jax.nn.softmax(p["cap"] * jnp.tanh(logits / p["cap"]))
        return jnp.einsum("bhqk,bkd->bqhd", weights, x @ p["v"]).sum()

    with pytest.raises(
        ValueError, match=r"test_record_attention.py:\d+ are softcapped"
    ):
        mc.record_attention(loss)({**PARAMS, "cap": jnp.asarray(5.0)}, X)


@pytest.mark.parametrize("heads", [more(None), "model"])
def test_inside_shard_map_over_batches_and_heads(heads):
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
    x = normal(4, 4, T, D)
    kernels = {"q": P(None, heads), "k": P(None, heads), "v": P()}

    def on_device(p, x):
        query, key = ((x @ p[n]).reshape(2, T, -1, DIM) for n in "qk")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        out = jnp.einsum("bhqk,bkd->bqd", weights, x @ p["v"])
        return jax.lax.psum(out, "model") if heads else out

    def loss(p, x):
        body = jax.shard_map(
            on_device, mesh=mesh, in_specs=(kernels, P("data")), out_specs=P("data")
        )
        return jnp.sum(body(p, x) ** 2)

    (layer,) = mc.read_model(loss, PARAMS, x).attention
    recorded = jax.jit(jax.value_and_grad(mc.record_attention(loss), has_aux=True))
    (value, stats), grads = recorded(PARAMS, x)
    query, key = (np.asarray((x @ PARAMS[n]).reshape(4, T, H, DIM)) for n in "qk")
    largest = naive_logits(query * DIM**0.5, key).max((0, 2, 3))
    np.testing.assert_allclose(_leaf(stats), largest, rtol=1e-5)
    plain = jax.jit(jax.value_and_grad(loss))(PARAMS, x)
    jax.tree.map(_assert_close, (value, grads), plain)
    clipped = mc.clip_qk(PARAMS, stats, 20.0, attention=[layer])
    after = _leaf(recorded(clipped, x)[0][1])
    np.testing.assert_allclose(after, np.minimum(largest, 20), rtol=1e-4)


def _groups_in_one_kernel(p, x):
    """Falcon's: in each group two queries, a key and a value follow one another."""
    parts = (x @ p["qkv"]).reshape(B, T, 2, 4, DIM)
    query = parts[:, :, :, :2].reshape(B, T, H, DIM)
    key = jnp.repeat(parts[:, :, :, 2], 2, axis=2)
    return jnp.einsum("bqhd,bkhd->bhqk", query, key)


def _relative_positions(p, x):
    """Transformer-XL's: a second product, whose rows are shifted by a reshape."""
    query, key = cut(x @ p["q"]), cut(x @ p["k"])
    angles = jnp.arange(2 * T - 1)[:, None] * jnp.arange(1, D + 1)
    position = (jnp.sin(angles) @ p["r"]).reshape(-1, H, DIM)
    content = jnp.einsum("bqhd,bkhd->bhqk", query + p["u"], key)
    shifted = jnp.einsum("bqhd,rhd->bhqr", query + p["w"], position)
    shifted = jnp.pad(shifted, ((0, 0),) * 3 + ((1, 0),)).reshape(B, H, 2 * T, T)
    return content + shifted[:, :, 1:].reshape(B, H, T, 2 * T - 1)[..., :T]


def _two_products(p, x):
    """Latent attention whose rotary part has a product of its own."""
    query, low = cut(x @ p["q"]), x @ p["low"]
    key = cut(normed(low[..., :5]) @ p["up"])
    own = jnp.einsum("bqhd,bkhd->bhqk", query[..., :4], key)
    shared = jnp.einsum("bqhd,bkd->bhqk", query[..., 4:], low[..., 5:])
    return own + shared


def _learned_queries(p, x):
    tokens = jnp.broadcast_to(p["tokens"], (B, 3, D))
    return jnp.einsum("bqhd,bkhd->bhqk", cut(tokens @ p["q"]), cut(x @ p["k"]))


KINDS = {
    _groups_in_one_kernel: {"qkv": (D, 8 * DIM)},
    _relative_positions: {n: (D, H * DIM) for n in "qkr"} | {n: (H, DIM) for n in "uw"},
    _two_products: {"q": (D, H * 6), "low": (D, 7), "up": (5, H * 4)},
    _learned_queries: {"tokens": (3, D), "q": (D, H * DIM), "k": (D, H * DIM)},
}


@pytest.mark.parametrize("logits", KINDS)
def test_reading_and_recording_alone_cap_every_head(logits):
    shapes = {**KINDS[logits], "v": (D, D)}
    params = {k: normal(i, *s, scale=0.7) for i, (k, s) in enumerate(shapes.items())}

    def loss(p, x):
        weights = jax.nn.softmax(logits(p, x))
        return jnp.sum(jnp.einsum("bhqk,bkd->bqhd", weights, x @ p["v"]) ** 2)

    layers = mc.read_model(loss, params, X).attention
    _, stats = mc.record_attention(loss)(params, X)
    before = np.asarray(logits(params, X).max((0, 2, 3)))
    np.testing.assert_allclose(_leaf(stats), before, rtol=1e-5)
    threshold = float(np.sort(before)[1])
    clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, attention=layers)
    after = np.asarray(logits(clipped, X).max((0, 2, 3)))
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-4)
