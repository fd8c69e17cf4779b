"""Random containers round the same leaves mean what nested dicts do."""

import jax
import jax.numpy as jnp
import numpy as np
from containers import Module, named_tuple, registered, struct, variables
from flax import nnx
from flax.core import freeze
from optax.contrib import MuonDimensionNumbers
from seeds import chance, family, pick, told

import muonclip_jax as mc


HEADS, FEATURES = 2, 6
# `value` is what NNX puts below its variables, and a name like any other.
NAMES = ("value", "raw_value", "key", "block", "decoder", "a")


CONTAINERS = {
    "dict": dict,
    "frozen": lambda **fields: freeze(fields),
    "named tuple": named_tuple,
    "flax.struct": struct,
    "registered": registered,
    "nnx arrays": Module,
    "nnx variables": variables,
}


def attention(generator):
    """Flax's, with or without biases, and with shared keys or not."""
    key_heads = pick(generator, 1, HEADS)
    sizes = {"query": HEADS, "key": key_heads, "value": key_heads}
    module = {n: {"kernel": (FEATURES, h, 3)} for n, h in sizes.items()}
    module["out"] = {"kernel": (HEADS, 3, FEATURES)}
    if chance(generator, 0.5):
        for name, heads in sizes.items():
            module[name]["bias"] = (heads, 3)
        module["out"]["bias"] = (FEATURES,)
    return module


def leaves_of_module(generator):
    return pick(
        generator,
        attention(generator),
        {"kernel": (FEATURES, 4), "bias": (4,)},
        {"kernel": (3, 3, FEATURES, 4), "bias": (4,)},
        {"scale": (FEATURES,)},
        {"embedding": (7, FEATURES)},
        {"gate": (2, 3), "step": ()},
    )


def model(generator, depth):
    """Nested dicts of shapes; some are numbered as a list is."""
    if not depth:
        return leaves_of_module(generator)
    count = int(generator.integers(1, 4))
    names = [str(i) for i in range(count)]
    if chance(generator, 0.6):
        names = [str(n) for n in generator.choice(NAMES, count, replace=False)]
    return {n: model(generator, generator.integers(depth)) for n in names}


def numbered(tree):
    """Shapes to arrays, each filled with its own number."""
    shapes, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    arrays = [np.full(s, i + 1, np.float32) for i, s in enumerate(shapes)]
    return treedef.unflatten(map(jnp.asarray, arrays))


def contained(generator, tree, kinds):
    """The same leaves in other containers; the kinds are noted."""
    if not isinstance(tree, dict):
        return tree
    children = {n: contained(generator, x, kinds) for n, x in tree.items()}
    if all(name.isdigit() for name in children):
        whole = set(children) == {str(i) for i in range(len(children))}
        kinds.append(pick(generator, "list", "tuple") if whole else "dict")
        if not whole:
            return children
        ordered = [children[str(i)] for i in range(len(children))]
        return ordered if kinds[-1] == "list" else tuple(ordered)
    kinds.append(pick(generator, *CONTAINERS))
    return CONTAINERS[kinds[-1]](**children)


def wrapped(generator, tree, kinds):
    """In containers, a state of NNX, or below `params`."""
    whole = pick(generator, "containers", "containers", "state", "params")
    kinds.append(whole)
    if whole == "state":
        return nnx.State(jax.tree.map(nnx.Param, tree))
    inside = contained(generator, tree, kinds)
    return {"params": inside} if whole == "params" else inside


def statistics(tree):
    """Over the threshold for one head of each attention layer."""
    if not isinstance(tree, dict):
        return {}
    if "query" in tree and "out" in tree:
        return {"max_logits": jnp.asarray([400.0, 90.0])}
    found = {name: statistics(child) for name, child in tree.items()}
    return {name: child for name, child in found.items() if child}


def by_number(tree, results):
    """The result for each leaf, by the number that fills it."""
    leaves = [float(np.max(x)) for x in jax.tree.leaves(tree)]
    return dict(zip(leaves, results, strict=True))


def numbers_of(tree):
    found = mc.flax_dimension_numbers(tree)

    def is_entry(x):
        return x is None or isinstance(x, MuonDimensionNumbers)

    return by_number(tree, jax.tree.leaves(found, is_leaf=is_entry))


def check(seed):
    generator = np.random.default_rng(seed)
    shapes, kinds = model(generator, 3), []
    tree = numbered(shapes)
    stats = statistics(shapes)
    with told(seed, shapes=shapes, kinds=kinds):
        other = wrapped(generator, tree, kinds)
        assert numbers_of(other) == numbers_of(tree)
        assert sorted(mc.describe(other).split("\n")) == sorted(
            mc.describe(tree).split("\n")
        )
        seen = contained(generator, stats, kinds)
        clipped = mc.clip_qk(other, seen)
        assert jax.tree.structure(clipped) == jax.tree.structure(other)
        expected = by_number(tree, jax.tree.leaves(mc.clip_qk(tree, stats)))
        for number, x in by_number(other, jax.tree.leaves(clipped)).items():
            np.testing.assert_array_equal(x, expected[number])
        clips = sum((np.asarray(x) != n).any() for n, x in expected.items())
        assert bool(clips) == bool(stats), "nothing was clipped"


test_containers = family(check, 400)
