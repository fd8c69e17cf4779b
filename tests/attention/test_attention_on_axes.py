"""Attention where batch, heads or lengths are on the axes of a mesh, or under vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_references import draw, naive_attention
from helpers import few, more
from internals import max_logits_module as module
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

# Query, key, value, a bias that the batch shares, and a cotangent.
ARRAYS = draw(0, (4, 6, 4, 3), (4, 8, 2, 3), (4, 8, 2, 3), (1, 4, 6, 8), (4, 6, 4, 3))


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    before = module._BLOCK, module._PAIRS_AT_ONCE
    module._BLOCK, module._PAIRS_AT_ONCE = 4, 0
    yield
    module._BLOCK, module._PAIRS_AT_ONCE = before


def attend(query, key, value, bias):
    options = dict(bias=bias, is_causal=True)
    output, largest = mc.blockwise_attention(query, key, value, block_size=4, **options)
    return output, largest, mc.max_logits(query, key, **options)


def loss(*arrays, attend=attend):
    *inputs, weights = arrays
    output, *largest = attend(*inputs)
    return (output * weights).sum(), (output, *largest)


grad = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


@functools.cache
def on_one_device():
    """Held against NumPy; the gradient is tested in other files."""
    value, grads = jax.jit(grad)(*ARRAYS)
    mask = np.tri(6, 8, dtype=bool)
    output, largest = naive_attention(*ARRAYS[:3], bias=ARRAYS[3], mask=mask)
    for a, e in zip(value[1], (output, largest, largest), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
    return value, grads


def same(actual):
    for a, e in zip(*map(jax.tree.leaves, (actual, on_one_device())), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def mesh(*kinds):
    types = tuple(getattr(AxisType, kind) for kind in kinds)
    return jax.make_mesh((2,) * len(kinds), ("x", "y")[: len(kinds)], types)


@pytest.mark.more
@pytest.mark.parametrize("call", [lambda f: f, jax.checkpoint], ids=["", "remat"])
@pytest.mark.parametrize(
    "kinds", [("Auto",), more(("Auto", "Auto")), ("Auto", "Explicit")]
)
def test_shard_map_over_the_batch(kinds, call):
    """With JAX's default of checking what varies; the bias is the same for all."""

    def local(*arrays):
        value, (output, *largest) = loss(*arrays, attend=call(attend))
        return jax.lax.psum(value, "x"), (output, *jax.lax.pmax(largest, "x"))

    specs = (P("x"), P("x"), P("x"), P(), P("x"))
    value = (P(), (P("x"), P(), P()))
    differentiate = functools.partial(
        jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True
    )
    split = functools.partial(jax.shard_map, in_specs=specs, axis_names={"x"})
    with jax.set_mesh(mesh(*kinds)):
        inside = split(differentiate(local), out_specs=(value, specs[:4]))
        same(jax.jit(inside)(*ARRAYS))
        outside = differentiate(split(local, out_specs=value))
        same(jax.jit(outside)(*ARRAYS))


EXPLICIT, MIXED = ("Explicit", "Explicit"), ("Explicit", "Auto")
BATCH = [P("x"), P("x"), P("x"), P(), P("x")]
HEADS = [P(None, None, "x")] * 3 + [P(None, "x"), P(None, None, "x")]
BOTH = [P("x", None, "y")] * 3 + [P(None, "y"), P("x", None, "y")]
LAYOUTS = {
    "batch": (EXPLICIT, BATCH),
    "batch, mixed": (MIXED, BATCH),
    "heads": (EXPLICIT, HEADS),
    "heads, mixed": (MIXED, HEADS),
    "batch and heads": (EXPLICIT, BOTH),
    "more parts than key heads": (EXPLICIT, [P(None, None, ("x", "y")), *[P()] * 4]),
    "queries": (MIXED, [P(None, "x"), P(), P(), P(None, None, "x"), P()]),
    "keys": (EXPLICIT, [P(), P(None, "x"), P(None, "x"), P(), P()]),
    "batch of keys alone": (MIXED, [P(), P("x"), P("x"), P(), P()]),
}


@pytest.mark.parametrize(
    "layout", few(LAYOUTS, "batch and heads", "more parts than key heads", "keys")
)
def test_explicit_axes(layout):
    kinds, specs = LAYOUTS[layout]
    with jax.set_mesh(mesh(*kinds)):
        arrays = list(map(jax.device_put, ARRAYS, specs))
        (_, results), _ = value = jax.jit(grad)(*arrays)
        same(value)
    specs = [jax.typeof(x).sharding.spec for x in (arrays[0], *results)]
    assert specs[1] == specs[0] and specs[2][0] == specs[3][0] == specs[0][-2]


def test_explicit_axes_eagerly():
    with jax.set_mesh(mesh("Explicit")):
        arrays = [jax.device_put(x, P("x")) for x in ARRAYS[:3]]
        output, largest = mc.blockwise_attention(*arrays)
    expected, exact = naive_attention(*ARRAYS[:3])
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(largest, exact, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_splash_says_how_it_runs_on_a_mesh(kind):
    x = jnp.ones((2, 128, 1, 8))
    attend = functools.partial(mc.splash_attention, interpret=True)

    def call(x):
        return attend(x, x, x)[0]

    with jax.set_mesh(mesh(kind)), pytest.raises(ValueError, match="check_vma=False"):
        x = jax.device_put(x, P("x"))
        if kind == "Auto":
            call = jax.shard_map(call, in_specs=P("x"), out_specs=P("x"))
        jax.eval_shape(call, x)
