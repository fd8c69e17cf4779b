"""A mask or a label for a whole module is as good as one for each of its leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import as_pure, is_numbers, randomize
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


ONE_STEP = {"orthogonalizer": mc.NewtonSchulz(steps=1)}
MASK = {"l0": False, "l1": True, "l2": {"query": True, "key": True, "up": False}}
MATRICES = {"l0": {"query": False, "key": False, "up": True}, "l1": False, "l2": False}
NUMBERS = {
    "l0": None,
    "l1": None,
    "l2": {"query": None, "key": None, "up": Numbers(0, 1)},
}
LABELS = {
    "l0": "clip",
    "l1": "sgd",
    "l2": {"query": "muon", "key": "muon", "up": "sgd"},
}
PARTS = {
    "clip": mc.muonclip(0.1, **ONE_STEP),
    "muon": mc.muon(0.2, **ONE_STEP),
    "sgd": optax.sgd(0.3),
}
#: Entries for modules, and what takes them.
PREFIXES = {
    "a clip": (MASK, lambda mask: optax.masked(mc.qk_clip(), mask)),
    "muonclip": (MASK, lambda mask: optax.masked(mc.muonclip(0.1, **ONE_STEP), mask)),
    "a direction": (
        MATRICES,
        lambda mask: optax.masked(mc.scale_by_muon(**ONE_STEP), mask),
    ),
    "a partition": (LABELS, lambda labels: optax.partition(PARTS, labels)),
    "decay": (MASK, lambda mask: mc.muonclip(0.1, weight_decay_mask=mask, **ONE_STEP)),
    "numbers": (
        NUMBERS,
        lambda numbers: mc.muonclip(0.1, dimension_numbers=numbers, **ONE_STEP),
    ),
}


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("name", PREFIXES)
def test_entries_for_modules_are_entries_for_all_their_leaves(name, is_called):
    entries, make = PREFIXES[name]
    whole = jax.tree.map(
        lambda entry, part: jax.tree.map(lambda _: entry, part),
        entries,
        PARAMS,
        is_leaf=is_numbers,
    )
    params, grads = randomize(PARAMS), randomize(PARAMS, 1)

    def updated(given):
        tx = make((lambda _: given) if is_called else given)
        return tx.update(grads, tx.init(params), params, attention_stats=STATS)

    (found, state), (expected, desired) = updated(entries), updated(whole)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = map(jax.tree.leaves, ((found, state), (expected, desired)))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(x, y)


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
