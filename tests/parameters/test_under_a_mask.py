"""A transformation under `optax.masked` reads the same axes as `mc.muon`, or asks."""

import fnmatch
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import first_update, normal, one_at_a_time
from optax.contrib import MuonDimensionNumbers
from trees import is_shape, linear, nested, rules_in
from trees_of_others import build, look_up, read_models

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def arrays(shapes):
    return jax.tree.map(lambda x: normal(x, *x), shapes, is_leaf=is_shape)


def layer(name, *kernel, bias=None):
    return {f"{name}/kernel": kernel, f"{name}/bias": bias or kernel[-1:]}


# What a mask by names shows of these, a reading calls a table and an output head.
LOOKED_UP = {
    "table": normal(0, 64, 16),
    "w": normal(1, 16, 16),
    "b": normal(2, 16),
    "final": normal(3, 16, 64),
}


def classify(params, tokens):
    hidden = jnp.tanh(params["table"][tokens] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["final"]) ** 2)


@pytest.mark.parametrize("is_read, is_given", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("name", ["scale_by_muon", "normalize_neurons"])
def test_the_error_of_a_mask_by_names_says_what_to_write(name, is_read, is_given):
    reading = mc.read_model(classify, LOOKED_UP, jnp.arange(8))
    n = {"tab*": None, "fin*": None}
    options = {"model": reading} if is_read else {}
    options |= {"dimension_numbers": n} if is_given else {}
    make = getattr(mc, name)
    with pytest.raises(ValueError, match="'final', 'table'") as error:
        optax.masked(make(**options), mc.matrix_mask).init(LOOKED_UP)
    written = re.search("Wrap it as (.*), use mc.muon", str(error.value))
    assert written
    names = {"mc": mc, "optax": optax, "functools": functools}
    tx = eval(written[1], names | {"reading": reading, "n": n})
    updates = first_update(tx, LOOKED_UP, LOOKED_UP)
    for leaf in ("table", "b", "final"):
        assert updates[leaf] is LOOKED_UP[leaf]
    assert not np.allclose(updates["w"], LOOKED_UP["w"])


#: Shapes by path.
MODELS = {
    "turned kernels": layer("h/0/c_attn", 36, 12, bias=(36,))
    | layer("h/0/c_fc", 40, 12, bias=(40,))
    | layer("h/0/c_proj", 12, 40, bias=(12,))
    | {"h/0/ln_1/scale": (12,), "h/0/ln_1/bias": (12,), "wte/embedding": (50, 12)},
    "kernels of Flax": layer("up", 12, 40) | layer("down", 40, 12),
    "patches": layer("embedding", 4, 4, 3, 24)
    | layer("up", 24, 48)
    | layer("down", 48, 24),
    "heads": layer("to_heads", 9, 4, 6, bias=(4, 6)) | layer("merge", 4, 6, 9),
    "scanned windows": layer("conv", 5, 3, 8, 8, bias=(5, 8)) | layer("up", 8, 20),
    "layers at axis 1": {
        "layers/norm/scale": (8, 3),
        "layers/mlp/wi/kernel": (8, 3, 8),
        "layers/mlp/wo/kernel": (8, 3, 8),
    },
    "Equinox": {"conv/weight": (12, 4, 3, 3), "conv/bias": (12, 1, 1)}
    | linear("up", 40, 12)
    | linear("down", 12, 40),
}
PARAMS = {name: arrays(nested(leaves)) for name, leaves in MODELS.items()}
SCALES = [0.2, None, "mup"]


def one_step(tx, params):
    return first_update(tx, params, params)


def chain(scale_by_muon):
    others = optax.masked(
        optax.scale_by_adam(b2=0.95),
        lambda p: jax.tree.map(operator.not_, mc.matrix_mask(p)),
    )
    return optax.chain(
        optax.masked(scale_by_muon, mc.matrix_mask),
        others,
        optax.scale_by_learning_rate(1.0),
    )


@pytest.mark.parametrize("name, rms", one_at_a_time(PARAMS, SCALES))
def test_as_muon_does_or_an_error_whose_advice_works(name, rms):
    params = PARAMS[name]
    expected = one_step(mc.muon(1.0, consistent_rms=rms, weight_decay=0.0), params)
    try:
        found = one_step(chain(mc.scale_by_muon(consistent_rms=rms)), params)
    except ValueError as error:
        advice = "dimension_numbers=mc.flax_dimension_numbers(params)"
        assert "mask hides" in str(error) and advice in str(error)
        numbers = mc.flax_dimension_numbers(params)
        told = mc.scale_by_muon(consistent_rms=rms, dimension_numbers=numbers)
        found = one_step(chain(told), params)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("name", ["turned kernels", "kernels of Flax"])
def test_which_side_is_the_input_matters_to_two_scales_alone(name):
    """Nothing in sight distinguishes the two models, whose updates differ."""
    mask = optax.masked(mc.scale_by_muon(), mc.matrix_mask)
    mask.init(PARAMS[name])
    for rms in (None, "mup"):
        tx = mc.scale_by_muon(consistent_rms=rms)
        with pytest.raises(ValueError, match="which axes are the inputs of"):
            optax.masked(tx, mc.matrix_mask).init(PARAMS[name])
    square = arrays(nested(layer("a", 8, 8)))
    tx = mc.scale_by_muon(consistent_rms=None)
    optax.masked(tx, mc.matrix_mask).init(square)


def test_a_vector_in_sight_shows_that_the_mask_is_not_of_matrices():
    """One of matrices hides output heads, too; else a matrix may be one."""
    leaves = {"table/embedding": (50, 8), **layer("up", 8, 24), "z/scale": (8,)}
    params, hidden = arrays(nested(leaves)), optax.MaskedNode()
    params["table"]["embedding"] = params["up"]["bias"] = hidden
    with pytest.raises(ValueError, match=r"up/kernel .*: may write the output"):
        mc.flax_dimension_numbers(params)
    params["z"]["scale"] = hidden
    assert mc.flax_dimension_numbers(params)["up"]["kernel"] is not None


def test_frozen_biases_hide_them_from_muon():
    params = PARAMS["turned kernels"]
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "bias" in jax.tree_util.keystr(path) else "trained",
        params,
    )

    def tx(**options):
        muon = mc.muon(1.0, consistent_rms="mup", **options)
        return optax.partition({"trained": muon, "frozen": optax.set_to_zero()}, labels)

    with pytest.raises(ValueError, match=r"dimension_numbers=mc\.flax_dim"):
        tx().init(params)
    told = tx(dimension_numbers=mc.flax_dimension_numbers(params))
    one_step(told, params)


def sides(numbers, shape):
    """The axes of a matrix that are not of size 1, in either order."""
    both = ([axes] if isinstance(axes, int) else axes for axes in numbers)
    return {
        frozenset(axis % len(shape) for axis in axes if shape[axis] != 1)
        for axes in both
    }


@pytest.mark.parametrize("model", read_models(), ids=lambda model: model["model"])
def test_models_of_others_are_read_as_whole_or_asked_about(model):
    params = build(model["leaves"])
    try:
        whole, rules = mc.flax_dimension_numbers(params), None
    except ValueError as error:
        rules = rules_in(str(error))
        whole = mc.flax_dimension_numbers(params, dimension_numbers=rules)

    def is_numbers(x):
        return x is None or isinstance(x, MuonDimensionNumbers | optax.MaskedNode)

    masked = jax.tree.map(
        lambda n, p: optax.MaskedNode() if n is None else p,
        whole,
        params,
        is_leaf=is_numbers,
    )
    asked = {}
    try:
        found = mc.flax_dimension_numbers(masked, dimension_numbers=rules)
    except ValueError as error:
        assert "mask hides" in str(error)
        asked = rules_in(str(error))
        found = mc.flax_dimension_numbers(
            masked, dimension_numbers=asked | (rules or {})
        )

    def check(path, numbers, leaf, expected):
        name = "/".join(key.key for key in path)
        if isinstance(leaf, optax.MaskedNode) or any(
            name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in asked
        ):
            return
        assert sides(numbers, leaf.shape) == sides(expected, leaf.shape), name

    jax.tree_util.tree_map_with_path(check, found, masked, whole, is_leaf=is_numbers)


def masked(leaves, every):
    hidden = frozenset(i for i in range(len(leaves)) if i % 3 == every)
    return build(leaves, hidden), hidden


def answers(params):
    """The numbers of each leaf, and the patterns of the leaves that are asked about."""
    try:
        return mc.flax_dimension_numbers(params), {}
    except ValueError as error:
        rules = rules_in(str(error))
    return mc.flax_dimension_numbers(params, dimension_numbers=rules), rules


@pytest.mark.parametrize("every", range(3))
@pytest.mark.parametrize("model", read_models(), ids=lambda model: model["model"])
def test_any_mask_changes_no_answer_but_into_a_question(model, every):
    """Other leaves are hidden than a mask of matrices hides: heads are in sight."""
    leaves = model["leaves"]
    whole, asked = answers(build(leaves))
    params, hidden = masked(leaves, every)
    part, open_now = answers(params)
    for i, leaf in enumerate(leaves):
        name = "/".join(leaf["path"]).removesuffix("/array")
        if i in hidden or any(
            name == x or fnmatch.fnmatchcase(name, x) for x in (*asked, *open_now)
        ):
            continue
        expected, found = (look_up(x, leaf["path"]) for x in (whole, part))
        assert (found is None) == (expected is None), name
        if found is not None:
            assert sides(found, leaf["shape"]) == sides(expected, leaf["shape"]), name
