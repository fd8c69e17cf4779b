"""Parameter trees of real models by others, against an expert's verdict per leaf."""

import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


FILES = sorted((pathlib.Path(__file__).parents[1] / "data/trees").glob("*.json"))


def build(leaves):
    tree = {}
    for leaf in leaves:
        node = tree
        for key in leaf["path"][:-1]:
            node = node.setdefault(key, {})
        node[leaf["path"][-1]] = jax.ShapeDtypeStruct(
            tuple(leaf["shape"]), leaf["dtype"]
        )
    return tree


def look_up(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def sides(answer, shape):
    """Inputs and outputs as sets of axes from the front, without those of size 1."""
    if answer is None or answer == "adamw":
        return None
    if isinstance(answer, dict):
        answer = answer["reduction"], answer["output"]
    both = [[axes] if isinstance(axes, int) else axes for axes in answer]
    return tuple(
        frozenset(a % len(shape) for a in axes if shape[a] != 1) for axes in both
    )


def agree(answer, verdict, shape):
    if answer is None or verdict is None:
        return answer == verdict
    fan_in, fan_out = (math.prod(shape[a] for a in axes) for axes in verdict)
    return answer == verdict or (answer == verdict[::-1] and fan_in == fan_out)


def check(leaf, answer):
    shape = leaf["shape"]
    verdicts = [sides(v, shape) for v in (leaf["want"], *leaf["alternatives"])]
    found = sides(answer, shape)
    path = "/".join(leaf["path"])
    assert any(agree(found, v, shape) for v in verdicts), (path, shape, answer)


def rules_in(message):
    """The mapping that an error prints, as a user pastes it."""
    code = message[message.index("from optax") : message.index("}") + 1]
    names = {}
    exec(code, names)
    return names["dimension_numbers"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_right_or_asked_in_a_way_that_one_paste_answers(file):
    model = json.loads(file.read_text())
    params, rules, asked = build(model["leaves"]), None, 0
    try:
        numbers = mc.flax_dimension_numbers(params)
    except ValueError as error:
        rules = rules_in(str(error))
        asked = [line for line in str(error).splitlines() if line.startswith("  ")]
        assert all(
            leaf["asking_is_fine"]
            for leaf in model["leaves"]
            if f"  {'/'.join(leaf['path'])} {tuple(leaf['shape'])}" in asked
        )
        numbers = mc.flax_dimension_numbers(params, dimension_numbers=rules)
    for leaf in model["leaves"]:
        check(leaf, look_up(numbers, leaf["path"]))
    assert "why" in mc.describe(params, dimension_numbers=rules, attention=[])


def test_hardly_any_leaf_is_asked_about():
    leaves = asked = 0
    for file in FILES:
        model = json.loads(file.read_text())
        leaves += len(model["leaves"])
        try:
            mc.flax_dimension_numbers(build(model["leaves"]))
        except ValueError as error:
            asked += str(error).split("\nSay it")[0].count("\n  ")
    assert leaves > 500 and asked / leaves < 0.04


def dense(features, outputs):
    shapes = {"kernel": (features, outputs), "bias": (outputs,)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


def test_an_unnamed_head_is_seen_in_the_whole_tree_alone():
    """The mask hides it; the layer in front of it is none, though nothing takes it."""
    sizes = (20, 16, 12, 9, 7, 5)
    layers = itertools.pairwise(sizes)
    params = {f"Dense_{i}": dense(*pair) for i, pair in enumerate(layers)}
    mask = mc.matrix_mask(params)
    assert [mask[name]["kernel"] for name in sorted(mask)] == [True] * 4 + [False]
    tx = optax.masked(mc.scale_by_muon(), mc.matrix_mask)
    updates, _ = tx.update(params, tx.init(params), params)
    assert (updates["Dense_4"]["kernel"] == 1).all()
    assert (updates["Dense_3"]["kernel"] != 1).all()


PARAMS = {
    "embed": {"embedding": jax.ShapeDtypeStruct((50, 8), "float32")},
    "layers": {
        str(i): {
            "experts_up": jax.ShapeDtypeStruct((4, 8, 16), "float32"),
            "up": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")},
        }
        for i in range(3)
    },
}
MATRIX = MuonDimensionNumbers(-2, -1)


def test_the_longest_pattern_wins_and_the_rest_is_automatic():
    rules = {
        "*experts_up": MATRIX,
        "layers/1/experts_up": None,
        "layers/*": None,
        "layers/0/up*": "auto",
    }
    found = mc.flax_dimension_numbers(PARAMS, dimension_numbers=rules)
    layers = found["layers"]
    assert layers["0"] == {"experts_up": MATRIX, "up": {"kernel": MATRIX}}
    assert layers["1"] == {"experts_up": None, "up": {"kernel": None}}
    assert found["embed"]["embedding"] is None
    by_muon = mc.muon(1.0, dimension_numbers=rules)
    assert mc.describe(PARAMS, dimension_numbers=rules).count("given") == 5
    assert by_muon.init(PARAMS)


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"layer/*": MATRIX}, r"no parameter matches 'layer/\*'"),
        ({"*": 3}, r"dimension_numbers of '\*' is 3"),
        ({"*": "adamw"}, r"dimension_numbers of '\*' is 'adamw'"),
        ({"layers": {"0": MATRIX}}, "no entry for"),  # a tree
    ],
)
def test_rules_that_say_nothing_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        mc.muon(1.0, dimension_numbers=rules).init(PARAMS)


def test_keys_of_the_params_make_a_prefix_and_no_patterns():
    numbers = {"embed": None, "layers": MATRIX}
    found = mc.describe(PARAMS, dimension_numbers=numbers, attention=[])
    assert found.count("4 x 8 x 16") == found.count("1 x 8 x 16") == 3
