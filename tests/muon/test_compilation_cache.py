"""Programs that a cache finds again: the same in every process, with no address."""

import jax
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


def program(type_=AxisType.Auto, is_told=False, **options):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(type_,))
    sharding = NamedSharding(mesh, P("x"))
    params = jax.device_put({"w": normal(0, 8, 16)}, sharding)
    tx = mc.muon(1e-3, shardings=sharding if is_told else None, **options)
    return jax.jit(tx.update).lower(params, tx.init(params), params).as_text()


def test_another_for_other_settings():
    """So that a cache takes no program for another's."""
    others = [
        {"orthogonalizer": "quintic"},
        {"orthogonalizer": mc.NewtonSchulz(steps=4)},
        {"orthogonalizer": mc.NewtonSchulz(method="standard")},
        {"orthogonalizer": mc.NewtonSchulz(dtype="bfloat16")},
        {"orthogonalizer": mc.NewtonSchulz(preconditioning="aol")},
    ]
    programs = {program(), *(program(**options) for options in others)}
    assert len(programs) == 1 + len(others)


@pytest.mark.parametrize("type_", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_told", [False, True])
def test_no_callback_of_the_compiler(type_, is_told):
    assert "CustomSPMDPartitioning" not in program(type_, is_told)
