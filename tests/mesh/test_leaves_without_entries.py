"""Leaves of size zero pass through, on a mesh and alongside others."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

CASES = {  # shape, spec
    "no layers": ((0, 8, 16), P(None, "x")),
    "no rows": ((0, 8), P(None, "x")),
    "no columns": ((8, 0), P("x")),
    "nothing, cut where there is nothing": ((0, 0), P("x")),
    "one entry": ((1, 1), P()),
    "a row": ((1, 8), P(None, "x")),
    "one layer": ((1, 8, 16), P(None, None, "x")),
}
WHOLE = ((8, 16), P("x"))


@pytest.mark.more
@pytest.mark.parametrize("told", [True, more(False)])
@pytest.mark.parametrize("jit", [jax.jit, more(lambda f: f)])
@pytest.mark.parametrize("consistent_rms", [more(0.2), None])
def test_on_a_mesh(told, jit, consistent_rms):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    cases = CASES | {"whole": WHOLE}
    shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in cases.items()}
    plain = {k: normal(1, *shape) for k, (shape, _) in cases.items()}
    options = dict(
        orthogonalizer=mc.NewtonSchulz(steps=2),
        consistent_rms=consistent_rms,
        dimension_numbers=MuonDimensionNumbers(-2, -1),
    )
    tx = mc.muon(1.0, shardings=shardings if told else None, **options)
    params = jax.device_put(plain, shardings)
    updates, state = jit(tx.update)(params, tx.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, plain)
    chex.assert_tree_all_finite(state)
    alone = mc.muon(1.0, **options)
    expected, _ = alone.update(plain, alone.init(plain), plain)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(updates["whole"]).min() > 0


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (0, 0)])
def test_newton_schulz(shape):
    for dtype in (jnp.float16, jnp.float32):
        y = mc.newton_schulz(jnp.zeros(shape, dtype))
        assert y.shape == shape and y.dtype == dtype
