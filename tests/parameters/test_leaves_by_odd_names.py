"""Leaves of names that no library of stock layers has: right, or asked about."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(inputs, outputs, bias=True):
    kernel = {"kernel": leaf(inputs, outputs)}
    return kernel | ({"bias": leaf(outputs)} if bias else {})


def chain(*sizes, name="layers."):
    pairs = itertools.pairwise(sizes)
    return {f"{name}{i}": dense(*pair) for i, pair in enumerate(pairs)}


def model(extra, width=64):
    """Three blocks, in each of which is `extra`, of as many features."""
    mlp = {"up": dense(width, 4 * width), "down": dense(4 * width, width)}
    block = {"mlp": mlp, "norm": {"scale": leaf(width)}, "cell": extra}
    blocks = {f"block_{i}": block for i in range(3)}
    return blocks | {"embed": {"embedding": leaf(99, width)}}


def label(params, path):
    """The label of a leaf, or "asked"."""
    try:
        labels = mc.param_labels(params)
    except ValueError as error:
        lines = str(error).split("Let the loss decide")[0].splitlines()
        if any(line.split()[0] == path for line in lines[1:]):
            return "asked"
        raise
    for name in path.split("/"):
        labels = labels[name]
    return labels


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # Mixing of streams and of heads; each was a matrix without a word.
        ("res_beta", (4, 4), "asked"),
        ("h_res", (2, 2), "asked"),
        ("static_mix", (4, 5), "asked"),
        ("stream_weights", (3, 4), "asked"),
        ("mix_before_softmax", (12, 12), "asked"),
        ("gamma_of_heads", (8, 16), "asked"),
        ("to_streams", (4, 1), "vector"),
        # Scalars and gains of one axis, however they are kept.
        ("layer_scalar", (1, 1), "vector"),
        ("layer_scalars", (5, 5), "vector"),
        ("alpha", (1, 7), "vector"),
        ("alpha", (1, 1, 7), "vector"),
        # Rotary parts of queries and keys; positions of queries are a table.
        ("k_pe", (64, 4), "asked"),
        ("w_q_rope", (64, 32), "asked"),
        ("rope_k", (64, 8), "asked"),
        ("query_pos", (100, 64), "vector"),
        ("diag_kernel", (9, 64), "asked"),
    ],
)
@pytest.mark.parametrize("has_kernel", [False, True])
def test_arrays_in_a_block(name, shape, expected, has_kernel):
    """Alone in their module, or alongside a kernel with a bias."""
    extra = {name: leaf(*shape)} | (dense(64, 64) if has_kernel else {})
    assert label(model(extra), f"block_0/cell/{name}") == expected


def test_layers_of_a_mixture_are_scanned_at_axis_one():
    norm, mlp = leaf(64, 5), {"kernel": leaf(64, 5, 256)}
    block = {"norm": {"scale": norm}, "mlp": {"wi": mlp}, "res_beta": leaf(4, 5, 4)}
    scanned = {"decoder": {"blocks": block}, "embed": {"embedding": leaf(99, 64)}}
    assert label(scanned, "decoder/blocks/res_beta") == "asked"
    block |= {"res_beta": leaf(4, 5), "layer_scalar": leaf(1, 5, 5)}
    assert label(scanned, "decoder/blocks/layer_scalar") == "vector"


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        ("k_pe", (64, 4), "asked"),  # nothing takes four features
        ("q_rope", (64, 64), "matrix"),
        ("mix", (4, 4), "asked"),
        ("mix_dense", (4, 4), "matrix"),
        ("alphas", (6, 64), "matrix"),
    ],
)
def test_kernels_in_a_block(module, shape, expected):
    extra = {module: {"kernel": leaf(*shape)}}
    assert label(model(extra), f"block_0/cell/{module}/kernel") == expected


@pytest.mark.parametrize("features", [8, 12])
def test_arrays_of_a_small_model_are_matrices(features):
    """Few rows are many where there are no more features."""
    params = {"up": leaf(features, 4), "b": leaf(4, features), "c": leaf(4, 4)}
    assert label(params, "c") == "matrix"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((x, "head") for x in ("logitdense", "LogitDense", "logit_dense", "lmhead")),
        *((x, "head") for x in ("logitslayer", "masklogits", "clshead")),
        *((x, "asked") for x in ("vocab_dense", "classifier_fc", "prediction")),
        *((x, "asked") for x in ("predictor", "quality_readout", "readouts")),
        *((x, "matrix") for x in ("logit_key", "pre_logits", "pre_classifier")),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_heads_in_compound_words(name, expected, bias):
    """As large as what layers take, so that sizes say nothing."""
    params = model({}) | {
        "heads": {name: dense(64, 64, bias)},
        "lm_head": dense(64, 99),
    }
    assert label(params, f"heads/{name}/kernel") == expected


@pytest.mark.parametrize("module", ["iou_prediction_head", "score_net", "boxes"])
@pytest.mark.parametrize("name", ["layers.", "layers_", "Dense_"])
def test_the_last_layer_of_a_head(module, name):
    """As in Segment Anything, whose layers Scenic calls `layers.2`."""
    params = model({}) | {module: chain(64, 64, 64, 12, name=name)}
    params |= {"lm_head": dense(64, 99)}
    assert label(params, f"{module}/{name}2/kernel") == "asked"
    rules = {f"{module}/{name}2/kernel": None}
    labels = mc.param_labels(params, dimension_numbers=rules)
    assert labels[module][f"{name}1"]["kernel"] == "matrix"


@pytest.mark.parametrize("irreps", ["", " 32x0e,32x0e"])
def test_weights_of_e3nn_are_kernels(irreps):
    """Its names say which pair of irreducible representations they are of."""
    block = {"linear": {f"w[{i},{i}]{irreps}": leaf(32, 32) for i in range(2)}}
    params = model(block, width=32) | {"readout": {f"w[0,0]{irreps}": leaf(32, 1)}}
    assert label(params, f"block_0/cell/linear/w[1,1]{irreps}") == "matrix"
    assert label(params, f"readout/w[0,0]{irreps}") == "vector"
    params["readout"] = {f"w[0,0]{irreps}": leaf(32, 7)}
    with pytest.raises(ValueError, match=r"readout/w\[0,0\].*may write the output"):
        mc.param_labels(params)
