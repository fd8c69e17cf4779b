"""A mask or a label for a whole module is as good as one for each of its leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import as_pure
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def layer(*shape):
    def projection():
        return {"kernel": jnp.ones(shape), "bias": jnp.ones(shape[1:])}

    return {"query": projection(), "key": projection(), "up": {"w": jnp.ones((4, 6))}}


PARAMS = {name: layer(8, 2, 4) for name in ("l0", "l1", "l2")}
STATS = {name: {"max_logits": jnp.asarray([5.0, 500.0])} for name in PARAMS}


def step(tx, params, **extra):
    grads = jax.tree.map(jnp.ones_like, params)
    return tx.update(grads, tx.init(params), params, **extra)[0]


def test_strange_statistics_are_still_refused_under_a_mask():
    tx = optax.masked(mc.qk_clip(), {"l0": False, "l1": True, "l2": True})
    stats = STATS | {"l3": STATS["l1"]}
    with pytest.raises(ValueError, match="'l3/max_logits' match no query and key"):
        step(tx, PARAMS, attention_stats=stats)
    half = {"l0": {"query": True, "key": False, "up": True}, "l1": True, "l2": True}
    with pytest.raises(
        ValueError, match="not given 'l0/key/kernel', 'l0/key/bias', but"
    ):
        step(optax.masked(mc.qk_clip(), half), PARAMS, attention_stats=STATS)


@pytest.mark.parametrize("mask", [{"a": True, "b": False}, "state", "dicts"])
def test_weight_decay_mask_by_path_for_nnx(mask):
    class Model(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    model = Model()
    before = nnx.state(model, nnx.Param)
    full = jax.tree.map_with_path(lambda k, _: k[0].key == "a", before)
    mask = {"state": full, "dicts": as_pure(full)}.get(str(mask), mask)
    tx = mc.muon(1.0, weight_decay=0.25, weight_decay_mask=mask)
    before = as_pure(before)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    after = as_pure(nnx.state(model, nnx.Param))
    for name, kept in (("a", 0.75), ("b", 1)):
        np.testing.assert_allclose(
            after[name]["kernel"], kept * before[name]["kernel"], rtol=1e-6
        )


def test_bad_masks_name_the_path():
    for mask, message in (
        ({"l0": True, "l1": True}, "weight_decay_mask has no entry for 'l2/"),
        ({"l0": True, "l1": True, "l2": True, "l3": True}, "names 'l3'"),
    ):
        with pytest.raises(ValueError, match=message):
            mc.muon(0.1, weight_decay_mask=mask).init(PARAMS)


def test_an_answer_of_none_is_adamw_for_a_bare_array():
    for shape in ((3, 4), (2, 3, 4)):
        array = jnp.ones(shape)
        expected = step(optax.adamw(0.1, b2=0.95, weight_decay=0.1), array)
        numbers = lambda p: None  # noqa: E731
        updates = step(mc.muon(0.1, dimension_numbers=numbers), array)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
        for options in ({}, {"attention": [], "per_head": True}):
            assert "adamw" in mc.describe(array, dimension_numbers=numbers, **options)
    given = mc.describe(jnp.ones((2, 3, 4)), dimension_numbers=Numbers(-2, -1))
    assert "2 x 3 x 4" in given
