"""`init` shards the moments as their parameters, so that one compilation does."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import more
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

A, E = AxisType.Auto, AxisType.Explicit
SHAPES = {"up": (2, 8, 16), "down": (16, 8), "bias": (4,), "scale": ()}
SPECS = {"up": P(None, "a", "b"), "down": P("a"), "bias": P("b"), "scale": P()}


def placed(*types):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=types)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    return mesh, shardings, jax.device_put(params, shardings)


def make(shardings=None, shapes=SHAPES):
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return mc.muon(
        optax.linear_schedule(1e-2, 0.0, 10),
        orthogonalizer=mc.NewtonSchulz(steps=2),
        shardings=shardings,
        dimension_numbers={
            name: numbers if len(shape) > 1 else None for name, shape in shapes.items()
        },
    )


def misplaced(state, shardings):
    """The moments that are sharded otherwise than their parameters."""
    found, seen = [], set()
    for keys, x in jax.tree_util.tree_leaves_with_path(state):
        names = [key.key for key in keys if getattr(key, "key", None) in SHAPES]
        seen.update(names)
        if names and not x.sharding.is_equivalent_to(shardings[names[0]], x.ndim):
            found.append((names[0], x.sharding))
    assert seen == set(SHAPES)
    return found


def compilations(tx, state, params):
    update = jax.jit(tx.update)
    for _ in range(3):
        _, state = update(params, state, params)
    return update._cache_size()


@pytest.mark.parametrize("types", [more((A, A)), more((E, E)), (A, E)])
def test_told_and_jitted(types):
    _, shardings, params = placed(*types)
    tx = make(shardings)
    state = jax.jit(tx.init)(params)
    assert not misplaced(state, shardings)
    assert compilations(tx, state, params) == 1


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_abstract_params(jit):
    """Nothing but `shardings` says how anything is sharded."""
    mesh, shardings, params = placed(A, A)
    shapes = jax.eval_shape(lambda: params)
    assert not misplaced(jit(lambda: make(shardings).init(shapes))(), shardings)
    with jax.set_mesh(mesh):
        assert not misplaced(jit(lambda: make(SPECS).init(shapes))(), shardings)
    state = jax.eval_shape(make(shardings).init, shapes)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(
        jnp.shape, make().init({k: jnp.ones(s) for k, s in SHAPES.items()})
    )


@jax.tree_util.register_pytree_with_keys_class
class CallableTree(dict):
    """As an Equinox module: a tree that can be called, and must not be."""

    def tree_flatten_with_keys(self):
        pairs = sorted(self.items())
        return [(jax.tree_util.DictKey(k), v) for k, v in pairs], tuple(sorted(self))

    def tree_flatten(self):
        return [self[k] for k in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(zip(keys, children, strict=True))

    def __call__(self, *args):
        raise AssertionError("a tree of shardings is no function")


def test_shardings_that_can_be_called():
    _, shardings, params = placed(A, A)
    tree = CallableTree(params)
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    tx = mc.muon(
        1e-2,
        shardings=CallableTree(shardings),
        dimension_numbers=CallableTree(
            {k: numbers if len(v) > 1 else None for k, v in SHAPES.items()}
        ),
    )
    assert not misplaced(jax.jit(tx.init)(tree), shardings)
