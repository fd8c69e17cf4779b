"""What is said of the architectures of 2026, by reading and by names alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import ARCHITECTURES
from helpers import few, is_numbers, normal
from written_out import Leaf, Seen

import muonclip_jax as mc


# Where a reading is wrong. Projections to one number for each stream, which go to AdamW
# in the field, are read as matrices.
KNOWN = {
    "hyper-connections": {
        f"layers/{i}/{of}_hyper_connection/dynamic_alpha_fn"
        for i in range(2)
        for of in ("attn", "ffn")
    }
}


def flat(tree, is_leaf=None):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def expected(architecture):
    return flat(architecture.leaves, lambda x: isinstance(x, Leaf))


def shapes(architecture):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        architecture.leaves,
        is_leaf=lambda x: isinstance(x, Leaf),
    )


def said(leaves, labels, numbers):
    """As the architecture says it, with axes counted from the front."""

    def in_front(axes, rank):
        return axes % rank if isinstance(axes, int) else tuple(i % rank for i in axes)

    labels = flat(labels)
    numbers = flat(numbers, is_numbers)
    return {
        path: Leaf(
            leaf.shape,
            labels[path],
            *(in_front(axes, len(leaf.shape)) for axes in numbers[path] or ()),
        )
        for path, leaf in leaves.items()
    }


def differing(found, leaves):
    assert found.keys() == leaves.keys()
    return {path: found[path] for path in leaves if found[path] != leaves[path]}


@functools.cache
def read(name):
    architecture = ARCHITECTURES[name]

    def loss(params, *inputs):
        return architecture.loss(params, *inputs, None)

    return mc.read_model(loss, shapes(architecture), *architecture.inputs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_reading_knows_every_leaf(name):
    architecture = ARCHITECTURES[name]
    reading, leaves = read(name), expected(architecture)
    assert not reading.unknown
    found = said(leaves, reading.labels, reading.dimension_numbers)
    wrong = differing(found, leaves)
    assert wrong.keys() == KNOWN.get(name, set()), wrong


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_is_where_a_softmax_is(name):
    architecture = ARCHITECTURES[name]
    reading = read(name)
    found = {
        layer.path: tuple(
            tuple(leaf.path for leaf in leaves)
            for leaves in (layer.query, layer.key, layer.rotary_query)
        )
        for layer in reading.attention
    }
    assert found == {path: layer[1:] for path, layer in architecture.layers.items()}
    assert len(reading.refused) == len(architecture.refused)
    # Qwen3-Next's norms of query and key have gains that are differences from one.
    reasons = "norm without a gain", "gain of 1 + g"
    assert all(any(x in why for x in reasons) for why in reading.refused)


WITH_ATTENTION = [name for name, a in ARCHITECTURES.items() if a.layers]


def arrays(architecture):
    """Params and inputs; counts for what is looked up."""
    leaves, treedef = jax.tree.flatten(shapes(architecture))
    params = [normal((1, i), *x.shape) for i, x in enumerate(leaves)]
    generator = np.random.default_rng(2)
    inputs = [
        jnp.asarray(
            generator.normal(size=x.shape)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else generator.integers(9, size=x.shape),
            x.dtype,
        )
        for x in architecture.inputs
    ]
    return treedef.unflatten(params), inputs


@functools.cache
def written_out(name):
    """The value and the largest logits of each layer, compiled."""

    @jax.jit
    def run(params, *inputs):
        seen: Seen = {}
        return ARCHITECTURES[name].loss(params, *inputs, seen), seen

    return run


def nested(path, leaf):
    for key in reversed(path.split("/")):
        leaf = {key: leaf}
    return leaf


@pytest.mark.parametrize("name", few(WITH_ATTENTION, "DiT"))
def test_recorded_logits_are_those_written_out(name):
    architecture = ARCHITECTURES[name]
    params, inputs = arrays(architecture)

    def loss(params, *inputs):  # takes no maximum but the softmax's own
        return architecture.loss(params, *inputs, None)

    value, stats = jax.jit(mc.record_attention(loss))(params, *inputs)
    expected_value, seen = written_out(name)(params, *inputs)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    found = {path.removesuffix("/max_logits"): x for path, x in flat(stats).items()}
    assert found.keys() == seen.keys() == architecture.layers.keys()
    for path, layer in architecture.layers.items():
        assert found[path].shape == (layer.heads,)
        np.testing.assert_allclose(found[path], seen[path], rtol=1e-5)


@pytest.mark.parametrize("name", few(WITH_ATTENTION, "DiT", "AlphaFold"))
def test_what_a_reading_scales_brings_heads_to_their_threshold(name):
    params, inputs = arrays(ARCHITECTURES[name])
    _, before = written_out(name)(params, *inputs)
    for layer in read(name).attention:
        largest = np.asarray(before[layer.path])
        threshold = float(np.median(largest))  # some heads are above it, some are not
        stats = nested(layer.path, {"max_logits": largest})
        clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, attention=[layer])
        _, after = written_out(name)(clipped, *inputs)
        expected = np.minimum(largest, threshold)
        np.testing.assert_allclose(after[layer.path], expected, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_alone_are_right_or_ask(name):
    architecture = ARCHITECTURES[name]
    params, leaves = shapes(architecture), {**expected(architecture)}
    for path, leaf in leaves.items():  # names do not show what acts by a choice alone
        leaves[path] = leaf._replace(label="vector") if leaf.label == "frozen" else leaf
    asked: set[str] = set()
    try:
        labels = mc.param_labels(params)
    except ValueError as error:
        asked = set(re.findall(r"^  (\S+) \(\d", str(error), re.M)) & leaves.keys()
        assert asked and "mc.read_model" in str(error)
        patterns = {path: None for path in asked}
        labels = mc.param_labels(params, dimension_numbers=patterns)
        numbers = mc.flax_dimension_numbers(params, dimension_numbers=patterns)
    else:
        numbers = mc.flax_dimension_numbers(params)
    wrong = differing(said(leaves, labels, numbers), leaves)
    assert wrong.keys() - asked == set(), wrong
