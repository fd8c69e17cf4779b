"""Parameter trees of real models by others, against an expert's verdict per leaf."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import first_update
from optax.contrib import MuonDimensionNumbers
from trees import rules_in, run, tree_of
from trees_of_others import build, count, is_listed, is_right, look_up, read_models

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


MODELS = read_models()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["model"])
def test_right_or_asked_in_a_way_that_one_paste_answers(model):
    params, rules = build(model["leaves"]), None
    try:
        numbers = mc.flax_dimension_numbers(params)
    except ValueError as error:
        rules, message = rules_in(str(error)), str(error)
        assert any(is_listed(leaf, message) for leaf in model["leaves"])
        numbers = mc.flax_dimension_numbers(params, dimension_numbers=rules)
    for leaf in model["leaves"]:
        answer = look_up(numbers, leaf["path"])
        assert is_right(leaf, answer), (leaf["path"], leaf["shape"], answer)
    assert "why" in mc.describe(params, dimension_numbers=rules, attention=[])


@pytest.mark.more
def test_hardly_any_leaf_is_asked_about():
    counts = sum((count(model["leaves"]) for model in MODELS), collections.Counter())
    assert counts["leaves"] > 2500 and counts["wrong"] == 0
    assert counts["asked"] / counts["leaves"] < 0.02


def test_an_unnamed_head_is_seen_in_the_whole_tree_alone():
    """The mask hides it; the layer in front of it is none, though nothing takes it."""
    sizes = (20, 16, 12, 9, 7, 5)
    params = tree_of(run("Dense_", *sizes))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    mask = mc.matrix_mask(params)
    assert [mask[name]["kernel"] for name in sorted(mask)] == [True] * 4 + [False]
    tx = optax.masked(mc.scale_by_muon(), mc.matrix_mask)
    updates = first_update(tx, params, params)
    assert (updates["Dense_4"]["kernel"] == 1).all()
    assert (updates["Dense_3"]["kernel"] != 1).all()


PARAMS = tree_of(
    {"embed/embedding": (50, 8)}
    | {f"layers/{i}/experts_up": (4, 8, 16) for i in range(3)}
    | {f"layers/{i}/up/kernel": (8, 16) for i in range(3)}
)
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
    table = mc.describe(PARAMS, dimension_numbers=rules, collapse=False)
    assert table.count("given") == 5
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
    found = mc.describe(PARAMS, dimension_numbers=numbers, attention=[], collapse=False)
    assert found.count("4 x 8 x 16") == found.count("1 x 8 x 16") == 3
