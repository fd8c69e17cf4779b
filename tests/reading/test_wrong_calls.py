"""Calls of `read_model` and `record_attention` that cannot work, and what they say."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import muonclip_jax as mc


PARAMS = {"up": jnp.ones((4, 8))}
X = jnp.ones((3, 4))


def loss(params, x):
    return jnp.sum(x @ params["up"])


def of_data(params, x):
    return loss(params, x) if x.sum() > 0 else 0.0


def of_module(module, x):
    return float(jnp.sum(module(x)))


def as_numpy(params, x):
    return loss(params, x) * x.__array__().size


@pytest.mark.parametrize("call", [mc.read_model, lambda f, *a: mc.record_attention(f)])
@pytest.mark.parametrize("given", [PARAMS, None, 3])
def test_the_function_comes_first(call, given):
    with pytest.raises(ValueError, match="function"):
        call(given, loss)


@pytest.mark.parametrize("out", ["one number", "three", "a dict"])
def test_has_aux_needs_a_pair(out):
    def fun(params, x):
        y = loss(params, x)
        return {"one number": y, "three": (y, y, y), "a dict": {"y": y, "aux": x}}[out]

    with pytest.raises(ValueError, match=r"must return \(out, aux\), and returned"):
        mc.record_attention(fun, has_aux=True)(PARAMS, X)


@pytest.mark.parametrize("fun", [of_data, functools.partial(of_data), as_numpy])
def test_code_that_needs_values_is_named(fun):
    name = getattr(fun, "func", fun).__name__
    with pytest.raises(jax.errors.JAXTypeError, match=rf"{name} at .*test_wrong") as e:
        mc.read_model(fun, PARAMS, X)
    assert "have shapes, but no values" in "".join(e.value.__notes__)


def test_code_of_a_module_that_needs_values_is_named():
    module = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    with pytest.raises(jax.errors.JAXTypeError, match="of_module at .*test_wrong"):
        mc.read_model(of_module, module, X)


@pytest.mark.parametrize("axis", [1, [1], ("batch", 0), True])
def test_an_axis_is_a_name(axis):
    with pytest.raises(ValueError, match="axis_name must be a name"):
        mc.muonclip(1e-3, axis_name=axis).init(PARAMS)
