"""An exchange is one class, entered in one place: here one of a test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, matrix_of, tolerance
from internals import Exchange, EXCHANGES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


class GatherAll(Exchange):
    """Every device gets all matrices whole, of which it iterates its own."""

    used = 0

    @classmethod
    def serves(cls, owners, roles):
        return bool(roles.sharded) and not roles.replicated

    def to_owners(self, blocks):
        type(self).used += 1
        gathered = jax.lax.all_gather(blocks, self.roles.sharded, axis=1)
        (layout,) = self.layouts
        group, copy, device = self.here()
        slots = jnp.asarray(self.owners.slots)[group, copy, device]
        return layout.join(gathered)[slots]

    def to_blocks(self, matrices):
        every = jax.lax.all_gather(matrices, self.roles.sharded)
        every = every.reshape(-1, *matrices.shape[1:])
        group, _, device = self.here()
        whole = every[jnp.asarray(self.owners.places)[group]]
        (layout,) = self.layouts
        blocks = layout.split(whole).reshape(
            len(whole), layout.devices, *self.block_shape
        )
        return blocks[:, device]


@pytest.fixture
def exchanges():
    yield EXCHANGES
    EXCHANGES.remove(GatherAll)
    jax.clear_caches()


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_it_serves_once_it_is_entered(monkeypatch, exchanges, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    values = np.linspace(1, 0.3, 16)
    x = {f"w{i}": jnp.float32(matrix_of(values, 16, 24)) for i in range(3)}
    alone = mc.scale_by_muon()
    expected, _ = jax.jit(alone.update)(x, alone.init(x))
    placed = NamedSharding(mesh, spec)
    x = jax.tree.map(lambda leaf: jax.device_put(leaf, placed), x)
    tx = mc.scale_by_muon(shardings=placed)
    update = jax.jit(tx.update).lower(x, tx.init(x))
    assert "all_to_all" in update.as_text()

    monkeypatch.setattr(GatherAll, "used", 0)
    exchanges.insert(0, GatherAll)
    jax.clear_caches()
    update = jax.jit(tx.update).lower(x, tx.init(x))
    assert GatherAll.used and "all_to_all" not in update.as_text()
    found, _ = update.compile()(x, tx.init(x))
    share = tolerance(jnp.float32, size=24, slopes=(3.4445,) * 5)
    for name, leaf in found.items():
        assert_close(leaf, np.float64(expected[name]), share)
