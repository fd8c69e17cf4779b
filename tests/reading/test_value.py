"""A reading is a value: pickled, copied, hashed, compared, and sent with a step."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import ROOT

import muonclip_jax as mc


DRAWS = np.random.default_rng(0)
X = DRAWS.standard_normal((2, 5, 8), np.float32)
HEADS = {name: DRAWS.standard_normal((8, 2, 4), np.float32) for name in "qkv"}


def attend(params, x):
    query, key, value = (jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qkv")
    bias = params["bias"][:, None, None] if "bias" in params else None
    return jnp.mean(nn.dot_product_attention(query, key, value, bias) ** 2)


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return jnp.mean(self.up(self.attention(x)) ** 2)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.mean(nn.MultiHeadDotProductAttention(2)(x) ** 2)


def equinox():
    mlp = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    return lambda model, x: jnp.mean(jax.vmap(jax.vmap(model))(x) ** 2), mlp


MODELS = {
    "pytree": lambda: (attend, HEADS),
    "bias of a layer": lambda: (attend, HEADS | {"bias": jnp.ones(2)}),
    "Linen": lambda: (Linen().apply, Linen().init(jax.random.key(0), X)),
    "NNX": lambda: (lambda model, x: model(x), Block()),
    "Equinox": equinox,
}


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_a_second_reading_are_equal(name):
    fun, params = MODELS[name]()
    reading = mc.read_model(fun, params, X)
    copies = {
        "pickled": pickle.loads(pickle.dumps(reading)),
        "sent": cloudpickle.loads(cloudpickle.dumps(reading)),
        "copied": copy.deepcopy(reading),
        "read again": mc.read_model(fun, params, X),
    }
    for how, other in copies.items():
        assert other == reading and hash(other) == hash(reading), how
        assert str(other) == str(reading), how
        for tree in ("labels", "dimension_numbers"):
            mine, theirs = (
                jax.tree.flatten(getattr(x, tree)) for x in (reading, other)
            )
            assert mine == theirs, (how, tree)
        assert other.attention == reading.attention, how


def test_readings_of_other_functions_differ():
    reading = mc.read_model(attend, HEADS, X)
    flat = {name: x.reshape(8, 8) for name, x in HEADS.items()}
    heads = {name: x.reshape(8, 4, 2) for name, x in HEADS.items()}

    def reshaped(p, x):
        return attend({k: v.reshape(8, 2, 4) for k, v in p.items()}, x)

    others = {
        "no attention": (lambda p, x: p["q"].sum() + x.sum(), HEADS),
        "other heads": (attend, heads),
        "other shapes": (reshaped, flat),
        "another tree": (attend, HEADS | {"unused": jnp.ones(3)}),
    }
    for what, (fun, params) in others.items():
        assert mc.read_model(fun, params, X) != reading, what
    assert reading != "a reading" and reading != None  # noqa: E711


def test_static_argument_is_compiled_once():
    traced = []

    def clipped(params, stats, reading):
        traced.append(reading)
        return mc.clip_qk(params, stats, 0.1, model=reading)

    run = jax.jit(clipped, static_argnames="reading")
    _, stats = jax.jit(mc.record_attention(attend))(HEADS, X)
    first = run(HEADS, stats, reading=mc.read_model(attend, HEADS, X))
    again = run(HEADS, stats, reading=mc.read_model(attend, HEADS, X))
    assert len(traced) == 1
    assert np.any(first["q"] != HEADS["q"])
    np.testing.assert_array_equal(first["q"], again["q"])


def read_with_a_table():
    table = jnp.ones((5, 8))

    def loss(params, x):
        return attend(params, x + table)

    reading = mc.read_model(loss, HEADS, X)
    return reading, [weakref.ref(table), weakref.ref(loss)]


def test_keeps_no_array_and_no_trace():
    reading, held = read_with_a_table()
    gc.collect()
    assert reading.attention
    assert [x() for x in held] == [None, None]


@pytest.mark.more
def test_a_leaf_takes_a_kilobyte():
    shapes = {
        f"layer_{i}": {name: jax.ShapeDtypeStruct((8, 8), "float32") for name in "ab"}
        for i in range(1_000)
    }

    def loss(params, x):
        for layer in params.values():
            x = x + jax.nn.relu(x @ layer["a"]) @ layer["b"]
        return jnp.mean(x**2)

    reading = mc.read_model(loss, shapes, jax.ShapeDtypeStruct((1, 8), "float32"))
    assert len(pickle.dumps(reading)) < 2_000 * 1_250


def step_of(model):
    tx = mc.muonclip(0.1, model=model, threshold=0.5)

    def step(params, state, x):
        grad = jax.value_and_grad(mc.record_attention(attend), has_aux=True)
        (loss, stats), grads = grad(params, x)
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state, loss

    return tx, step


RUN = """
import pickle, sys
import cloudpickle, jax
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 2)
(tx, step), params, x = cloudpickle.load(sys.stdin.buffer)
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
state, losses = tx.init(params), []
for _ in range(3):
    params, state, loss = jax.jit(step)(params, state, x)
    losses.append(float(loss))
sys.stdout.buffer.write(pickle.dumps(losses))
"""


@pytest.mark.more
def test_step_sent_to_a_process_gives_the_same_losses():
    reading = mc.read_model(attend, HEADS, X)
    tx, step = step_of(reading)
    # This module is none that the other process can import.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    sent = cloudpickle.dumps(((tx, step), HEADS, X))
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, input=sent, capture_output=True, cwd=ROOT, check=False
    )
    assert not done.returncode, done.stderr.decode()
    params, state, losses = HEADS, tx.init(HEADS), []
    for _ in range(3):
        params, state, loss = jax.jit(step)(params, state, X)
        losses.append(float(loss))
    assert len({*losses}) == 3
    np.testing.assert_allclose(pickle.loads(done.stdout), losses, rtol=1e-5)
