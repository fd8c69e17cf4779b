"""The description of the heads says which matrices each of them is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_zoo import FusedAttention, GEMMA, LATENT, LatentAttention
from helpers import inputs, linen_variables, normal
from internals import paths
from layers import fused_layer, latent_layer
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def test_per_head_matrices_from_the_description():
    """Latent and Gemma's kernels, in front and at axis 1 stacked."""
    latent = {
        "layers": {
            "wq_b": {"kernel": jnp.ones((6, 3, 4, 8))},
            "wkv_b": {"kernel": jnp.ones((5, 3, 4, 7))},
            "up": {"kernel": jnp.ones((2, 9))},
        }
    }
    find = [latent_layer("layers", 4, stack_axis=1)]
    table = mc.describe(
        latent, attention=find, dimension_numbers=mc.per_head_dimension_numbers(find)
    )
    for shape in ("12 x 6 x 8", "12 x 5 x 7", "1 x 2 x 9"):
        assert shape in table
    gemma = {"q_einsum": jnp.ones((4, 16, 8)), "kv_einsum": jnp.ones((2, 4, 16, 8))}
    per_head = mc.per_head_dimension_numbers(
        [GEMMA], dimension_numbers=MuonDimensionNumbers(-2, -1)
    )
    table = mc.describe(gemma, attention=[GEMMA], dimension_numbers=per_head)
    assert "4 x 16 x 8" in table and "8 x 16 x 8" in table


def test_heads_in_groups_are_a_matrix_each():
    shapes = {"query": (16, 2, 3, 4), "key": (16, 2, 4)}
    params = {
        "attn": {
            name: {"kernel": normal(i, *shape)}
            for i, (name, shape) in enumerate(shapes.items())
        }
    }
    leaves = (mc.HeadLeaf("query/kernel", 4, axis=(-3, -2)),)
    layer = mc.AttentionLayer("attn", leaves, (mc.HeadLeaf("key/kernel", 3),))
    find = mc.per_head_dimension_numbers([layer])
    tx = mc.scale_by_muon(dimension_numbers=find, consistent_rms=None)
    updates, _ = tx.update(params, tx.init(params), params)
    query, found = (x["attn"]["query"]["kernel"] for x in (params, updates))
    of_heads = mc.newton_schulz(jnp.moveaxis(query, 0, 2))
    np.testing.assert_allclose(found, jnp.moveaxis(of_heads, 2, 0), atol=1e-5)


def test_per_head_matrices_need_an_axis_of_heads():
    params = linen_variables(FusedAttention(), inputs())["params"]
    with pytest.raises(ValueError, match="'c_attn/kernel' has no axis of heads"):
        mc.per_head_dimension_numbers([fused_layer("", 8)])(params)


def test_latent_attention_kernels_are_matrices_over_fused_axes():
    params = jax.eval_shape(LatentAttention().init, jax.random.key(0), inputs())[
        "params"
    ]
    tree = paths.flatten(
        mc.flax_dimension_numbers(params),
        is_leaf=lambda n: n is None or hasattr(n, "output_axis"),
    )
    numbers = {paths.show(p): n for p, n in zip(tree.paths, tree.leaves, strict=True)}
    assert (
        numbers["wq_b/kernel"].output_axis
        == numbers["wkv_b/kernel"].output_axis
        == (-2, -1)
    )
    assert "query, 4 heads + rotary_query, 4 heads" in mc.describe(
        params, attention=[LATENT]
    )
