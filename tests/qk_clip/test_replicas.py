"""Replicas in `shard_map` that accumulate micro-batches keep one maximum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

KERNEL = np.ones((8, 2, 4), np.float32)
PARAMS = {"a": {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}}}
LARGE = np.arange(16.0, dtype=np.float32).reshape(8, 2) * 50
SMALL = np.zeros((8, 2), np.float32)

WAYS = {
    "the clip's axis": lambda: mc.multi_steps(mc.muonclip(0.0, axis_name="x"), 2),
    "its own": lambda: mc.multi_steps(mc.muonclip(0.0), 2, axis_name="x"),
    "both": lambda: mc.multi_steps(
        optax.chain(optax.sgd(0.0), mc.qk_clip(axis_name="x")), 2, axis_name="x"
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_maximum_survives_a_checkpoint_between_micro_batches(way, check):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = WAYS[way]()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
        check_vma=check,
    )
    def step(state, logits):
        stats = {"a": {"max_logits": logits[0]}}
        return tx.update(PARAMS, state, PARAMS, attention_stats=stats)

    _, state = step(tx.init(PARAMS), LARGE)
    assert state.running.tolist() == [700.0, 750.0]
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    updates, state = step(restored, SMALL)
    assert float(optax.tree.get(state, "max_logit")) == 750
    weights = optax.apply_updates(PARAMS, updates)["a"]["query"]["kernel"]
    expected = np.sqrt(100 / np.array([700.0, 750.0]))
    np.testing.assert_allclose(weights[0, :, 0], expected, rtol=1e-6)
