"""Symbolic dimensions of `jax.export`: one reading and one program for all sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import few, normal
from jax import export
from library_models import MODELS

import muonclip_jax as mc


D, H, K = 8, 2, 4
PARAMS = {name: normal(i, D, H, K) for i, name in enumerate("qkv")} | {
    "sink": normal(3, H)
}


def symbolic(written: str, dtype=jnp.float32, *constraints: str):
    shape = export.symbolic_shape(written, constraints=constraints)
    return jax.ShapeDtypeStruct(shape, dtype)


def heads(p, x, order="bhtk"):
    return (jnp.einsum(f"btd,dhk->{order}", x, p[name]) for name in "qkv")


# All of these have the same logits of query and key.


def _plain(p, x):
    q, k, v = heads(p, x, "bthk")
    return jnp.sum(jax.nn.dot_product_attention(q, k, v, scale=1.0) ** 2)


def _with_sinks(p, x, before=0, after=1):
    q, k, v = heads(p, x)
    logits = q @ k.mT
    sink = jnp.broadcast_to(p["sink"][:, None, None], (*logits.shape[:-1], 1))
    parts = [sink] * before + [logits] + [sink] * after
    weights = jax.nn.softmax(jnp.concatenate(parts, -1))
    return jnp.sum(weights[..., before : before + logits.shape[-1]] @ v)


def _heads_with_batch(p, x, order="bhtk"):
    """Batch and heads are one axis, whichever is the outer one."""
    q, k, v = (y.reshape(-1, *y.shape[2:]) for y in heads(p, x, order))
    return jnp.sum((jax.nn.softmax(q @ k.mT) @ v) ** 2)


def _two_kinds_of_keys(p, x):
    """A softmax over all keys and over every second one again."""
    q, k, v = heads(p, x)
    logits = jnp.concatenate([q @ k.mT, q @ k[:, :, ::2].mT], -1)
    return jnp.sum(jax.nn.softmax(logits) @ jnp.concatenate([v, v[:, :, ::2]], 2))


def _one_by_one(p, x):
    def step(total, row):
        return total + _plain(p, row[None]), None

    return jax.lax.scan(step, 0.0, x)[0]


def _fused(p, x):
    """Query, key and value are slices of one product."""
    kernel = jnp.concatenate([p[name].reshape(D, H * K) for name in "qkv"], 1)
    y, n = x @ kernel, H * K
    parts = y[..., :n], y[..., n : 2 * n], y[..., 2 * n :]
    q, k, v = (z.reshape(*z.shape[:2], H, K).swapaxes(1, 2) for z in parts)
    return jnp.sum((jax.nn.softmax(q @ k.mT) @ v) ** 2)


def _of_all_tokens(p, x):
    """Batch and length are one axis in the products with kernels."""
    tokens = x.reshape(-1, D)
    shape = (*x.shape[:2], H, K)
    parts = ((tokens @ p[name].reshape(D, -1)).reshape(shape) for name in "qkv")
    return jnp.sum(jax.nn.dot_product_attention(*parts, scale=1.0) ** 2)


FORMS = {
    "plain": _plain,
    "sinks last": _with_sinks,
    "sinks first": functools.partial(_with_sinks, before=1, after=0),
    "sinks around": functools.partial(_with_sinks, before=1),
    "heads within batch": _heads_with_batch,
    "batch within heads": functools.partial(_heads_with_batch, order="hbtk"),
    "two kinds of keys": _two_kinds_of_keys,
    "one by one": _one_by_one,
    "in vmap": lambda p, x: jax.vmap(lambda row: _plain(p, row[None]))(x).sum(),
    "checkpointed": jax.checkpoint(_plain),
    "fused": _fused,
    "of all tokens": _of_all_tokens,
}


def naive(p, x):
    """The largest logit of every head, in float64."""
    q, k = (np.einsum("btd,dhk->bhtk", *map(np.float64, (x, p[n]))) for n in "qk")
    return (q @ k.swapaxes(-1, -2)).max((0, 2, 3))


@pytest.mark.parametrize("form", few(FORMS, "sinks around", "batch within heads"))
def test_statistics_are_those_of_every_size(form):
    def recorded(p, x):
        return mc.record_attention(FORMS[form])(p, x)[1]["max_logits"]

    program = export.export(jax.jit(recorded))(PARAMS, symbolic("b, t, 8"))
    for i, (batch, length) in enumerate([(2, 3), (11, 4)]):
        # Later rows and positions have larger entries, so none may be left out.
        grown = 1 + jnp.arange(batch * length).reshape(batch, length, 1)
        x = normal(i, batch, length, D) * grown
        # Float32 sums D products for the query and for the key, then K of both.
        sides = (np.einsum("btd,dhk->bthk", abs(x), abs(PARAMS[n])) for n in "qk")
        most = K * np.prod([side.max() for side in sides])
        want, error = naive(PARAMS, x), (2 * D + K) * 2.0**-24 * most
        np.testing.assert_allclose(program.call(PARAMS, x), want, atol=error, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_reading_is_that_of_integers(form):
    x = jax.ShapeDtypeStruct((13, 7, D), jnp.float32)
    want = mc.read_model(FORMS[form], PARAMS, x)
    found = mc.read_model(FORMS[form], PARAMS, symbolic("b, t, 8"))
    assert str(found) == str(want)
    assert found.labels == want.labels


# Models that are written for one size of batch here.
OF_ONE_BATCH = {"clip", "deepseek", "diffusion", "falcon", "graph"}
OF_ONE_BATCH |= {"haiku_recurrent", "levanter"}


@pytest.mark.more
@pytest.mark.parametrize("name", sorted(MODELS.keys() - OF_ONE_BATCH))
def test_models_of_libraries_are_read_the_same(name):
    model = MODELS[name]
    (batch,) = export.symbolic_shape("b")

    def with_batch(x):
        is_array = hasattr(x, "shape")
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) if is_array else x

    inputs = jax.tree.map(with_batch, model.args)
    want = mc.read_model(model.fun, model.params, *model.args)
    assert str(mc.read_model(model.fun, model.params, *inputs)) == str(want)


# Constraints, from one symbol to several. A stride of 16 needs as many positions.


def _strided(p, x):
    n = x.shape[1] // 16
    return _plain(p, x.reshape(x.shape[0], n, 16, D).mean(2))


@pytest.mark.parametrize(
    ("fun", "shape", "constraints"),
    [
        (_plain, "b, t, 8", ("t <= 2",)),
        (_plain, "b, t, 8", ("b == 1",)),
        (_plain, "b, t, 8", ("t >= 500", "mod(b, 36) == 0")),
        (_plain, "b, 2*t + 1, 8", ("t <= b",)),
        (_plain, "b*c, d, 8", ("b*c == d",)),
        (_strided, "b, t, 8", ("mod(t, 16) == 0", "t >= 16")),
        (_strided, "b, 16*t, 8", ()),
    ],
)
def test_constraints(fun, shape, constraints):
    want = mc.read_model(fun, PARAMS, jax.ShapeDtypeStruct((5, 80, D), jnp.float32))
    x = symbolic(shape, jnp.float32, *constraints)
    assert str(mc.read_model(fun, PARAMS, x)) == str(want)
    _, stats = jax.eval_shape(mc.record_attention(fun), PARAMS, x)
    assert stats["max_logits"].shape == (H,)


@pytest.mark.more
def test_a_closed_over_batch():
    """As when a train step takes the gradient by the params alone."""

    @jax.jit
    def step(p, x):
        return jax.grad(mc.record_attention(lambda p: _plain(p, x)), has_aux=True)(p)

    x = normal(5, 3, 6, D)
    program = export.export(step)(PARAMS, symbolic("b, 6, 8"))
    (grads, stats), want = program.call(PARAMS, x), jax.grad(_plain)(PARAMS, x)
    np.testing.assert_array_equal(stats["max_logits"].shape, (H,))
    # The same operations on the same numbers; XLA may fuse them differently.
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.more
def test_modules():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(11, D, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)

        def __call__(self, tokens):
            return self.attention(self.embed(tokens)).sum()

    model = Model()
    recorded = mc.record_attention(lambda model, tokens: model(tokens))
    want = jax.eval_shape(recorded, model, jnp.zeros((2, 3), int))
    found = jax.eval_shape(recorded, model, symbolic("b, t", jnp.int32))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, found, want))


@pytest.mark.more
def test_on_a_mesh():
    """Devices have a half of the batch each, whose size is an expression."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    spec = jax.sharding.PartitionSpec

    def fun(p, x):
        mapped = jax.shard_map(
            lambda x: jax.lax.psum(_heads_with_batch(p, x, "hbtk"), "data"),
            mesh=mesh,
            in_specs=spec("data"),
            out_specs=spec(),
        )
        return mapped(x)

    x = symbolic("b, t, 8", jnp.float32, "mod(b, 2) == 0")
    integers = jax.ShapeDtypeStruct((6, 5, D), jnp.float32)
    want = str(mc.read_model(fun, PARAMS, integers))
    assert str(mc.read_model(fun, PARAMS, x)) == want
    # JAX 0.10 exports this, without `record_attention` too, into a program whose call
    # ends the process, so here it is not called.
    program = export.export(jax.jit(mc.record_attention(fun)))(PARAMS, x)
    assert [x.shape for x in program.out_avals] == [(), (H,)]


# What cannot be.


def test_symbolic_params():
    params = PARAMS | {"q": symbolic("n, 2, 4")}
    with pytest.raises(ValueError, match="q has the symbolic dimension n"):
        mc.read_model(_plain, params, symbolic("b, t, n"))


def test_a_loss_for_one_size():
    """JAX 0.10 exports this reshape, and the program fails; JAX 0.8 says it first."""

    def fun(p, x):
        return _plain(p, x.reshape(3, 7, D))

    with pytest.raises((ValueError, TypeError), match=r"\(b, 7, 8\)"):
        mc.read_model(fun, PARAMS, symbolic("b, 7, 8"))


def test_a_factor_that_only_a_run_shows():
    """The statistic would need it: the maximum is subtracted before."""

    def fun(p, x):
        q, k, v = heads(p, x)
        logits = q @ k.mT
        shifted = logits - logits.max(-1, keepdims=True)
        weights = jnp.exp(shifted / jnp.sqrt(x.shape[1]))
        return jnp.sum(weights / weights.sum(-1, keepdims=True) @ v)

    x = symbolic("b, t, 8")
    assert mc.read_model(fun, PARAMS, x).attention
    with pytest.raises(ValueError, match="for every size of b, t: .* their factor"):
        jax.eval_shape(mc.record_attention(fun), PARAMS, x)


def test_constraints_that_no_size_satisfies():
    x = symbolic("b, t, 8", jnp.float32, "mod(t, 7) == 3", "mod(t, 14) == 2")
    with pytest.raises(ValueError, match=r"no sizes of b, t .* mod\(t, 7\) == 3"):
        mc.read_model(_plain, PARAMS, x)


# A whole train step.


def _loss(p, tokens):
    x = p["embed"][tokens[:, :-1]]
    q, k, v = heads(p, x, "bthk")
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x += out.reshape(x.shape) @ p["out"]
    labels = tokens[:, 1:]
    logits = x @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.more
def test_train_step_for_three_platforms():
    params = {n: PARAMS[n] for n in "qkv"}
    params |= {"embed": normal(6, 11, D), "out": normal(7, D, D)}
    tokens = symbolic("b, 6", jnp.int32)
    reading = mc.read_model(_loss, params, tokens)
    optimizer = mc.muonclip(0.1, model=reading, threshold=1e-3)

    @jax.jit
    def step(params, state, tokens):
        recorded = jax.value_and_grad(mc.record_attention(_loss), has_aux=True)
        (loss, stats), grads = recorded(params, tokens)
        updates, state = optimizer.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state, loss, stats

    state = optimizer.init(params)
    platforms = "cpu", "tpu", "cuda"
    program = export.export(step, platforms=platforms)(params, state, tokens)
    assert program.platforms == platforms
    for batch in (2, 7):
        given = jax.random.randint(jax.random.key(batch), (batch, 6), 0, 11)
        found, want = (run(params, state, given) for run in (program.call, step))
        for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
