"""`stack_axes`: a leaf is what it is in one layer, wherever the layers are stacked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import matrix_views, paths
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


LAYER = {
    "attn": {
        **{
            n: {"kernel": np.ones((16, 4, 8)), "bias": np.ones((4, 8))}
            for n in ("query", "key", "value")
        },
        "out": {"kernel": np.ones((4, 8, 16)), "bias": np.ones(16)},
    },
    "up": {"kernel": np.ones((16, 24)), "bias": np.ones(24)},
    "conv": {"kernel": np.ones((3, 5, 7, 16)), "bias": np.ones(16)},
    "w": np.ones((6, 16)),
    "sinks": np.ones(4),
    "scalar": np.ones(()),
}
LAYERS = 3


def stacked(axis: int):
    """As `nn.scan` does; numbers have no other axis than the first."""

    def stack(x):
        return np.stack([x] * LAYERS, axis if x.ndim else 0)

    return {"layers": jax.tree.map(stack, LAYER), "w": np.ones((2, 2))}


def views(params, **options):
    find = functools.partial(mc.flax_dimension_numbers, **options)
    tree = paths.flatten(params)
    return dict(zip(tree.paths, matrix_views(find, tree), strict=True))


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_layer_is_as_it_is_alone(axis, per_head):
    leaf_at = paths.flatten(stacked(axis)).by_path()
    found = views(stacked(axis), stack_axes={"layers": axis}, per_head=per_head)
    for path, alone in views(LAYER, per_head=per_head).items():
        view, leaf = found["layers", *path], leaf_at["layers", *path]
        if alone is None:
            assert view is None, path
            continue
        place = axis % leaf.ndim
        assert place in view.batch and view.count == LAYERS * alone.count
        assert (view.fan_in, view.fan_out) == (alone.fan_in, alone.fan_out)
        # Each layer holds its own number, and so must each matrix.
        numbers = np.arange(LAYERS).reshape(-1, *(1,) * (leaf.ndim - place - 1))
        marked = jnp.asarray(np.broadcast_to(numbers, leaf.shape))
        per_matrix = np.asarray(view.to_matrices(marked)).reshape(view.count, -1)
        assert (per_matrix == per_matrix[:, :1]).all(), path


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5), st.integers(-6, 6))
def test_an_axis_is_normalized_or_refused(rank, axis):
    shape = tuple(range(2, 2 + rank))
    params = {"a": {"b": {"kernel": np.ones(shape), "gain": np.ones(2)}}}
    for find in (mc.flax_dimension_numbers, mc.flax_attention_layers):
        find = functools.partial(find, stack_axes={"a": axis})
        if -rank <= axis < rank:
            continue
        with pytest.raises(ValueError) as error:
            find(params)
        for word in ("'a'", "'a/b/kernel'", str(shape), str(axis)):
            assert word in str(error.value)
    if rank == 3 and -rank <= axis < rank:
        numbers = mc.flax_dimension_numbers(params, stack_axes={"a": axis})["a"]["b"]
        first, second = (i - rank for i in range(rank) if i != axis % rank)
        assert numbers == {"kernel": Numbers(first, second), "gain": None}


@pytest.mark.parametrize("axis, shape", [(1, (7, 3)), (0, (3, 7)), (-1, (7, 3))])
def test_a_vector_or_number_per_layer_is_no_matrix(axis, shape):
    params = {"layers": {"gain": np.ones(shape), "scalar": np.ones(3)}}
    find = functools.partial(mc.flax_dimension_numbers, stack_axes={"layers": axis})
    assert find(params) == {"layers": {"gain": None, "scalar": None}}
    assert find({"layers": {"w": np.ones((3, 3, 3))}})["layers"]["w"] is not None


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, -4])
def test_heads_are_found_and_scaled_wherever_the_stack_is(axis):
    """The reference clips each layer alone."""
    generator = np.random.default_rng(0)
    draw = {"query": (3, 6, 2, 4), "key": (3, 6, 2, 4)}
    alone = {n: {"kernel": generator.normal(size=s)} for n, s in draw.items()}
    logits = np.asarray([[5.0, 400.0], [300.0, 7.0], [1.0, 2.0]])
    each = [
        mc.clip_qk(
            jax.tree.map(lambda p, i=i: jnp.asarray(p[i]), alone),
            {"max_logits": jnp.asarray(logits[i])},
            alpha=0.3,
        )
        for i in range(3)
    ]
    place = axis if axis >= 0 else axis + 4
    params = {"l": jax.tree.map(lambda p: jnp.asarray(np.moveaxis(p, 0, place)), alone)}
    stats = {"l": {"max_logits": jnp.asarray(logits)}}
    find = functools.partial(mc.flax_attention_layers, stack_axes={"l": axis})
    after = mc.clip_qk(params, stats, alpha=0.3, attention=find)
    for name in draw:
        expected = np.stack([layer[name]["kernel"] for layer in each], place)
        np.testing.assert_allclose(after["l"][name]["kernel"], expected, rtol=1e-6)
    table = mc.describe(
        params, dimension_numbers=Numbers(0, 1), attention=find, per_head=True
    )
    assert table.count("6 x 6 x 4") == 2


def test_a_head_leaf_out_of_range_names_the_leaf():
    leaf = mc.HeadLeaf("wq", 2, split=(2, -1), stack_axis=2)
    owned = leaf.owned((8, 6, 3))
    assert owned.heads == 2 and owned.stack == (2,)
    with pytest.raises(ValueError, match="stack_axis=3 is out of range for 'wq'"):
        leaf._replace(stack_axis=3).owned((8, 6, 3))
    two = leaf._replace(stack_axis=-1).owned((8, 6, 3, 5))
    assert two.stack == (2, 3) and two.heads == 2
