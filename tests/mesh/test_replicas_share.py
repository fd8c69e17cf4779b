"""Replicas under `pmap` and `shard_map` share the matrices: `axis_name`."""

import functools
import re

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of, more, normal, of_newton_schulz, step_of, trained
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

COUNT = 4
PARAMS = {
    **{f"up{i}": normal(i, 16, 24) for i in range(5)},
    "stack": normal(7, 3, 24, 16),
    "single": normal(8, 10, 12),
    "bias": normal(9, 24),
}
NUMBERS = {name: None if x.ndim == 1 else Numbers(-2, -1) for name, x in PARAMS.items()}
MATRICES = {name: x for name, x in PARAMS.items() if x.ndim > 1}


def grads_at(step, replica=0):
    return {k: normal((step, replica, 5), *x.shape) for k, x in PARAMS.items()}


def mean_grads_at(step):
    each = [grads_at(step, replica) for replica in range(COUNT)]
    return jax.tree.map(lambda *x: sum(x) / COUNT, *each)


def make(axis_name=None, **options):
    return mc.muon(
        1e-2,
        dimension_numbers=NUMBERS,
        axis_name=axis_name,
        weight_decay=0.3,
        **options,
    )


@functools.cache
def expected(**options):
    gradients = map(mean_grads_at, range(3))
    return trained(make(**options), PARAMS, gradients)[0]


def stacked(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


# The longest sum of a product has 24 terms.
OF_A_STEP = of_newton_schulz(24)


def assert_close(actual, desired, share=0.02 * OF_A_STEP):
    """Of params by default: the three steps change them by less than a fiftieth."""
    helpers.assert_close(actual, desired, share)


@pytest.mark.more
@pytest.mark.parametrize("is_averaged", [more(True), False])
@pytest.mark.parametrize("map_", [jax.pmap, jax.vmap])
def test_mapped(map_, is_averaged):
    tx = make("data")
    update = map_(step_of(tx), axis_name="data")
    params, state = stacked([PARAMS] * COUNT), stacked([tx.init(PARAMS)] * COUNT)
    for step in range(3):
        each = [mean_grads_at(step)] * COUNT
        if not is_averaged:
            each = [grads_at(step, replica) for replica in range(COUNT)]
        params, state = update(stacked(each), state, params)
    for replica in range(COUNT):
        mine = jax.tree.map(lambda x, i=replica: x[i], params)
        assert_close(mine, expected())
        # To the bit, as the state must be.
        chex.assert_trees_all_equal(mine, jax.tree.map(lambda x: x[0], params))


def test_each_replica_iterates_its_share_and_one_gather_hands_out_a_stack():
    matrices = {str(i): normal(i, 48, 96) for i in range(2 * COUNT)}

    def compiled(params, axis_name=None):
        tx = mc.scale_by_muon(axis_name=axis_name, dimension_numbers=Numbers(0, 1))
        step = jax.shard_map(
            lambda g, s: tx.update(g, s)[0],
            mesh=mesh_of(data=COUNT),
            in_specs=P(),
            out_specs=P(),
        )
        return jax.jit(step).lower(params, tx.init(params)).compile()

    # XLA counts the body of a loop over a stack once, so one matrix is multiplied.
    one = compiled({"0": matrices["0"]}).cost_analysis()["flops"]
    shared = compiled(matrices, "data")
    share = shared.cost_analysis()["flops"]
    assert share <= 1.3 * len(matrices) * one / COUNT
    text = shared.as_text()
    assert len(re.findall(r" = \S+ all-gather(?:-start)?\(", text)) == 1
    assert "all-reduce" not in text and "all-to-all" not in text


def test_muonclip_shares_both():
    kernel = normal(1, 8, 2, 4)
    params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    tx = mc.muonclip(1e-2, axis_name="data")
    alone = mc.muonclip(1e-2)
    each = [jnp.array([90.0 + 50 * i, 400.0 - 70 * i]) for i in range(COUNT)]

    def step(grads, state, logits):
        stats = {"attn": {"max_logits": logits}}
        return tx.update(grads, state, params, attention_stats=stats)[0]

    state = stacked([tx.init(params)] * COUNT)
    updates = jax.pmap(step, axis_name="data")(
        stacked([params] * COUNT), state, jnp.stack(each)
    )
    stats = {"attn": {"max_logits": functools.reduce(jnp.maximum, each)}}
    desired, _ = alone.update(params, alone.init(params), params, attention_stats=stats)
    assert_close(jax.tree.map(lambda x: x[2], updates), desired, OF_A_STEP)


@pytest.mark.more
def test_derivative_is_that_of_one_replica():
    """By the gradients, which the momentum of the next step remembers."""

    def size(grads, axis_name):
        tx = mc.scale_by_muon(axis_name=axis_name, dimension_numbers=Numbers(-2, -1))
        updates, _ = tx.update(grads, tx.init(grads))
        return sum(jnp.sum(jnp.sin(x)) for x in updates.values())

    alone = jax.grad(size)(MATRICES, None)
    shared = jax.pmap(
        lambda grads: jax.grad(lambda g: size(jax.lax.pmean(g, "data"), "data"))(grads),
        axis_name="data",
    )(stacked([MATRICES] * COUNT))
    # Errors of the slopes come on top, |p''| / |p'| <= 12 / 3.44 times those of the
    # singular values.
    assert_close(jax.tree.map(lambda x: x[1], shared), alone, 4.5 * OF_A_STEP)


def test_an_axis_that_is_not_there():
    tx = make("data")
    with pytest.raises(ValueError, match="axis_name='data' is no axis here: call the"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    direction = mc.scale_by_muon(axis_name="data", dimension_numbers=Numbers(-2, -1))
    with pytest.raises(ValueError, match="inside jax.pmap or jax.shard_map"):
        direction.update(MATRICES, direction.init(MATRICES))
