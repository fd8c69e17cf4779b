"""`jax.vmap` whose axis a mesh divides: each member as it is by itself."""

import contextlib
import functools

import chex
import jax
import numpy as np
import optax
import pytest
from helpers import more, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def draw(seed):
    kernel = {"kernel": normal((seed, 0), 4, 8, 2, 4)}
    matrices = {f"layer_{i}": {"kernel": normal((seed, i), 4, 8, 16)} for i in (1, 2)}
    return matrices | {"attn": {"query": kernel, "key": kernel}}


def member(tree, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], tree)


@pytest.mark.parametrize(
    "is_set, is_told",
    [more(True, True), more(True, False), more(False, True), (False, False)],
)
def test_members_of_an_ensemble_do_not_mix(is_set, is_told):
    """On one axis of a mesh, with the matrices cut along the other."""
    mesh = jax.make_mesh((4, 2), ("ens", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = draw(0)
    stats = {"attn": {"max_logits": 100 * np.abs(normal(5, 4, 2))}}
    both = NamedSharding(mesh, P("ens", "fsdp"))
    placed = jax.device_put(params, both)
    tx = mc.muonclip(
        1e-2, shardings=NamedSharding(mesh, P("fsdp")) if is_told else None
    )

    def two_steps(tx, params, stats):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        mapped = jax.vmap(functools.partial(two_steps, tx), spmd_axis_name="ens")
        found = jax.jit(mapped)(placed, stats)
    alone = jax.jit(functools.partial(two_steps, mc.muonclip(1e-2)))
    for i in range(4):
        expected = alone(member(params, i), member(stats, i))
        chex.assert_trees_all_close(member(found, i), expected, rtol=1e-4, atol=1e-5)
