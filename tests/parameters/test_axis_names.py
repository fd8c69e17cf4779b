"""Axis names that params carry tell stacks and the vocabulary."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import muonclip_jax as mc


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
