"""Leaves whose names alone would say something else than their model does."""

import jax
import jax.numpy as jnp
import optax
import pytest

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def abstract(shapes):
    """A tree of abstract arrays from one of shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def dense(*shapes):
    return [{"kernel": shape, "bias": shape[-1:]} for shape in shapes]


@pytest.mark.parametrize("head", ["out", "proj_out", "decoder"])
@pytest.mark.parametrize("first", ["in_proj", "kv_proj", "up_proj"])
def test_one_module_outside_of_the_layers_turns_no_weights(first, head):
    """Equinox keeps all of them as (out, in); none of these has a bias."""
    layer = {"a": {first: {"weight": (48, 16)}}, "norm": {"weight": (16,)}}
    shapes = {"embed": {"weight": (99, 16)}, head: {"weight": (99, 16)}}
    found = mc.flax_dimension_numbers(abstract(shapes | {"layers": [layer, layer]}))
    for i in range(2):
        numbers = found["layers"][i]["a"][first]["weight"]
        assert (numbers.reduction_axis, numbers.output_axis) == (-1, -2)


def test_last_of_a_run_of_hidden_layers_is_the_head():
    """Brax calls all layers of its policies so."""
    sizes = dense((87, 32), (32, 32), (32, 16))
    mask = mc.matrix_mask(
        abstract({f"hidden_{i}": layer for i, layer in enumerate(sizes)})
    )
    assert [mask[f"hidden_{i}"]["kernel"] for i in range(3)] == [True, True, False]


def test_as_many_classes_as_a_window_is_wide_or_a_picture_has_colors():
    convolution, *layers = dense((3, 3, 3, 32), (512, 64), (64, 3))
    shapes = {"Conv_0": convolution, "Dense_0": layers[0], "Dense_1": layers[1]}
    mask = mc.matrix_mask(abstract(shapes))
    assert [mask[name]["kernel"] for name in shapes] == [True, True, False]


def test_a_gain_for_each_head_beside_its_projection_makes_no_stack():
    projection = {"kernel": (32, 4, 8), "norm": {"scale": (4, 8)}}
    shapes = {"query": projection, "key": projection, "value": {"kernel": (32, 4, 8)}}
    shapes["out"] = {"kernel": (4, 8, 32)}
    found = mc.flax_dimension_numbers(abstract({"attn": shapes}))["attn"]
    assert found["query"]["norm"]["scale"] is None
    numbers = found["query"]["kernel"]
    assert (numbers.reduction_axis, numbers.output_axis) == (-3, (-2, -1))


def test_a_depthwise_convolution_over_time_is_no_matrix():
    """As in RecurrentGemma: (window, channels)."""
    shapes = {"conv_1d": {"w": (4, 256), "b": (256,)}, "up": {"w": (256, 64)}}
    mask = mc.matrix_mask(abstract(shapes))
    assert not mask["conv_1d"]["w"] and mask["up"]["w"]


def test_values_and_gates_in_one_kernel_are_no_head():
    """In a network of one block, where nothing takes as many inputs."""
    into, out, head = dense((64, 344), (172, 64), (64, 10))
    layer = {"norm": {"scale": (64,)}, "glu": into, "back": out}
    mask = mc.matrix_mask(abstract({"block": layer, "last": head}))
    assert mask["block"]["glu"]["kernel"] and mask["block"]["back"]["kernel"]
    assert not mask["last"]["kernel"]


@pytest.mark.parametrize(
    "beside",
    [{}, {"log_std": (1, 6)}, {"cls": (1, 1, 64)}, {"prelu": {"alpha": (1, 64)}}],
)
def test_axes_of_one_take_no_outputs_of_a_head(beside):
    sizes = dense((17, 64), (64, 64), (64, 1))
    layers = {f"Dense_{i}": layer for i, layer in enumerate(sizes)}
    mask = mc.matrix_mask(abstract(layers | beside))
    assert [mask[name]["kernel"] for name in layers] == [True, True, False]


def nested(path, shape):
    for name in reversed(path.split("/")):
        shape = {name: shape}
    return shape


def linear(outputs, inputs):
    return {"weight": (outputs, inputs), "bias": (outputs,)}


@pytest.mark.parametrize("name", ["adaLN_modulation", "norm_gate", "pos_mlp"])
def test_a_bias_shorter_than_the_weight_makes_a_layer_of_any_name(name):
    shapes = {name: linear(384, 64), "norm": linear(64, 64) | {"weight": (64,)}}
    shapes |= {"fc1": linear(256, 64), "fc2": linear(64, 256)}
    mask = mc.matrix_mask(abstract({"blk": shapes}))["blk"]
    assert mask[name]["weight"] and not mask["norm"]["weight"]
    haiku = {
        f"blk/{k}": {"w": v["weight"][::-1], "b": v["bias"]} for k, v in shapes.items()
    }
    mask = mc.matrix_mask(abstract(haiku))
    assert mask[f"blk/{name}"]["w"] and not mask["blk/norm"]["w"]


@pytest.mark.parametrize("name", ["pos_q_proj", "norm_linear", "embed_projection"])
def test_what_is_called_a_projection_is_a_layer(name):
    shapes = {name: {"weight": (64, 64)}, "norm": {"weight": (64,)}}
    mask = mc.matrix_mask(abstract({"blk": shapes}))["blk"]
    assert mask[name]["weight"] and not mask["norm"]["weight"]


def test_stacked_gains_with_shifts_stay_gains():
    shapes = {
        "norm": {"weight": (12, 64), "bias": (12, 64)},
        "up": {"weight": (12, 9, 64)},
    }
    mask = mc.matrix_mask(abstract({"layers": shapes}))["layers"]
    assert not mask["norm"]["weight"] and mask["up"]["weight"]


def test_a_path_with_brackets_is_a_pattern_of_itself():
    params = abstract({"layers[0]": {"w": (8, 8)}, "layers[1]": {"w": (8, 8)}})
    rules = {"layers[0]/w": None}
    found = mc.flax_dimension_numbers(params, dimension_numbers=rules)
    assert found["layers[0]"]["w"] is None and found["layers[1]"]["w"] is not None


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("shared/weight", (3200, 64)),  # T5 as PyTorch has it
        ("attn/relative_attention_bias/weight", (32, 8)),
        ("attn/rel_pos_bias/w", (32, 8)),
        ("perceiver/latents", (256, 64)),
        ("resampler/latents", (1, 256, 64)),
        ("quantizer/codebook", (1024, 64)),
        ("quantizer/codebook/weight", (1024, 64)),
        ("quantizers/codebooks", (8, 1024, 64)),
        ("quantizer/codevectors", (1, 640, 64)),  # Wav2Vec2
        ("soft_prompt", (20, 64)),
        ("dino/prototypes", (256, 64)),
        ("blocks/layer_scale", (12, 64)),
        ("blocks/attn_gain", (1, 64)),
    ],
)
def test_tables_and_gains_by_other_names(path, shape):
    tree = {"up": {"kernel": (64, 256)}, "down": {"kernel": (256, 64)}}
    mask = mc.matrix_mask(abstract(tree | nested(path, shape)))
    assert sum(jax.tree.leaves(mask)) == 2 and mask["up"]["kernel"]


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("shared/kernel", (64, 256)),  # a trunk
        ("shared/up/weight", (256, 64)),  # an expert
        ("pair_bias/weight", (8, 64)),  # a layer, of features of pairs
        ("latents_proj/kernel", (64, 256)),
        ("scale_up/kernel", (64, 256)),
        ("prompt_encoder/weight", (256, 64)),
    ],
)
def test_layers_behind_tables_and_gains_are_matrices(path, shape):
    tree = {"embed": {"embedding": (99, 64)}, "down": {"kernel": (256, 64)}}
    mask = mc.matrix_mask(abstract(tree | nested(path, shape)))
    assert sum(jax.tree.leaves(mask)) == 2 and mask["down"]["kernel"]


def test_the_gain_of_a_norm_stays_one_where_a_mask_hides_its_shift():
    norm = {"weight": jax.ShapeDtypeStruct((12, 64), jnp.float32)}
    layers = {"norm": norm | {"bias": optax.MaskedNode()}} | abstract(
        {"up": {"weight": (12, 256, 64)}, "down": {"weight": (12, 64, 256)}}
    )
    mask = mc.matrix_mask({"layers": layers})["layers"]
    assert not mask["norm"]["weight"] and mask["up"]["weight"]
