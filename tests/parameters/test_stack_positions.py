"""`stack_axes`: a leaf is what it is in one layer, wherever the layers are stacked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


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


@pytest.mark.parametrize("axis", [1, 2, -2, -3])
def test_scalars_of_layers_are_stacked_along_their_only_axis(axis):
    """They lack the axis of the layers that the kernels next to them have."""
    place = axis if axis >= 0 else axis + 3
    shapes = {"kernel": np.insert([6, 5], place, 3), "scale": (3,), "count": ()}
    params = {"l": {name: jnp.ones(shape) for name, shape in shapes.items()}}
    found = mc.flax_dimension_numbers(params, stack_axes={"l": axis})
    inputs, outputs = (i for i in range(3) if i != place)
    own = (np.ravel(x)[0] % 3 for x in found["l"]["kernel"])
    assert found["l"]["scale"] is found["l"]["count"] is None
    assert (*own,) == (inputs, outputs)


def test_a_head_leaf_out_of_range_names_the_leaf():
    leaf = mc.HeadLeaf("wq", 2, split=(2, -1), stack_axis=2)
    owned = leaf.owned((8, 6, 3))
    assert owned.heads == 2 and owned.stack == (2,)
    with pytest.raises(ValueError, match="stack_axis=3 is out of range for 'wq'"):
        leaf._replace(stack_axis=3).owned((8, 6, 3))
    two = leaf._replace(stack_axis=-1).owned((8, 6, 3, 5))
    assert two.stack == (2, 3) and two.heads == 2
