"""A path is the names that lead to a leaf, whatever the containers are made of.

The names of axes that params carry tell stacks and the vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from containers import Module, named_tuple, registered, struct, variables
from flax import nnx
from flax.core import freeze
from helpers import is_numbers
from internals import paths

import muonclip_jax as mc


def state(**fields):
    return nnx.state(variables(**fields))


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, children):
        self.children = tuple(children)

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


CONTAINERS = {
    "dict": dict,
    "frozen": lambda **fields: freeze(fields),
    "named tuple": named_tuple,
    "flax.struct": struct,
    "register_dataclass": registered,
    "nnx arrays": Module,
    "nnx variables": variables,
}


def attention(make):
    shapes = dict(query=(16, 4, 8), key=(16, 4, 8), value=(16, 4, 8), out=(4, 8, 16))
    layers = {n: make(kernel=jnp.ones(shape)) for n, shape in shapes.items()}
    return make(**layers, norm=make(scale=jnp.ones(16)))


@pytest.mark.parametrize("make", [*CONTAINERS.values(), state])
def test_the_same_is_said_and_done_in_each(make):
    """In lists and tuples too, and the result is made of the same."""

    def nested(make):
        return [{"value": attention(make)}, (attention(make),)]

    def by_path(tree, values):
        return dict(zip(paths.flatten(tree).paths, values, strict=True))

    tree, plain = nested(make), nested(dict)
    rows = mc.describe(tree)
    assert rows.count("4 x 16 x 8") == 6 and rows.count("1 x 32 x 16") == 2
    assert sorted(rows.split("\n")) == sorted(mc.describe(plain).split("\n"))
    said, plainly = (
        by_path(x, jax.tree.leaves(mc.flax_dimension_numbers(x), is_leaf=is_numbers))
        for x in (tree, plain)
    )
    assert said == plainly and None in said.values()
    row = jnp.asarray([400.0, 90.0, 101.0, 5.0])
    stats, plain_stats = (
        [{"value": make(max_logits=row)}, (make(max_logits=2 * row),)]
        for make in (make, dict)
    )
    after = mc.clip_qk(tree, stats)
    assert jax.tree.structure(after) == jax.tree.structure(tree)
    found = by_path(tree, jax.tree.leaves(after))
    clipped = jax.tree.leaves(mc.clip_qk(plain, plain_stats))
    for path, x in by_path(plain, clipped).items():
        np.testing.assert_array_equal(found[path], x)
    assert found["0", "value", "key", "kernel"].min() == 0.5


def test_a_variable_may_hold_a_tree_of_its_own():
    inner = {"value": jnp.ones(2), "a": [jnp.ones(3)]}
    for tree in (nnx.state(Module(v=nnx.Param(inner))), Module(v=nnx.Param(inner))):
        assert set(paths.flatten(tree).paths) == {("v", "value"), ("v", "a", "0")}
    assert paths.flatten(nnx.Param(jnp.ones(2))).paths == ((),)


@pytest.mark.parametrize("make", [lambda m: m, lambda m: nnx.state(m, nnx.Param)])
def test_the_layers_of_nnx_are_params_as_they_are(make):
    """A module is a pytree, and callable at that: labels like it are no function."""
    layer = make(nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)))
    grads = jax.tree.map(jnp.ones_like, layer)
    numbers = mc.flax_dimension_numbers(layer)
    expected = None
    for told in (None, numbers, mc.flax_dimension_numbers):
        tx = mc.muon(1e-2, dimension_numbers=told, per_head=False)
        updates, _ = tx.update(grads, tx.init(layer), layer)
        assert jax.tree.structure(updates) == jax.tree.structure(layer)
        leaves = jax.tree.leaves(updates)
        for update, other in zip(leaves, expected or leaves, strict=True):
            np.testing.assert_array_equal(update, other)
        expected = leaves


def test_a_node_that_wraps_one_array_is_no_part_of_a_name():
    """Boxes of Flax, of Haliax, which has no keys, and of others, with what they say.

    Nodes of several arrays keep their numbers, and modules their names.
    """
    about = dataclasses.make_dataclass("Box", ["value", "axes"])
    jax.tree_util.register_dataclass(about, ["value"], ["axes"])
    tree = {
        "a": nn.Partitioned(jnp.ones(2), ("data",)),
        "b": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((2,), "float32"), ("data",)),
        "c": WithoutKeys([jnp.ones(2)]),
        "d": about(jnp.ones(2), "data"),
        "e": {"array": nnx.Param(jnp.ones(2))},
        "f": nn.Partitioned({"x": jnp.ones(2), "value": jnp.ones(3)}, ()),
        "g": WithoutKeys([jnp.ones(2), jnp.ones(3)]),
        "h": struct(value=jnp.ones(2)),
        "i": Module(value=nnx.Param(jnp.ones(2))),
        "j": about(optax.MaskedNode(), "data"),
        "k": WithoutKeys([registered(query=jnp.ones(2))]),
    }
    expected = ["a", "b", "c", "d", "e", "f/value", "f/x"]
    expected += ["g/0", "g/1", "h/value", "i/value", "j", "k/0/query"]
    assert ["/".join(path) for path in paths.flatten(tree).paths] == expected
    entries = jax.tree.map(lambda _: None, tree)
    found = paths.flatten(entries, is_leaf=lambda x: x is None)
    assert ["/".join(path) for path in found.paths] == [x for x in expected if x != "j"]


def test_statistics_in_a_box():
    stats = {"attn": {"max_logits": WithoutKeys([jnp.ones(2)])}}
    kernel = jnp.ones((4, 2, 3))
    params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    clip = mc.clip_qk(params, stats, 0.5)["attn"]["query"]["kernel"]
    np.testing.assert_allclose(clip, 0.5**0.5, rtol=1e-6)


def test_two_leaves_of_one_path_are_refused():
    """State by path, as of int8, would hold one entry for both."""
    layer = {"w": jnp.ones((4, 8))}
    params = {"a/b": layer, "a": {"b": layer}, "c": layer}
    for tx in (mc.muon(1e-2), mc.muon(1e-2, mu_dtype="int8", neuron_b2=0.9)):
        with pytest.raises(ValueError, match="several leaves have the path 'a/b/w'"):
            tx.init(params)


def test_a_weight_at_the_root_whose_bias_a_mask_hides():
    params = {"weight": jnp.ones((4, 8)), "bias": jnp.ones(4)}
    tx = optax.masked(mc.scale_by_muon(), mc.matrix_mask)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["weight"].shape == (4, 8)
    labels = {"weight": "muon", "bias": "frozen"}
    groups = {"muon": mc.muon(1e-2), "frozen": optax.set_to_zero()}
    optax.partition(groups, lambda _: labels).init(params)


LAYERS = ("embed", "layers", "mlp")
HEAD = ("embed", "vocab")


class Axis:
    def __init__(self, name, size):
        self.name, self.size = name, size

    def __eq__(self, other):
        return (self.name, self.size) == (other.name, other.size)

    def __hash__(self):
        return hash((self.name, self.size))


@jax.tree_util.register_pytree_with_keys_class
class NamedArray:
    """As Haliax has it: one array, and the axes as data about it."""

    def __init__(self, array, axes):
        self.array, self.axes = array, axes

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


def haliax(array, names):
    axes = zip(names, array.shape, strict=True)
    return NamedArray(array, tuple(Axis(*pair) for pair in axes))


def variable(array, names):
    found = nnx.Param(array)
    found.set_metadata(out_sharding=names)
    return found


WRAP = {
    "Linen": lambda array, names: nn.LogicallyPartitioned(array, names=names),
    "NNX": variable,
    "Haliax": haliax,
}


def params_in(wrap):
    return {
        "table": {"rows": wrap(jnp.ones((50, 8)), ("vocab", "embed"))},
        "blocks": {"up": {"kernel": wrap(jnp.ones((8, 3, 16)), LAYERS)}},
        "last": {"kernel": wrap(jnp.ones((8, 50)), HEAD)},
        "moe": {"router": {"kernel": wrap(jnp.ones((8, 4)), ("embed", "exp"))}},
        "experts_up": wrap(jnp.ones((4, 7, 16)), ("exp", "embed", "mlp")),
    }


@pytest.mark.parametrize("kind", WRAP)
def test_stacks_and_the_vocabulary(kind):
    text = mc.describe(params_in(WRAP[kind]), attention=[])
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "3 x 8 x 16" in rows["blocks/up/kernel"]
    assert "4 x 7 x 16" in rows["experts_up"]
    assert rows["moe/router/kernel"].split("adamw")[1].split()[0] == "router"
    assert "embedding" in rows["table/rows"] and "head" in rows["last/kernel"]


def test_without_names_it_is_asked():
    with pytest.raises(ValueError, match="(?s)blocks/up/kernel.*experts_up"):
        mc.matrix_mask(params_in(lambda array, names: array))


def test_numbers_made_of_named_params_hold_for_bare_ones():
    """`nnx.Optimizer` takes the names off before an update."""
    named = params_in(WRAP["Linen"])
    tx = mc.muon(0.1, dimension_numbers=mc.flax_dimension_numbers(named))
    bare = nn.unbox(named)
    updates, _ = tx.update(bare, tx.init(bare), bare)
    assert jax.tree.structure(updates) == jax.tree.structure(bare)
