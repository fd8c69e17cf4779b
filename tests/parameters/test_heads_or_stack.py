"""Query, key and value: heads or a stack, wherever it is, or an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from containers import table
from helpers import one_at_a_time
from optax.contrib import MuonDimensionNumbers as Numbers
from trees import dense, tree_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def kernel(*shape):
    return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}


def norm(*shape):
    return {"scale": jax.ShapeDtypeStruct(shape, jnp.float32)}


def three(*shape, kv=None):
    return {"query": kernel(*shape)} | {n: kernel(*(kv or shape)) for n in KV}


KV = ("key", "value")


def projections(params):
    found = table(params)
    return {view for path, view in found.items() if path.split("/")[-2] in THREE}


THREE = ("query", "key", "value")


@pytest.mark.parametrize("count, name", one_at_a_time([12, 5], ["o_proj", "wo", "out"]))
def test_an_output_with_as_many_layers_tells_a_stack(name, count):
    params = {"layers": three(count, 8, 16) | {name: kernel(count, 16, 8)}}
    assert projections(params) == {(count, 8, 16)}


@pytest.mark.parametrize(
    "block",
    [
        {"attn": three(12, 8, 16), "ln": norm(12, 8)},
        {"attn": {"inner": three(12, 8, 16)}, "ln": norm(12, 8), "up": kernel(12, 8, 4)}
        | {"down": kernel(12, 4, 8)},
        three(12, 8, 16) | {"ln": norm(12, 8)},
        three(12, 8, 16)
        | {"proj": {**kernel(12, 16, 8), "bias": norm(12, 8)["scale"]}},
        three(12, 8, 16, kv=(12, 8, 4)),  # grouped queries side by side
    ],
)
def test_whatever_else_is_scanned_tells_a_stack(block):
    params = {"layers": block, "norm": norm(8), "head": kernel(8, 50)}
    assert {count for count, *_ in projections(params)} == {12}


@pytest.mark.parametrize(
    "module, expected",
    [
        (three(16, 4, 8) | {"out": kernel(4, 8, 16)}, {(1, 16, 32)}),
        (three(16, 4, 8) | {"o_proj": kernel(4, 8, 16)}, {(1, 16, 32)}),
        (three(16, 4, 8) | {"o_proj": kernel(32, 16)}, {(1, 16, 32)}),
        ({"query": kernel(8, 4, 4), "out": kernel(4, 4, 8)}, {(1, 8, 16)}),
        (three(16, 4, 8, kv=(16, 2, 8)), {(1, 16, 32), (1, 16, 16)}),
        (three(16, 4, 8, kv=(12, 4, 8)), {(1, 16, 32), (1, 12, 32)}),
        (three(32, 4, 8), {(1, 32, 32)}),
        (three(8, 8, 1) | {"out": kernel(8, 1, 8)}, {(1, 8, 8)}),
        (three(3, 16, 4, 8), {(3, 16, 32)}),
    ],
)
def test_heads_are_known_whatever_the_output_is_called(module, expected):
    params = {"block": {"attn": module, "ln": norm(16), "up": kernel(16, 64)}}
    assert projections(params) == expected
    outputs = {v for p, v in table(params).items() if p.split("/")[-2][0] == "o"}
    assert outputs <= {(1, 32, 16), (1, 8, 8), (1, 16, 8)}


@pytest.mark.parametrize(
    "module",
    [
        three(12, 32, 32),
        three(16, 16, 16) | {"proj": kernel(16, 16, 16)},  # 16 layers of width 16
        # Words that others than attention use for an output, too.
        three(12, 8, 16) | {"proj": kernel(12, 16, 8)},
        three(12, 8, 16) | {"output": kernel(12, 16, 8)},
        {name: kernel(4, 16, 16) for name in ("query", "key")},
        # Kernels alongside attention may have an axis of their own.
        three(12, 8, 16) | {"mlp_up": kernel(12, 16, 8)},
        three(2, 3, 8, 16) | {"out": kernel(2, 3, 16, 8)},
        three(16, 3, 4, 8) | {"out": kernel(4, 3, 8, 16)},  # layers at axis 1
    ],
)
def test_what_nothing_settles_is_an_error_that_lists_the_paths(module):
    with pytest.raises(ValueError, match="(?s)layers/key/kernel.*layers/query/kernel"):
        mc.describe({"layers": module})


def test_scanned_plain_kernels_have_no_heads_to_clip():
    params = {"layers": three(12, 32, 32) | {"ln": norm(12, 32)}}
    assert "do not fit together: 'layers/query/kernel'" in mc.describe(params)
    message = "'layers/query/kernel'.*mc.read_model.*attention="
    with pytest.raises(ValueError, match=message):
        mc.qk_clip().init(params)


def test_a_hidden_query_leaves_the_key_what_it_was():
    module = three(16, 4, 8) | {"out": kernel(4, 8, 16)}
    params = {"attn": module | {"query": optax.MaskedNode()}}
    assert table(params)["attn/key/kernel"] == (1, 16, 32)


@pytest.mark.parametrize("siblings", [{}, {"embed": {"embedding": jnp.ones((5, 4))}}])
def test_a_kernel_at_the_root_goes_by_its_rank(siblings):
    for shape, expected in (((4, 5), (1, 4, 5)), ((4,), None), ((), None)):
        params = {"kernel": jnp.ones(shape)} | siblings
        assert table(params)["kernel"] == expected
    attention = {"query": kernel(8, 2, 4), "key": kernel(8, 2, 4)}
    assert table(attention | {"kernel": jnp.ones((3, 4))})["kernel"] == (1, 3, 4)
    with pytest.raises(ValueError, match=r"kernel \(2, 3, 4, 5\)"):
        mc.describe({"kernel": jnp.ones((2, 3, 4, 5))} | siblings)


@pytest.mark.parametrize("name", ["output_layer", "output", "OutputDense_0"])
def test_the_output_of_the_model_where_sizes_coincide(name):
    """As many bytes as the MLP is wide: nothing but the name shows the head."""
    leaves = {"embedding/embedding": (256, 64)} | dense(name, 64, 256)
    for i in range(2):
        leaves |= dense(f"blocks/{i}/linear1", 64, 256) | {
            f"blocks/{i}/norm/scale": (64,)
        }
        leaves |= dense(f"blocks/{i}/linear2", 256, 64)
    found = mc.flax_dimension_numbers(tree_of(leaves))
    assert found[name]["kernel"] is None
    assert found["blocks"]["0"]["linear1"]["kernel"] is not None


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
    options = dict(dimension_numbers=Numbers(0, 1), attention=find, per_head=True)
    assert mc.describe(params, **options).count("6 x 6 x 4") == 2


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
