"""Dimension numbers that the user gives, and stacks whose axis is not in front."""

import jax
import jax.numpy as jnp
import pytest
from internals import matrix_views, paths
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


SPEC = Numbers(0, 1)


def views_of(numbers, params):
    return matrix_views(numbers, paths.flatten(params))


@pytest.mark.parametrize(
    "spec",
    [
        {"a": {"w": SPEC, "v": None}, "b": SPEC},
        {"a": {"w": SPEC, "v": None}, "b": Numbers((0,), (1,))},
        lambda params: jax.tree.map(
            lambda p: SPEC if p.shape[0] == 3 else None, params
        ),
    ],
)
def test_given_numbers_override_everything(spec):
    params = {
        "a": {"w": jnp.ones((3, 4)), "v": jnp.ones((2, 2))},
        "b": jnp.ones((3, 3)),
    }
    views = views_of(spec, params)
    assert [v is not None for v in views] == [False, True, True]


def test_a_prefix_will_do():
    params = {
        "a": {"w": jnp.ones((3, 4)), "v": jnp.ones((2, 2))},
        "b": jnp.ones((3, 3)),
    }
    assert [bool(v) for v in views_of({"a": None, "b": SPEC}, params)] == [
        False,
        False,
        True,
    ]
    assert [bool(v) for v in views_of(SPEC, params)] == [True, True, True]


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"a": SPEC}, r"no entry for 'b/w'"),
        ({"a": SPEC, "b": None, "c": SPEC}, r"names 'c'"),
        ({"a": SPEC, "b": 3}, r"at 'b' is 3"),
        (
            {"a": Numbers(0, 2), "b": None},
            r"'a/w' with shape \(3, 4\): axis 2 is out of range",
        ),
        ({"a": Numbers(0, -2), "b": None}, r"'a/w' .*distinct"),
    ],
)
def test_bad_numbers_name_the_path(spec, message):
    params = {"a": {"w": jnp.ones((3, 4))}, "b": {"w": jnp.ones((3, 4))}}
    with pytest.raises(ValueError, match=message):
        mc.muon(1e-3, dimension_numbers=spec).init(params)


def test_stack_axes_of_a_module_that_is_not_there():
    with pytest.raises(ValueError, match="stack_axes names 'decoder'"):
        mc.flax_dimension_numbers({"w": jnp.ones((2, 2))}, stack_axes={"decoder": 1})
