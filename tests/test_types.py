"""What a type checker knows of public calls: `.ci/run` gives this file to pyright."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import Any, assert_type, get_args

import jax
import jax.numpy as jnp
import pytest

import muonclip_jax as mc
from muonclip_jax._newton_schulz.coefficients import Preset


PARAMS = {name: jnp.ones((8, 2, 4)) for name in "qkv"}
X = jnp.ones((3, 8))


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    return jnp.sum(jax.nn.softmax(q @ k.mT) @ v)


def loss_and_rows(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
    return loss(params, x), len(x)


def test_recorded_functions_have_the_types_of_what_they_record():
    recorded = mc.record_attention(loss)
    assert_type(recorded(PARAMS, X), tuple[jax.Array, Any])
    both = mc.record_attention(loss_and_rows, has_aux=True)(PARAMS, X)
    assert_type(both, tuple[jax.Array, tuple[int, Any]])
    assert both[1][0] == 3
    with pytest.raises(TypeError):
        recorded(PARAMS)  # pyright: ignore[reportCallIssue]


def test_a_name_that_is_imported_late_has_its_type():
    query = jnp.ones((1, 3, 2, 4))
    assert_type(mc.attention_fn(query, query, query), jax.Array)
    with pytest.raises(TypeError):
        mc.attention_fn(query)  # pyright: ignore[reportCallIssue]


def test_presets_are_those_that_a_type_checker_knows():
    assert get_args(Preset) == tuple(mc.NS_COEFFS)
    assert mc.muon(0.1, orthogonalizer="cans", mu_dtype=jnp.bfloat16)
    assert mc.muon(0.1, orthogonalizer=lambda x: x, mu_dtype="int8")
    rules = {"w*": mc.MuonDimensionNumbers(0, 1), "b": None, "c": "auto"}
    assert mc.muon(0.1, dimension_numbers=rules)


def test_clipped_params_have_the_type_of_params():
    stats: dict[str, jax.Array] = {}
    kernels = {"other": jnp.ones((8, 8))}
    assert_type(mc.clip_qk(kernels, stats), dict[str, jax.Array])


def slips() -> list[Callable[[], Any]]:
    """Ten slips of typing, each of which a type checker has to report."""
    axes = mc.MuonDimensionNumbers(0, 1)
    return [
        lambda: mc.muon(0.1, orthogonalizer="kelller"),  # pyright: ignore
        lambda: mc.muon(0.1, mu_dtype="int7"),  # pyright: ignore
        lambda: mc.muon(0.1, dimension_numbers={"w*": (0, 1)}),  # pyright: ignore
        lambda: mc.muonclip(0.1, treshold=100.0),  # pyright: ignore
        lambda: mc.muon(0.1, threshold=100.0),  # pyright: ignore
        lambda: mc.muon(0.1, nesterov="yes"),  # pyright: ignore
        lambda: mc.NewtonSchulz("keller", method="grams"),  # pyright: ignore
        lambda: mc.NewtonSchulz("keller", dtype="float23"),  # pyright: ignore
        lambda: mc.describe(PARAMS, axes),  # pyright: ignore
        lambda: mc.qk_clip("100"),  # pyright: ignore
    ]


@pytest.mark.parametrize("i", range(10))
def test_slips_are_errors_at_run_time_too(i):
    def run():
        made = slips()[i]()
        return made.init({"w": jnp.ones((4, 4))})

    with pytest.raises((TypeError, ValueError)):
        run()
