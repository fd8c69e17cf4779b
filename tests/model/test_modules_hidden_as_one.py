"""A mask or a label for a whole module is as good as one for each of its leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import as_pure, one_at_a_time
from jax.sharding import Mesh, PartitionSpec
from layers import flat_layer
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def layer(*shape):
    def projection():
        return {"kernel": jnp.ones(shape), "bias": jnp.ones(shape[1:])}

    return {"query": projection(), "key": projection(), "up": {"w": jnp.ones((4, 6))}}


PARAMS = {name: layer(8, 2, 4) for name in ("l0", "l1", "l2")}
STATS = {name: {"max_logits": jnp.asarray([5.0, 500.0])} for name in PARAMS}


def spread(prefix, tree=None):
    """The full tree that a prefix means, by optax's rule."""
    tree = PARAMS if tree is None else tree
    return jax.tree.map(
        lambda entry, below: jax.tree.map(lambda _: entry, below), prefix, tree
    )


def step(tx, params, **extra):
    grads = jax.tree.map(jnp.ones_like, params)
    return tx.update(grads, tx.init(params), params, **extra)[0]


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)


FLAT = {n: {m: {"kernel": jnp.ones((8, 8))} for m in ("query", "key")} for n in PARAMS}
FLAT_LAYERS = [flat_layer(name, 4, "query", "key") for name in PARAMS]
PREFIXES = [
    {"l0": False, "l1": True, "l2": True},
    {"l0": {"query": False, "key": False, "up": True}, "l1": True, "l2": False},
    False,
    True,
]


@pytest.mark.parametrize(
    "attention, prefix", one_at_a_time([None, "layers", "partial"], PREFIXES)
)
def test_qk_clip_under_a_prefix_mask(prefix, attention):
    if attention:
        attention = mc.flax_attention_layers(PARAMS)
    if attention == "partial":
        axes = {"l0": 0}
        attention = functools.partial(mc.flax_attention_layers, stack_axes=axes)
    updates = [
        step(
            optax.masked(mc.qk_clip(attention=attention), mask),
            PARAMS,
            attention_stats=STATS,
        )
        for mask in (prefix, spread(prefix))
    ]
    assert_same(*updates)


@pytest.mark.parametrize("prefix", [PREFIXES[0], False, True])
def test_described_layers_under_a_prefix_mask(prefix):
    updates = [
        step(
            optax.masked(mc.qk_clip(attention=FLAT_LAYERS), m),
            FLAT,
            attention_stats=STATS,
        )
        for m in (prefix, spread(prefix, FLAT))
    ]
    assert_same(*updates)


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


LABELS = {"l0": "frozen", "l1": "muon", "l2": {"query": "muon", "key": "muon"}}
NUMBERS = mc.flax_dimension_numbers(PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {"dimension_numbers": NUMBERS},
        {"dimension_numbers": NUMBERS | {"l1": None}},
        {"per_head": True},
        {
            "dimension_numbers": functools.partial(
                mc.flax_dimension_numbers, stack_axes={"l0/up": 0}
            )
        },
        {"weight_decay_mask": {"l0": True, "l1": False, "l2": True}},
        {"weight_decay_mask": spread({"l0": True, "l1": False, "l2": True})},
        {"weight_decay_mask": lambda p: {"l0": True, "l1": False, "l2": True}},
        {"weight_decay_mask": mc.matrix_mask},
        {"shardings": jax.tree.map(lambda p: PartitionSpec(), PARAMS)},
    ],
)
def test_labels_of_modules_next_to_trees_of_all_leaves(options):
    labels = LABELS | {"l2": LABELS["l2"] | {"up": "frozen"}}
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))

    def optimizer(labels):
        tx = mc.muon(
            0.1,
            weight_decay=0.3,
            orthogonalizer=mc.NewtonSchulz((1, 0, 0), steps=1),
            **options,
        )
        return optax.partition({"muon": tx, "frozen": optax.set_to_zero()}, labels)

    with jax.set_mesh(mesh):
        assert_same(*(step(optimizer(x), PARAMS) for x in (labels, spread(labels))))


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
