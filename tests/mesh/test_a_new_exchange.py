"""An exchange is two functions, in one file: here others in their place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, matrix_of, tolerance
from internals import on_mesh_module
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


def gathered_to_owners(blocks, cut, share):
    """Every device gets all matrices whole, of which it iterates its own."""
    for axis, (_, names) in enumerate(cut.factors, start=1):
        if names:
            blocks = jax.lax.all_gather(blocks, names, axis=axis, tiled=True)
    slots = share.to_slots(blocks)
    here = jax.lax.axis_index(cut.members) * share.slots
    return jax.lax.dynamic_slice_in_dim(slots, here, share.slots)


def gathered_to_blocks(matrices, cut, share):
    whole = share.from_slots(jax.lax.all_gather(matrices, cut.members, tiled=True))
    for axis, (size, names) in enumerate(cut.factors, start=1):
        if names:
            step = size // math.prod(map(jax.lax.axis_size, names))
            start = jax.lax.axis_index(names) * step
            whole = jax.lax.dynamic_slice_in_dim(whole, start, step, axis)
    return whole


@pytest.mark.more
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_another_exchange_is_two_functions(monkeypatch, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    values = np.linspace(1, 0.3, 16)
    x = {f"w{i}": jnp.float32(matrix_of(values, 16, 24)) for i in range(3)}
    alone = mc.scale_by_muon()
    expected, _ = jax.jit(alone.update)(x, alone.init(x))
    placed = NamedSharding(mesh, spec)
    x = jax.tree.map(lambda leaf: jax.device_put(leaf, placed), x)
    tx = mc.scale_by_muon(shardings=placed)
    assert "all_to_all" in jax.jit(tx.update).lower(x, tx.init(x)).as_text()

    monkeypatch.setattr(on_mesh_module, "to_owners", gathered_to_owners)
    monkeypatch.setattr(on_mesh_module, "to_blocks", gathered_to_blocks)
    jax.clear_caches()
    update = jax.jit(tx.update).lower(x, tx.init(x))
    jax.clear_caches()
    assert "all_to_all" not in update.as_text()
    found, _ = update.compile()(x, tx.init(x))
    share = tolerance(jnp.float32, size=24, slopes=(3.4445,) * 5)
    for name, leaf in found.items():
        assert_close(leaf, np.float64(expected[name]), share)
