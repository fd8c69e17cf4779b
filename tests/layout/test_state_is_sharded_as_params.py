"""`init` shards moments as their parameters, or finer, so that one compilation does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_where,
    mesh_of,
    more,
    normal,
    on_mesh,
    step_of,
    trained,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

A, E = AxisType.Auto, AxisType.Explicit
SHAPES = {"up": (2, 8, 16), "down": (16, 8), "bias": (4,), "scale": ()}
SPECS = {"up": P(None, "a", "b"), "down": P("a"), "bias": P("b"), "scale": P()}


def placed(*types):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=types)
    shardings = on_mesh(mesh, SPECS)
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    return mesh, shardings, jax.device_put(params, shardings)


MATRIX = optax.contrib.MuonDimensionNumbers(-2, -1)
NUMBERS = {name: MATRIX if len(shape) > 1 else None for name, shape in SHAPES.items()}


def make(shardings=None):
    return mc.muon(
        optax.linear_schedule(1e-2, 0.0, 10),
        orthogonalizer=mc.NewtonSchulz(steps=2),
        shardings=shardings,
        dimension_numbers=NUMBERS,
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
    chex.assert_trees_all_equal_shapes(state, make().init(params))


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
    numbers, shardings = CallableTree(NUMBERS), CallableTree(shardings)
    tx = mc.muon(1e-2, shardings=shardings, dimension_numbers=numbers)
    assert not misplaced(jax.jit(tx.init)(tree), shardings)


STACKS = {"up": normal(0, 3, 16, 32), "down": normal(1, 5, 32, 16)}


def of_stacks(shardings=None):
    numbers, steps = mc.MuonDimensionNumbers(-2, -1), mc.NewtonSchulz(steps=2)
    options = dict(dimension_numbers=numbers, orthogonalizer=steps)
    return mc.muon(1e-1, shardings=shardings, **options)


@pytest.mark.more
def test_momentum_over_replicas_and_params_over_data():
    mesh = mesh_of(replica=2, data=4)
    of_params = NamedSharding(mesh, P(None, "data"))
    of_state = NamedSharding(mesh, P(None, ("replica", "data")))
    grads = jax.tree.map(np.flip, STACKS)
    expected, _ = trained(of_stacks(), STACKS, [grads] * 2)
    tx, params = of_stacks(of_state), jax.device_put(STACKS, of_params)
    with jax.set_mesh(mesh):
        finer = jax.jit(tx.init)(params)
        step = jax.jit(step_of(tx), out_shardings=(of_params, None))
        for _ in range(2):
            params, finer = step(grads, finer, params)
        assert step._cache_size() == 1
    momentum = finer.inner_states["muon"].inner_state[0].mu
    assert_where(momentum, dict.fromkeys(STACKS, of_state))
    assert_where(params, dict.fromkeys(STACKS, of_params))
    for name, x in params.items():
        # A step changes entries by 0.1 times some units, good to 12 * 32 * 2^-24.
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-5)
