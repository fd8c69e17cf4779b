"""QK-Clip where heads, layers and the batch are cut over a mesh."""

import functools
import math
import re

import chex
import jax
import numpy as np
import optax
import pytest
from helpers import assert_where, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYERS, WIDTH, HEADS, HEAD_DIM = 4, 16, 4, 8
SPECS = {"query": P("data", "tensor"), "key": P("data", "tensor")}
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def model():
    kernels = np.random.default_rng(0).normal(size=(LAYERS, 2, WIDTH, HEADS, HEAD_DIM))
    return {
        f"layer{i}": {
            "attn": {name: {"kernel": k} for name, k in zip(SPECS, pair, strict=True)}
        }
        for i, pair in enumerate(np.float32(kernels))
    }


STATS = {
    f"layer{i}": {
        "attn": {"max_logits": np.array([10.0, 150.0, 90.0, 400.0 + i], "f4")}
    }
    for i in range(LAYERS)
}


def make_mesh(types):
    return mesh_of(TYPES[types], data=4, tensor=2)


def shardings_on(mesh, params):
    def of(path, _):
        name = next(key.key for key in path if key.key in SPECS)
        return NamedSharding(mesh, SPECS[name])

    return jax.tree_util.tree_map_with_path(of, params)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("heads", [P("tensor"), P()])
def test_same_as_on_one_device(types, heads):
    params = model()
    tx = mc.muonclip(1e-2, orthogonalizer=mc.NewtonSchulz(steps=2))
    update = functools.partial(jax.jit(tx.update), attention_stats=STATS)
    expected, expected_state = update(params, tx.init(params), params)
    mesh = make_mesh(types)
    shardings = shardings_on(mesh, params)
    stats = jax.device_put(STATS, NamedSharding(mesh, heads))
    placed = jax.device_put(params, shardings)
    with jax.set_mesh(mesh):
        updates, state = update(placed, tx.init(placed), placed, attention_stats=stats)
        numbers = mc.scalars(state, placed, heads=True)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    assert int(optax.tree.get(state, "num_clipped")) == 2 * LAYERS
    assert float(optax.tree.get(state, "max_logit")) == 403.0
    desired = mc.scalars(expected_state, params, heads=True)
    chex.assert_trees_all_close(numbers, desired, rtol=1e-5)
    assert_where(updates, shardings)


def sent_to_all(program):
    """Entries of what devices gather or reduce, array by array."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\].* all-(?:gather|reduce)\(", program)
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


def test_heads_are_not_gathered():
    """Scales reach the heads of a device; weights stay, and the host is not asked."""
    params = model()
    tx = mc.qk_clip()
    mesh = make_mesh("auto")
    placed = jax.device_put(params, shardings_on(mesh, params))
    stats = jax.device_put(STATS, NamedSharding(mesh, P("tensor")))
    update = functools.partial(jax.jit(tx.update).lower, attention_stats=stats)
    update = update(placed, tx.init(placed), placed)
    assert "callback" not in update.as_text()
    sizes = sent_to_all(update.compile().as_text())
    assert 0 < max(sizes) <= LAYERS * HEADS
    # A witness: weights that are gathered are seen.
    whole = jax.jit(lambda p: p, out_shardings=NamedSharding(mesh, P()))
    assert max(sent_to_all(whole.lower(placed).compile().as_text())) > LAYERS * HEADS


def test_statistics_of_all_layers_in_one_collective():
    """With `axis_name`, as in `shard_map`, where the compiler joins nothing."""
    params = model()
    mesh = make_mesh("auto")
    tx = mc.qk_clip(axis_name=("data", "tensor"))
    state = tx.init(params)
    split = jax.tree.map(lambda s: np.stack([s * (i + 1) / 8 for i in range(8)]), STATS)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(("data", "tensor"))),
        out_specs=P(),
        check_vma=False,
    )
    def update(params, stats):
        stats = jax.tree.map(lambda s: s[0], stats)
        return tx.update(params, state, params, attention_stats=stats)

    compiled = jax.jit(update).lower(params, split).compile()
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())) == 1
    _, new_state = compiled(params, split)
    assert float(new_state.max_logit) == 403.0
    assert int(new_state.num_clipped) == 2 * LAYERS
