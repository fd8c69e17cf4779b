"""Leaves whose names alone would say something else than their model does."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from containers import table

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


def test_a_gain_for_each_head_next_to_its_projection_makes_no_stack():
    projection = {"kernel": (32, 4, 8), "norm": {"scale": (4, 8)}}
    shapes = {"query": projection, "key": projection, "value": {"kernel": (32, 4, 8)}}
    shapes["out"] = {"kernel": (4, 8, 32)}
    found = mc.flax_dimension_numbers(abstract({"attn": shapes}))["attn"]
    assert found["query"]["norm"]["scale"] is None
    numbers = found["query"]["kernel"]
    assert (numbers.reduction_axis, numbers.output_axis) == (-3, (-2, -1))


def test_a_path_of_pytorch_in_one_name_is_read_like_one_in_modules():
    shapes = {"up": linear(96, 24), "down": linear(24, 96), "norm": {"weight": (24,)}}
    flat = {f"net.0.{m}.{n}": x for m, leaf in shapes.items() for n, x in leaf.items()}
    found = table(abstract(flat))
    assert found["net.0.up.weight"] == (1, 24, 96)
    assert found["net.0.norm.weight"] is None


def test_features_unfolded_to_a_picture_are_no_head_without_a_question():
    """As in a DCGAN: nothing but a reshape says who takes 7 x 7 x 64 of them."""
    shapes = {f"Dense_{i}": x for i, x in enumerate(dense((20, 48), (48, 3136)))}
    windows = dense((4, 4, 64, 32), (4, 4, 32, 3))
    shapes |= {f"ConvTranspose_{i}": x for i, x in enumerate(windows)}
    with pytest.raises(ValueError, match="Dense_1/kernel"):
        mc.matrix_mask(abstract(shapes))


def test_a_depthwise_convolution_over_time_is_no_matrix():
    """As in RecurrentGemma: (window, channels)."""
    shapes = {"conv_1d": {"w": (4, 256), "b": (256,)}, "up": {"w": (256, 64)}}
    mask = mc.matrix_mask(abstract(shapes))
    assert not mask["conv_1d"]["w"] and mask["up"]["w"]


@pytest.mark.parametrize("name", ["b_proj", "in_proj_ba", "pair_bias"])
def test_numbers_of_heads_are_asked_about(name):
    """Labs differ on them; with as many outputs as something takes it is a layer."""
    shapes = {name: {"kernel": (64, 4)}, "o_proj": {"kernel": (48, 64)}}
    with pytest.raises(ValueError, match="cannot decide") as error:
        mc.matrix_mask(abstract({"attn": shapes}))
    assert f"attn/{name}" in str(error.value) and "o_proj" not in str(error.value)
    shapes[name] = {"kernel": (64, 48)}
    mask = mc.matrix_mask(abstract({"attn": shapes}))["attn"]
    assert mask[name]["kernel"] and mask["o_proj"]["kernel"]


@pytest.mark.parametrize("shape", [(64, 1), (3, 3, 72, 1), (5, 16, 1)])
def test_one_output_is_no_matrix(shape):
    """The gate of a shared expert, and Keras' windows: one output for each input."""
    tree = {"expanded_depthwise": {"kernel": shape}, "up": {"kernel": (64, 72)}}
    mask = mc.matrix_mask(abstract({"block": tree}))["block"]
    assert not mask["expanded_depthwise"]["kernel"] and mask["up"]["kernel"]


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_in_one_leaf_whichever_way_round(is_turned):
    """GPT-OSS has inputs first, DeepSeek-V3 in HuggingFace has outputs."""
    experts = {"gate_up_proj": (5, 64, 40), "down_proj": (5, 20, 64)}
    if is_turned:
        experts = {name: (e, n, m) for name, (e, m, n) in experts.items()}
    mlp = {"router": {"kernel": (64, 5)}, "experts": experts}
    found = mc.flax_dimension_numbers(abstract({"mlp": mlp}))["mlp"]["experts"]
    expected = (-1, -2) if is_turned else (-2, -1)
    assert all(tuple(numbers) == expected for numbers in found.values())


def test_values_and_gates_in_one_kernel_are_no_head():
    """In a network of one block, where nothing takes as many inputs."""
    into, out, head = dense((64, 344), (172, 64), (64, 10))
    layer = {"norm": {"scale": (64,)}, "glu": into, "back": out}
    mask = mc.matrix_mask(abstract({"block": layer, "last": head}))
    assert mask["block"]["glu"]["kernel"] and mask["block"]["back"]["kernel"]
    assert not mask["last"]["kernel"]


@pytest.mark.parametrize(
    "others",
    [{}, {"log_std": (1, 6)}, {"cls": (1, 1, 64)}, {"prelu": {"alpha": (1, 8)}}],
)
def test_axes_of_one_take_no_outputs_of_a_head(others):
    sizes = dense((17, 64), (64, 64), (64, 1))
    layers = {f"Dense_{i}": layer for i, layer in enumerate(sizes)}
    mask = mc.matrix_mask(abstract(layers | others))
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
        ("pair_bias/weight", (256, 64)),  # a layer, of features of pairs
        ("latents_proj/kernel", (64, 256)),
        ("scale_up/kernel", (64, 256)),
        ("prompt_encoder/weight", (256, 64)),
    ],
)
def test_layers_after_tables_and_gains_are_matrices(path, shape):
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


def told(params, path):
    return {name: view for name, view in table(params).items() if path in name}


@pytest.mark.parametrize("window", [(5,), (3, 3), (3, 5), (3, 3, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_depthwise_convolutions_hold_no_matrix(window, has_bias):
    """One input for each output, as Flax, Haiku and PyTorch keep them."""
    denses = {"up": dense((24, 96))[0], "down": dense((96, 24))[0]}
    bias = {"bias": (24,)} if has_bias else {}
    flax = {"Conv_0": {"kernel": (*window, 1, 24)} | bias} | denses
    assert told(abstract({"block": flax}), "Conv_0/kernel") == {
        "block/Conv_0/kernel": None
    }
    haiku = {"depthwise_conv2_d": {"w": (*window, 1, 24)} | {"b": (24,)}, **denses}
    assert not told(abstract(haiku), "conv2_d/w")["depthwise_conv2_d/w"]
    bias = {"bias": (24, *(1 for _ in window))} if has_bias else {}
    layers = {"conv": {"weight": (24, 1, *window)} | bias, "up": linear(96, 24)}
    layers |= {"down": linear(24, 96)}
    assert not told(abstract({"block": layers}), "conv/weight")["block/conv/weight"]


@pytest.mark.parametrize("name", ["dw", "block", "0"])
def test_depthwise_convolutions_under_other_names(name):
    """Flax: by the bias, or by a square window; else a question."""
    with_bias = {name: {"kernel": (5, 1, 24), "bias": (24,)}}
    assert not any(table(abstract(with_bias)).values())
    square = table(abstract({name: {"kernel": (7, 7, 1, 24)}}))
    assert square == {f"{name}/kernel": None}
    with pytest.raises(ValueError, match=rf"{name}/kernel \(5, 1, 24\)"):
        table(abstract({name: {"kernel": (5, 1, 24)}}))


@pytest.mark.parametrize("window", [(1,), (1, 1), (2, 1), (3, 3), (6,), (6, 6)])
@pytest.mark.parametrize("name", ["conv", "layers"])
def test_windows_of_pytorch_layouts_are_read_whole(window, name):
    """Of as many inputs as outputs, and as wide: the bias ends in ones."""
    layer = {"weight": (6, 6, *window), "bias": (6, *(1 for _ in window))}
    shapes = {"a": linear(12, 6), "b": linear(6, 12), name: layer}
    matrix = (1, 6 * math.prod(window), 6)
    assert table(abstract({"net": shapes}))[f"net/{name}/weight"] == matrix


@pytest.mark.parametrize(
    ("leaf", "shape", "numbers"),
    [
        ("weight", (8, 8, 1, 1), ((-3, -2, -1), -4)),
        ("weight", (16, 8, 3, 16), ((-3, -2, -1), -4)),
        ("weight", (16, 8, 5), ((-2, -1), -3)),
        ("weight", (4, 64, 32), (-2, -1)),
        ("kernel", (3, 3, 8, 16), ((-4, -3, -2), -1)),
        ("kernel", (4, 2, 64, 32), (-2, -1)),
    ],
)
def test_the_guess_to_paste_takes_a_window_whole(leaf, shape, numbers):
    params = abstract({"stem": {leaf: shape}})
    with pytest.raises(ValueError, match="cannot decide which axes") as error:
        mc.flax_dimension_numbers(params)
    assert f'"stem/{leaf}": MuonDimensionNumbers{numbers}' in str(error.value)


def test_gains_over_two_axes_with_their_shifts_are_no_matrices():
    """Equinox's `LayerNorm((24, 40))` in a list, with no name of its own."""
    gain = {"weight": (24, 40), "bias": (24, 40)}
    layers = [linear(40, 24), gain, {"weight": (24, 40)}, linear(9, 40)]
    text = mc.describe(abstract({"layers": layers}), attention=[])
    rows = {row.split()[0]: row for row in text.splitlines() if row}
    assert "adamw      norm" in rows["layers/1/weight"]
    # Without its shift it looks like a layer, but its number says nothing.
    assert "outputs first?" in rows["layers/2/weight"]
    assert "outputs first " in rows["layers/0/weight"]


@pytest.mark.parametrize(
    "path",
    [
        *("tok", "tok_emb", "W_E", "query_emb", "emb_var", "embeddings_0_9"),
        *("tok/weight", "tok_emb/w", "W_E/weight", "emb/w"),
    ],
)
def test_tables_as_arrays_and_in_modules(path):
    """Alongside a bias that is not theirs, too."""
    shapes = nested(f"net/{path}", (999, 24)) | {"up": {"w": (24, 96)}}
    shapes["net"] |= {"bias": (5,)}
    assert told(abstract(shapes), path) == {f"net/{path}": None}


@pytest.mark.parametrize("name", ["unemb", "W_U", "net/unemb", "net/unembed"])
def test_heads_as_arrays(name):
    assert not any(table(abstract(nested(name, (24, 999)))).values())
    assert table(abstract({"emb_proj": (24, 48)}))["emb_proj"]


def test_an_array_as_large_as_the_vocabulary_is_a_head_where_nothing_takes_it():
    shapes = {"tok_emb": (999, 24), "up": (24, 96), "down": (96, 24), "z": (24, 999)}
    found = table(abstract(shapes))
    assert found["z"] is None and found["up"] == (1, 24, 96)
