"""Leaves whose names alone would say something else than their model does."""

import math

import optax
import pytest
from containers import table
from trees import abstract, dense, linear, matrices_of, nested, run, tree_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")

MLP = {"up/kernel": (64, 256), "down/kernel": (256, 64)}
VOCABULARY = {"embed/embedding": (99, 64), "down/kernel": (256, 64)}
LAYERS = linear("blk/fc1", 256, 64) | linear("blk/fc2", 64, 256)
BLOCK = dense("block/glu", 64, 344) | dense("block/back", 172, 64)
TABLES_AND_GAINS = {
    "shared/weight": (3200, 64),  # T5 as PyTorch has it
    "attn/relative_attention_bias/weight": (32, 8),
    "attn/rel_pos_bias/w": (32, 8),
    "perceiver/latents": (256, 64),
    "resampler/latents": (1, 256, 64),
    "quantizer/codebook": (1024, 64),
    "quantizer/codebook/weight": (1024, 64),
    "quantizers/codebooks": (8, 1024, 64),
    "quantizer/codevectors": (1, 640, 64),  # Wav2Vec2
    "soft_prompt": (20, 64),
    "dino/prototypes": (256, 64),
    "blocks/layer_scale": (12, 64),
    "blocks/attn_gain": (1, 64),
}
LIKE_TABLES_AND_GAINS = {
    "shared/kernel": (64, 256),  # a trunk
    "shared/up/weight": (256, 64),  # an expert
    "pair_bias/weight": (256, 64),  # a layer, of features of pairs
    "latents_proj/kernel": (64, 256),
    "scale_up/kernel": (64, 256),
    "prompt_encoder/weight": (256, 64),
}

#: Leaves by path, and which of them are matrices.
READ = {
    # Brax calls all layers of its policies so.
    "the last of a run of hidden layers is the head": (
        run("hidden_", 87, 32, 32, 16),
        "hidden_0/kernel hidden_1/kernel",
    ),
    "as many classes as a window is wide or a picture has colors": (
        dense("Conv_0", 3, 3, 3, 32) | dense("a", 512, 64) | dense("b", 64, 3),
        "Conv_0/kernel a/kernel",
    ),
    # As in RecurrentGemma: (window, channels).
    **{
        f"a depthwise convolution over {n} steps": (
            {"conv_1d/w": (n, 256), "conv_1d/b": (256,), "up/w": (256, 64)},
            "up/w",
        )
        for n in (4, 8)
    },
    # The gate of a shared expert, and Keras' windows: one output for each input.
    **{
        f"one output, {shape}": (
            {"block/expanded_depthwise/kernel": shape, "block/up/kernel": (64, 72)},
            "block/up/kernel",
        )
        for shape in ((64, 1), (3, 3, 72, 1), (5, 16, 1))
    },
    # In a network of one block, where nothing takes as many inputs.
    "values and gates in one kernel are no head": (
        BLOCK | {"block/norm/scale": (64,)} | dense("last", 64, 10),
        "block/glu/kernel block/back/kernel",
    ),
    **{
        f"axes of one, as of {[*others]}, take no outputs of a head": (
            run("Dense_", 17, 64, 64, 1) | others,
            "Dense_0/kernel Dense_1/kernel",
        )
        for others in (
            {},
            {"log_std": (1, 6)},
            {"cls": (1, 1, 64)},
            {"prelu/alpha": (1, 8)},
        )
    },
    **{
        f"a bias shorter than the weight makes {name} a layer": (
            LAYERS | linear(f"blk/{name}", 384, 64) | {"blk/norm/weight": (64,)},
            f"blk/fc1/weight blk/fc2/weight blk/{name}/weight",
        )
        for name in ("adaLN_modulation", "norm_gate", "pos_mlp")
    },
    **{
        f"{name}, called a projection": (
            {f"blk/{name}/weight": (64, 64), "blk/norm/weight": (64,)},
            f"blk/{name}/weight",
        )
        for name in ("pos_q_proj", "norm_linear", "embed_projection")
    },
    "stacked gains with shifts": (
        {"layers/norm/weight": (12, 64), "layers/norm/bias": (12, 64)}
        | {"layers/up/weight": (12, 9, 64)},
        "layers/up/weight",
    ),
    **{
        f"{path} is a table or a gain": (MLP | {path: shape}, " ".join(MLP))
        for path, shape in TABLES_AND_GAINS.items()
    },
    **{
        f"{path} is a layer": (VOCABULARY | {path: shape}, f"{path} down/kernel")
        for path, shape in LIKE_TABLES_AND_GAINS.items()
    },
    # Alongside a bias that is not theirs, too.
    **{
        f"{path} is a table": (
            {f"net/{path}": (999, 24), "net/bias": (5,), "up/w": (24, 96)},
            "up/w",
        )
        for path in (
            *("tok", "tok_emb", "W_E", "query_emb", "emb_var", "embeddings_0_9"),
            *("tok/weight", "tok_emb/w", "W_E/weight", "emb/w"),
        )
    },
    **{
        f"{path} is a head": ({path: (24, 999), "emb_proj": (24, 48)}, "emb_proj")
        for path in ("unemb", "W_U", "net/unemb", "net/unembed")
    },
    "an array as large as the vocabulary that nothing takes is a head": (
        {"tok_emb": (999, 24), "up": (24, 96), "down": (96, 24), "z": (24, 999)},
        "up down",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_matrices_of_a_tree(name):
    leaves, matrices = READ[name]
    assert matrices_of(leaves) == set(matrices.split())


@pytest.mark.parametrize("name", ["adaLN_modulation", "norm_gate", "pos_mlp"])
def test_a_bias_shorter_than_the_weight_makes_a_layer_of_any_name_in_haiku(name):
    shapes = {"fc1": (64, 256), "fc2": (256, 64), "norm": (64,), name: (64, 384)}
    layers = {f"blk/{k}": {"w": x, "b": x[-1:]} for k, x in shapes.items()}
    mask = mc.matrix_mask(abstract(layers))
    assert mask[f"blk/{name}"]["w"] and not mask["blk/norm"]["w"]


@pytest.mark.parametrize("head", ["out", "proj_out", "decoder"])
@pytest.mark.parametrize("first", ["in_proj", "kv_proj", "up_proj"])
def test_one_module_outside_of_the_layers_turns_no_weights(first, head):
    """Equinox keeps all of them as (out, in); none of these has a bias."""
    layer = {"a": {first: {"weight": (48, 16)}}, "norm": {"weight": (16,)}}
    shapes = {"embed": {"weight": (99, 16)}, head: {"weight": (99, 16)}}
    found = mc.flax_dimension_numbers(abstract(shapes | {"layers": [layer, layer]}))
    for i in range(2):
        assert tuple(found["layers"][i]["a"][first]["weight"]) == (-1, -2)


def test_a_gain_for_each_head_next_to_its_projection_makes_no_stack():
    leaves = {f"{x}/kernel": (32, 4, 8) for x in ("query", "key", "value")}
    leaves |= {"query/norm/scale": (4, 8), "key/norm/scale": (4, 8)}
    found = mc.flax_dimension_numbers(tree_of(leaves | {"out/kernel": (4, 8, 32)}))
    assert found["query"]["norm"]["scale"] is None
    assert tuple(found["query"]["kernel"]) == (-3, (-2, -1))


def test_a_path_of_pytorch_in_one_name_is_read_like_one_in_modules():
    leaves = linear("up", 96, 24) | linear("down", 24, 96) | {"norm/weight": (24,)}
    flat = {f"net.0.{path}".replace("/", "."): x for path, x in leaves.items()}
    found = table(abstract(flat))
    assert found["net.0.up.weight"] == (1, 24, 96)
    assert found["net.0.norm.weight"] is None


def test_features_unfolded_to_a_picture_are_no_head_without_a_question():
    """As in a DCGAN: nothing but a reshape says who takes 7 x 7 x 64 of them."""
    leaves = run("Dense_", 20, 48, 3136) | dense("ConvTranspose_0", 4, 4, 64, 32)
    with pytest.raises(ValueError, match="Dense_1/kernel"):
        matrices_of(leaves | dense("ConvTranspose_1", 4, 4, 32, 3))


@pytest.mark.parametrize("name", ["b_proj", "in_proj_ba", "pair_bias"])
def test_numbers_of_heads_are_asked_about(name):
    """Labs differ on them; with as many outputs as something takes it is a layer."""
    leaves = {f"attn/{name}/kernel": (64, 4), "attn/o_proj/kernel": (48, 64)}
    with pytest.raises(ValueError, match="cannot decide") as error:
        matrices_of(leaves)
    assert f"attn/{name}" in str(error.value) and "o_proj" not in str(error.value)
    leaves[f"attn/{name}/kernel"] = (64, 48)
    assert matrices_of(leaves) == leaves.keys()


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


def test_a_path_with_brackets_is_a_pattern_of_itself():
    params = tree_of({"layers[0]/w": (8, 8), "layers[1]/w": (8, 8)})
    rules = {"layers[0]/w": None}
    found = mc.flax_dimension_numbers(params, dimension_numbers=rules)
    assert found["layers[0]"]["w"] is None and found["layers[1]"]["w"] is not None


def test_the_gain_of_a_norm_stays_one_where_a_mask_hides_its_shift():
    norm = {"layers/norm/weight": (12, 64), "layers/norm/bias": optax.MaskedNode()}
    layers = {"layers/up/weight": (12, 256, 64), "layers/down/weight": (12, 64, 256)}
    mask = mc.matrix_mask(tree_of(norm | layers))["layers"]
    assert not mask["norm"]["weight"] and mask["up"]["weight"]


@pytest.mark.parametrize("window", [(5,), (3, 3), (3, 5), (3, 3, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_depthwise_convolutions_hold_no_matrix(window, has_bias):
    """One input for each output, as Flax, Haiku and PyTorch keep them."""
    layers = dense("block/up", 24, 96) | dense("block/down", 96, 24)
    flax = dense("block/Conv_0", *window, 1, 24, bias=has_bias)
    assert matrices_of(flax | layers) == {"block/up/kernel", "block/down/kernel"}
    layers = dense("up", 24, 96) | dense("down", 96, 24)
    haiku = {"depthwise_conv2_d/w": (*window, 1, 24), "depthwise_conv2_d/b": (24,)}
    assert matrices_of(haiku | layers) == {"up/kernel", "down/kernel"}
    layers = linear("block/up", 96, 24) | linear("block/down", 24, 96)
    layers |= {"block/conv/weight": (24, 1, *window)}
    if has_bias:
        layers["block/conv/bias"] = (24, *(1 for _ in window))
    assert matrices_of(layers) == {"block/up/weight", "block/down/weight"}


@pytest.mark.parametrize("name", ["dw", "block", "0"])
def test_depthwise_convolutions_under_other_names(name):
    """Flax: by the bias, or by a square window; else a question."""
    assert not matrices_of(dense(name, 5, 1, 24))
    assert not matrices_of(dense(name, 7, 7, 1, 24, bias=False))
    with pytest.raises(ValueError, match=rf"{name}/kernel \(5, 1, 24\)"):
        matrices_of(dense(name, 5, 1, 24, bias=False))


@pytest.mark.parametrize("window", [(1,), (1, 1), (2, 1), (3, 3), (6,), (6, 6)])
@pytest.mark.parametrize("name", ["conv", "layers"])
def test_windows_of_pytorch_layouts_are_read_whole(window, name):
    """Of as many inputs as outputs, and as wide: the bias ends in ones."""
    leaves = linear("net/a", 12, 6) | linear("net/b", 6, 12)
    leaves[f"net/{name}/weight"] = (6, 6, *window)
    leaves[f"net/{name}/bias"] = (6, *(1 for _ in window))
    matrix = (1, 6 * math.prod(window), 6)
    assert table(tree_of(leaves))[f"net/{name}/weight"] == matrix


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
    with pytest.raises(ValueError, match="cannot decide which axes") as error:
        mc.flax_dimension_numbers(tree_of({f"stem/{leaf}": shape}))
    assert f'"stem/{leaf}": MuonDimensionNumbers{numbers}' in str(error.value)


def test_gains_over_two_axes_with_their_shifts_are_no_matrices():
    """Equinox's `LayerNorm((24, 40))` in a list, with no name of its own."""
    gain = {"weight": (24, 40), "bias": (24, 40)}
    layers = linear("0", 40, 24) | linear("3", 9, 40) | {"2/weight": (24, 40)}
    layers = nested(layers) | {"1": gain}
    layers = [layers[str(i)] for i in range(4)]
    text = mc.describe(abstract({"layers": layers}), attention=[])
    rows = {row.split()[0]: row for row in text.splitlines() if row}
    assert "adamw      norm" in rows["layers/1/weight"]
    # Without its shift it looks like a layer, but its number says nothing.
    assert "outputs first?" in rows["layers/2/weight"]
    assert "outputs first " in rows["layers/0/weight"]
