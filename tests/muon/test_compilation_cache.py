"""Without the address that they hold, programs that ask the compiler are still named
by what they do, so that a cache may leave the address out of its keys."""

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
    tx = mc.scale_by_muon(**options)
    text = jax.jit(tx.update).lower(params, tx.init(params)).as_text()
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
