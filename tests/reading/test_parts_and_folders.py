"""What a reading says does not depend on masks, folders or leaves that are not used."""

import importlib
import itertools
import operator
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from architectures import ARCHITECTURES
from helpers import few
from library_models import MODELS
from optax.contrib import MuonDimensionNumbers
from test_architectures import read, shapes

import muonclip_jax as mc


def rows_of(params, **options):
    """The matrices and the optimizer of each leaf in sight, as the table has them."""
    table = mc.describe(params, collapse=False, **options)
    rows = itertools.takewhile(bool, table.splitlines()[1:])
    at = [table.index(x) for x in ("matrices", "optimizer", "why")]
    found = {x.split()[0]: (x[at[0] : at[1]], x[at[1] : at[2]]) for x in rows}
    return {k: [x.strip() for x in v] for k, v in found.items()}


def hidden(params, every):
    """A mask hides every third leaf, from one on."""
    leaves, treedef = jax.tree.flatten(params)
    rows = enumerate(leaves)
    masked = [optax.MaskedNode() if i % 3 == every else x for i, x in rows]
    return treedef.unflatten(masked)


def check(params, reading, every, per_head):
    """A leaf in sight has the label and the matrices that it has in the whole tree."""
    options = dict(model=reading, per_head=per_head)
    part = hidden(params, every)
    whole = rows_of(params, **options)
    for path, row in rows_of(part, **options).items():
        assert row == ["-", "-"] or row == whole[path], path
    labels = mc.param_labels(params, model=reading)
    by_leaf = zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True)
    in_sight = [label for i, (_, label) in enumerate(by_leaf) if i % 3 != every]
    assert jax.tree.leaves(mc.param_labels(part, model=reading)) == in_sight


@pytest.mark.parametrize("name", few(list(MODELS), "actor_critic"))
def test_masks_change_nothing_in_library_models(name):
    model = MODELS[name]
    params = model.params
    reading = mc.read_model(model.fun, params, *model.args)
    for every, per_head in itertools.product(range(3), (None, False)):
        check(params, reading, every, per_head)


@pytest.mark.parametrize("name", few(list(ARCHITECTURES), "AlphaFold"))
def test_masks_change_nothing_in_architectures(name):
    params = shapes(ARCHITECTURES[name])
    for every in range(3):
        check(params, read(name), every, None)


def test_names_of_what_is_not_read_are_asked_about_the_whole_tree():
    """The norm shows that layers are stacked, and a mask hides it."""
    layers = {
        "up": {"kernel": jnp.ones((5, 8, 12))},
        "norm": {"scale": jnp.ones((5, 8))},
    }
    params = {"layers": layers, "w": jnp.ones((8, 8)), "out": jnp.ones((8, 3))}
    reading = mc.read_model(
        lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"]), params, jnp.ones((2, 8))
    )
    assert reading.unknown == ("layers/norm/scale", "layers/up/kernel")
    part = jax.tree.map(lambda x: x, params)
    part["layers"]["norm"]["scale"] = optax.MaskedNode()
    for tree in (params, part):
        rows = rows_of(tree, model=reading)
        assert rows["layers/up/kernel"] == ["5 x 8 x 12", "muon"]


def forward(p, x):
    return jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"])


UNUSED = {
    "a matrix by its name": ("extra", (4, 8), "matrix"),
    "a vector": ("extra", (8,), "vector"),
    "a table": ("embedding", (99, 8), "embedding"),
    "a window": ("conv", (3, 8, 8), "asked"),
    "few rows": ("extra", (4, 32), "asked"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_all_say_the_same_of_a_leaf_that_is_not_used(case):
    name, shape, expected = UNUSED[case]
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 3)), name: jnp.ones(shape)}
    reading = mc.read_model(forward, params, jnp.ones((2, 8)))
    assert reading.unknown == (name,)
    leaves = str(reading).split("\n\n")[0].splitlines()
    (row,) = (x for x in leaves if x.startswith(name))
    label, numbers = reading.labels[name], reading.dimension_numbers[name]
    assert f"{label}?" in row and "not used" in row
    tx = mc.muon(0.1, model=reading)
    if expected == "asked":
        assert (label, numbers) == ("vector", None)
        for ask in (tx.init, *(lambda p, f=f: f(p, model=reading) for f in ASKING)):
            with pytest.raises(ValueError, match="cannot decide") as error:
                ask(params)
            message = str(error.value)
            assert f"{name} {shape}: not used" in message
            assert "mc.read_model" not in message and "model= gives" in message
        rules = {name: MuonDimensionNumbers(-2, -1)}
        params |= {name: jnp.ones(shape)}
        told = mc.param_labels(params, model=reading, dimension_numbers=rules)
        assert told[name] == "matrix"
        return
    assert label == expected and (numbers is not None) == (label == "matrix")
    assert mc.param_labels(params, model=reading) == reading.labels
    assert mc.matrix_mask(params, model=reading)[name] == (label == "matrix")
    given = mc.muon(0.1, dimension_numbers=reading.dimension_numbers)
    states = (jax.eval_shape(x.init, params) for x in (tx, given))
    assert operator.eq(*map(jax.tree.structure, states))
    optimizer = "muon" if label == "matrix" else "adamw"
    assert rows_of(params, model=reading)[name][1] == optimizer


ASKING = (mc.param_labels, mc.matrix_mask, mc.describe)

NETS = """import jax.numpy as jnp


def linear(x, w):
    return jnp.tanh(x @ w)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that makes a module of the user's, and imports it."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, above=""):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents:
            init = tmp_path / folder / "__init__.py"
            if folder.name and not init.exists():
                init.write_text(above)
        path.write_text(NETS)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def line_of(fun):
    params = {name: jnp.ones((8, 8)) for name in "abc"}

    def loss(p, x):
        return jnp.mean(fun(fun(x, p["a"]), p["b"]) @ p["c"])

    rows = str(mc.read_model(loss, params, jnp.ones((2, 8)))).splitlines()
    return next(row.split()[-1] for row in rows if row.startswith("a "))


@pytest.mark.parametrize(
    "name",
    [
        *(f"mine.{x}.nets" for x in ("jax", "flax", "optax", "keras", "haiku.jax")),
        *("mine.optax", "mine.muonclip_jax._model.nets", "penzai.nets", "keras"),
    ],
)
def test_folders_and_files_called_as_frameworks_are_of_the_user(name, module):
    file = name.split(".")[-1]
    assert line_of(module(name).linear) == f"{file}.py:5"


def test_a_framework_is_one_wherever_it_is_installed(module):
    """As in editable mode: its folder is no package's folder of the environment."""
    linear = module("haliax.nets", above="class NamedArray:\n    pass\n").linear
    assert line_of(linear).startswith("test_parts_and_folders.py:")


def test_lines_of_haiku_are_left_out():
    def linear(x, w):
        net = hk.transform(lambda x: hk.Linear(8)(x))
        return net.apply({"linear": {"w": w, "b": jnp.zeros(8)}}, None, x)

    line = linear.__code__.co_firstlineno + 1
    assert line_of(linear) == f"test_parts_and_folders.py:{line}"
