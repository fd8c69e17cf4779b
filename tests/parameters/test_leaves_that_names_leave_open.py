"""Leaves that names do not decide: the error lists them, and nothing is wrong silently.

Every tree here is of a kind of model that is in use. Where names say enough, the leaf
is decided.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import ones
from optax.contrib import MuonDimensionNumbers
from trees import nested, rules_in

import muonclip_jax as mc


def dense(inputs, outputs, bias=True):
    kernel = {"kernel": ones(inputs, outputs)}
    return kernel | ({"bias": ones(outputs)} if bias else {})


def conv(*shape):
    return {"kernel": ones(*shape), "bias": ones(shape[-1])}


def weight(inputs, outputs):
    return {"weight": ones(outputs, inputs), "bias": ones(outputs)}


def run(name, *sizes, layer=dense):
    return {f"{name}{i}": layer(*x) for i, x in enumerate(itertools.pairwise(sizes))}


def arrays(**shapes):
    return {name: ones(*shape) for name, shape in shapes.items()}


def window(*channels, last=3):
    sizes = list(itertools.pairwise(channels))
    widths = [3] * (len(sizes) - 1) + [last]
    return [conv(n, n, *size) for n, size in zip(widths, sizes, strict=True)]


MLP = {"up": dense(64, 256), "down": dense(256, 64)}
EMBED = {"embed": {"embedding": ones(99, 64)}}
HEAD = {"head": dense(64, 10)}


def asked(params):
    """The paths that the error lists, and that one paste of its mapping answers it."""
    try:
        mc.matrix_mask(params)
        return set()
    except ValueError as error:
        message = str(error)
    mc.describe(params, dimension_numbers=rules_in(message), attention=[])
    assert "mc.read_model" in message
    lines = message.split("Let the loss decide")[0].splitlines()
    return {line.split()[0] for line in lines[1:]}


#: Params, and the paths that are asked about.
ASKED = {
    # Layers that may write the output.
    "two layers": (run("Dense_", 784, 512, 10), "Dense_1/kernel"),
    "two layers, other names": (
        {"fc1": dense(784, 512), "fc2": dense(512, 10)},
        "fc2/kernel",
    ),
    "two heads of one trunk": (
        run("Dense_", 8, 64, 64) | {"means": dense(64, 9), "angles": dense(64, 5)},
        "means/kernel angles/kernel",
    ),
    "no biases": (
        run("Dense_", 784, 512, 256, 10, layer=lambda *x: dense(*x, bias=False)),
        "Dense_2/kernel",
    ),
    "as many outputs as inputs": (
        {"layers": [weight(4, 64), weight(64, 64), weight(64, 4)]},
        "layers/2/weight",
    ),
    "as many classes as features": (run("Dense_", 64, 128, 128, 128), "Dense_2/kernel"),
    "one layer alongside blocks": (
        {"block": MLP, "Dense_0": dense(64, 64)},
        "Dense_0/kernel",
    ),
    "autoencoder": (
        {
            "encoder": run("Dense_", 784, 256, 64),
            "decoder": run("Dense_", 64, 256, 784),
        },
        "decoder/Dense_1/kernel encoder/Dense_1/kernel",
    ),
    "decoder of pictures": (
        {"conv_in": conv(3, 3, 4, 64), "mid": conv(3, 3, 64, 64)}
        | {"conv_out": conv(3, 3, 64, 3)},
        "conv_out/kernel",
    ),
    "segments": (
        {"enc": conv(3, 3, 3, 32), "dec": conv(3, 3, 32, 32)}
        | {"final": conv(1, 1, 32, 21)},
        "final/kernel",
    ),
    "towers that are compared": (
        {f"{x}_tower": run("Dense_", 64, 128, 32) for x in ("user", "item")},
        "user_tower/Dense_1/kernel item_tower/Dense_1/kernel",
    ),
    # The last layer of a network, whose outputs only its own layers would take.
    "coupling by shift and scale": (
        {f"coupling_{i}": {"net": run("Dense_", 3, 64, 64, 6)} for i in range(3)},
        " ".join(f"coupling_{i}/net/Dense_2/kernel" for i in range(3)),
    ),
    "coupling by two networks": (
        {
            f"layers_{i}": {x: run("Dense_", 2, 64, 64, 2) for x in ("s", "t")}
            for i in range(3)
        },
        " ".join(f"layers_{i}/{x}/Dense_2/kernel" for i in range(3) for x in "st"),
    ),
    "coupling in Haiku": (
        {
            f"coupling_{i}/~/mlp/~/linear_{j}": {"w": ones(*pair), "b": ones(pair[1])}
            for i in range(3)
            for j, pair in enumerate(itertools.pairwise((5, 64, 64, 10)))
        },
        " ".join(f"coupling_{i}/~/mlp/~/linear_2/w" for i in range(3)),
    ),
    "what is left of a series": (
        {
            f"stack_{i}": run("fc", 120, 256, 256) | {"backcast": dense(256, 120)}
            for i in range(3)
        },
        " ".join(f"stack_{i}/backcast/kernel" for i in range(3)),
    ),
    "as many actions as observations": (
        {
            "actor": {"layers": [weight(6, 64), weight(64, 64), weight(64, 6)]},
            "critic": {"layers": [weight(12, 64), weight(64, 64), weight(64, 1)]},
        },
        "actor/layers/2/weight",
    ),
    "a detector's boxes in as many bins as channels": (
        {"stem": conv(3, 3, 3, 64)}
        | {"cv2": {str(i): window(64, 64, 64, 64, last=1) for i in range(2)}}
        | HEAD,
        "cv2/0/2/kernel cv2/1/2/kernel",
    ),
    "as many classes as channels": (
        {f"enc{i}": conv(3, 3, *x) for i, x in enumerate([(3, 32), (32, 32)])}
        | {"outc": conv(1, 1, 32, 32)},
        "outc/kernel",
    ),
    "as many classes as a block is wide": (
        EMBED | {"block": MLP, "fc": dense(64, 256)},
        "fc/kernel",
    ),
    "after a recurrent cell": (
        {
            "embed": {"embeddings": ones(99, 64)},
            "lstm/linear": {"w": ones(192, 512), "b": ones(512)},
            "linear": {"w": ones(128, 2), "b": ones(2)},
        },
        "linear/w",
    ),
    "a layer that says nothing in a module that does": (
        EMBED
        | {"block": MLP}
        | {"final": {"modulation": dense(64, 128), "linear": dense(64, 64)}},
        "final/linear/kernel",
    ),
    "joined with what another gives": (
        {"cross": [dense(416, 416) for _ in range(2)]}
        | {"deep": {"0": dense(416, 256), "1": dense(256, 128)}}
        | {"logit": dense(544, 1)},
        "deep/1/kernel",
    ),
    # As with auxiliary losses: boxes and classes after each layer.
    "what repeated layers of a decoder write": (
        {"layers": [MLP | {"coords": dense(64, 4)}] * 2} | HEAD,
        "layers/0/coords/kernel layers/1/coords/kernel",
    ),
    # Arrays of the shape of what is next to them.
    "masks of kernels": (
        {f"layers_{i}": dense(64, 64) | arrays(mask=(64, 64)) for i in range(2)}
        | {"mlp": MLP},
        "layers_0/mask layers_1/mask",
    ),
    "a vector for each head": (
        {"gat": arrays(W=(64, 8, 16), a_src=(8, 16), a_dst=(8, 16)), "mlp": MLP},
        "gat/W gat/a_src gat/a_dst",
    ),
    "poles of a state space": (
        {"seq": arrays(A_re=(128, 32), C=(128, 32, 2)), "mlp": MLP},
        "seq/A_re seq/C",
    ),
    "a scale for each spline": (
        {"kan": arrays(spline_weight=(16, 4, 8), scaler=(16, 4)), "mlp": MLP},
        "kan/spline_weight kan/scaler",
    ),
    # As `weight` of PyTorch it would have windows of 64 x 64.
    "a weight whose window is in front": (
        {"synthesis": {"fc": weight(64, 64), "conv": arrays(weight=(3, 3, 64, 64))}},
        "synthesis/conv/weight",
    ),
    # A filter of 49 places, entry by entry; tokens are mixed by layers with a bias.
    "what repeated modules take from nobody may be no product": (
        {"blocks": [MLP | {"filter": {"kernel": ones(49, 64)}}] * 2} | HEAD,
        "blocks/0/filter/kernel blocks/1/filter/kernel",
    ),
    # Words of outputs, whatever their sizes.
    **{
        f"an output called {name}": (
            {"Conv_0": conv(3, 3, 3, 64), "Dense_0": dense(64, 64)}
            | {name: dense(64, 64)}
            | HEAD,
            f"{name}/kernel",
        )
        for name in (
            *("class_pred", "bbox_pred", "iou_quality", "score", "policy", "boxes"),
        )
    },
    # What may as well be something else.
    **{
        path: (nested({path: ones(*shape)}) | {"mlp": MLP}, path)
        for path, shape in {
            "ssm/poles": (64, 4),  # few rows may be gains or positions
            "mixer/coefficients": (3, 64),
            "net/Conv_0/kernel": (4, 3, 3, 8, 16),  # or four windows of 3 x 3
            "net/conv/kernel": (2, 5, 8, 16),
        }.items()
    },
    "outputs at either end": (
        {"net": {"symm": {"kernel": ones(8, 3, 8), "bias": ones(8)}}, "mlp": MLP},
        "net/symm/kernel",
    ),
    # Constants, and kernels that are no layers.
    **{
        path: (nested({path: ones(16, 64)}) | {"mlp": run("fc", 64, 128, 64)}, path)
        for path in (
            *("attn/causal_mask", "attn/tril", "attn/freqs_cis", "rope/cos"),
            *("decoder/mask", "fourier_features/kernel", "random_features/w"),
            *("rff/freqs", "hadamard/kernel", "scaling/kernel", "elementwise/weight"),
            "input_layernorm/kernel",  # of stacked layers, as nothing else shows
        )
    },
}

#: Params of which nothing is asked about.
DECIDED = {
    "three layers": run("Dense_", 784, 512, 256, 10),
    "pictures": {"Conv_0": conv(3, 3, 3, 64)} | run("Dense_", 3136, 256, 10),
    "a part of a model": {"up": dense(64, 256)},
    "a block": {"mlp": {"fc1": dense(64, 256), "fc2": dense(256, 64)}},
    "actions and a value": {
        "actor": run("Dense_", 8, 64, 64, 4),
        "critic": run("Dense_", 8, 64, 64, 1),
    },
    "recurrent gates": {
        "cell": {x: dense(96, 64) for x in ("update_gate", "reset_gate", "candidate")},
        "proj": dense(64, 96),
    },
    "gated units": {
        "mlp": {"gate": dense(64, 128), "up": dense(64, 128), "down": dense(128, 64)}
    },
    "squares": {"blocks": [dense(64, 64) for _ in range(3)]},
    "tokens mixed": {"blocks": [MLP | {"mix": run("Dense_", 49, 32, 49)}] * 2} | HEAD,
    "few rows under the name of a layer": {
        "cell": arrays(w_i=(5, 48), weight_hh=(16, 48), up_proj=(3, 64), w=(4, 64)),
        "back": dense(64, 5),
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_what_names_leave_open_is_asked_about(name):
    params, expected = ASKED[name]
    assert asked(params) == set(expected.split())


@pytest.mark.parametrize("name", DECIDED)
def test_what_sizes_tell_is_not_asked_about(name):
    assert not asked(DECIDED[name])


def test_what_is_called_a_projection_is_a_layer():
    """Whatever the other words of its name."""
    mlp = {"up": dense(64, 128), "down": dense(128, 64)}
    layers = {"mlp": mlp, "mask_proj": dense(16, 64), "norm_gate": dense(64, 128)}
    mask = mc.matrix_mask(layers)
    assert mask["mask_proj"]["kernel"] and mask["norm_gate"]["kernel"]


def test_gates_in_a_list_are_what_the_list_is_called():
    """One for each task, of mixtures of experts; in a recurrent cell, layers."""
    experts = [run("Dense_", 39, 128, 64) for _ in range(4)]
    gates = [dense(39, 4, bias=False) for _ in range(2)]
    mixture = {"experts": experts, "tower": dense(64, 1)}
    labels = mc.param_labels(mixture | {"gates": gates})
    assert [x["kernel"] for x in labels["gates"]] == ["router"] * 2
    labels = mc.param_labels(mixture | {"gates": {"a": gates[0], "b": gates[1]}})
    assert labels["gates"]["b"]["kernel"] == "router"
    cell = {"gates": [dense(96, 64) for _ in range(4)]}
    labels = mc.param_labels({"cell": cell, "proj": dense(64, 96)})
    assert [x["kernel"] for x in labels["cell"]["gates"]] == ["matrix"] * 4


def test_logits_are_of_a_head_where_the_word_ends_the_name():
    trunk = run("Dense_", 8, 64, 64)
    named = {"logit_key": dense(64, 64), "class_logits": dense(64, 10)}
    labels = mc.param_labels(trunk | named)
    assert labels["logit_key"]["kernel"] == "matrix"
    assert labels["class_logits"]["kernel"] == "head"


def test_a_gate_of_few_outputs_is_asked_about_unless_experts_are_next_to_it():
    attention = {x: dense(64, 64) for x in ("q_proj", "k_proj", "v_proj", "o_proj")}
    gated = attention | {"gate": dense(64, 4)}
    assert asked({"attn": gated}) == {"attn/gate/kernel"}
    # As wide as what it gates, it is a matrix, also alongside heads that are as many.
    heads = {x: {"kernel": ones(64, 4, 16)} for x in ("query", "key", "value")}
    heads |= {"out": {"kernel": ones(4, 16, 64)}, "gate": dense(64, 64)}
    assert mc.param_labels({"attn": heads})["attn"]["gate"]["kernel"] == "matrix"
    moe = {"gate": dense(64, 4)} | {f"experts_{i}": dense(64, 64) for i in range(4)}
    assert mc.param_labels({"moe": moe})["moe"]["gate"]["kernel"] == "router"


def by_entries(params, x):
    return jnp.sum(jnp.tanh(x * params["Dense_0"]["kernel"]) @ params["up"]["kernel"])


def test_a_known_layer_that_a_reading_takes_for_a_vector_is_asked_about():
    """Either opinion may be wrong: both are given, and the user decides."""
    params = {"Dense_0": {"kernel": ones(8, 16)}, "up": {"kernel": ones(16, 4)}}
    reading = mc.read_model(by_entries, params, ones(8, 16))
    with pytest.raises(ValueError, match="cannot decide") as error:
        mc.muon(1e-3, model=reading).init(params)
    message = str(error.value)
    assert "Dense_0/kernel (8, 16): a kernel by its name" in message
    line = by_entries.__code__.co_firstlineno + 1
    assert f"{__name__.split('.')[-1]}.py:{line}" in message
    assert '"Dense_*/kernel": MuonDimensionNumbers(-2, -1)' in message
    assert "mc.read_model" not in message
    for numbers, label in ((None, "vector"), (MuonDimensionNumbers(0, 1), "matrix")):
        rules = {"Dense_0/*": numbers}
        labels = mc.param_labels(params, model=reading, dimension_numbers=rules)
        assert labels["Dense_0"]["kernel"] == label
        assert mc.muon(1e-3, model=reading, dimension_numbers=rules).init(params)


def test_a_kernel_of_a_module_that_no_name_knows_is_what_the_reading_says():
    params = {"Gain_0": {"kernel": ones(8, 16)}, "up": {"kernel": ones(16, 4)}}

    def loss(params, x):
        return by_entries({"Dense_0": params["Gain_0"], "up": params["up"]}, x)

    reading = mc.read_model(loss, params, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert mc.param_labels(params, model=reading)["Gain_0"]["kernel"] == "vector"


def test_a_deep_model_asks_in_few_lines_that_lead_out():
    """The reading first, then a mapping; each kind of leaf is one line."""
    layer = {
        "experts": {"up": ones(4, 8, 16), "down": ones(4, 16, 8)},
        "mix": {"kernel": ones(8, 3, 2, 8)},
        "proj": {"kernel": ones(8, 8)},
    }
    layers = {f"layers_{i}": layer for i in range(40)}
    params = layers | {"odd": ones(4, 2, 2)} | run("Dense_", 8, 12, 11, 10)
    with pytest.raises(ValueError, match="cannot decide") as error:
        mc.muon(1e-3).init(params)
    question, rest = str(error.value).split("Let the loss decide: model=mc.read_model")
    assert question.splitlines()[1:] == [
        "  layers_0/experts/down (4, 16, 8) and 39 more like layers_*/experts/down",
        "  layers_0/experts/up (4, 8, 16) and 39 more like layers_*/experts/up",
        "  layers_0/mix/kernel (8, 3, 2, 8) and 39 more like layers_*/mix/kernel",
        "  odd (4, 2, 2)",
    ]
    mapping, unsure = rest.split("Decided with little evidence:\n")
    assert mapping.count("MuonDimensionNumbers(") == 4 and len(str(error.value)) < 2000
    assert unsure == (
        "  adamw for Dense_2/kernel (11, 10): output head: nothing takes its outputs?"
    )
