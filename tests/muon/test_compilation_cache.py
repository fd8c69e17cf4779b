"""Programs that a cache finds again: without an address where the layout is known.

Those that must ask the compiler hold one, and are still named by what they do, so that
a cache may leave the address out of its keys.
"""

import re

import jax
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


def program(**options):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = jax.device_put({"w": normal(0, 8, 16)}, NamedSharding(mesh, P("x")))
    # One that `init` never showed how the parameters lie.
    state, tx = mc.scale_by_muon().init(params), mc.scale_by_muon(**options)
    text = jax.jit(tx.update).lower(params, state).as_text()
    without, count = re.subn(r'(CustomSPMDPartitioning.*?)"\d+"', r"\1", text)
    assert count
    return without


def test_the_same_in_every_process():
    assert program() == program()


@pytest.mark.parametrize(
    "options",
    [
        {"ns_coeffs": "quintic"},
        {"ns_steps": 4},
        {"ns_method": "standard"},
        {"ns_dtype": "bfloat16"},
        {"preconditioning": "aol"},
    ],
)
def test_another_for_other_settings(options):
    assert program(**options) != program()


@pytest.mark.parametrize("type_", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_told", [False, True])
def test_no_address_where_the_layout_is_known(type_, is_told):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(type_,))
    sharding = NamedSharding(mesh, P("x"))
    params = jax.device_put({"w": normal(0, 8, 16)}, sharding)
    tx = mc.muon(1e-3, shardings=sharding if is_told else None)
    state = tx.init(params)
    text = jax.jit(tx.update).lower(params, state, params).as_text()
    assert "CustomSPMDPartitioning" not in text
