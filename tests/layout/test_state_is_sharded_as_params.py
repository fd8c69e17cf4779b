"""`init` shards the moments as their parameters, or finer; what it refuses by path.

One sharding from the start on is one compilation.
"""

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
    ones,
    step_of,
    trained,
)
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
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


MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
PARAMS = {"up": normal(0, 8, 12), "norm": {"scale": ones(12)}}


def named(spec):
    return {"up": spec, "norm": P()}


REFUSED = {
    "open": (named(spec=P(P.UNCONSTRAINED, "tensor")), "'up' .* UNCONSTRAINED"),
    "twice": (named(spec=P("tensor", "tensor")), r"'up' .* \['tensor'\] twice"),
    "twice in one": (named(spec=P(("fsdp", "fsdp"))), r"'up' .* \['fsdp'\] twice"),
    "unreduced": (named(spec=P("fsdp", unreduced={"tensor"})), "'up' .* unreduced"),
    "reduced": (named(spec=P("fsdp", reduced={"tensor"})), "'up' .* reduced"),
    "absent": (named(spec=P("pipe")), r"'up' .* lacks: \['pipe'\]"),
    "long": (named(spec=P(None, None, "fsdp")), "'up' .* too many entries"),
    "uneven": (named(spec=P(None, ("fsdp", "tensor"))), "'up' .* does not divide"),
    "tuples": (named(spec=("fsdp", None)), "'up/0' is 'fsdp'; it must be"),
    "a string": ("fsdp", "is 'fsdp'; it must be a jax.sharding.NamedSharding"),
    "a mesh": (MESH, "it must be a jax.sharding.NamedSharding"),
    "one device": (
        named(spec=SingleDeviceSharding(jax.devices()[0])),
        "'up' is SingleDeviceSharding.* must be a jax.sharding.NamedSharding",
    ),
    "half a tree": ({"up": P("fsdp")}, "no entry for 'norm/scale'"),
    "too much": (named(spec=P()) | {"x": P()}, "names 'x'"),
    "other order": (
        named(spec=NamedSharding(Mesh(MESH.devices[::-1], MESH.axis_names), P("fsdp")))
        | {"norm": NamedSharding(MESH, P())},
        "different meshes",
    ),
}


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_init(name, make):
    shardings, message = REFUSED[name]
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=message):
        make(1e-2, shardings=shardings).init(PARAMS)


def test_specs_without_a_mesh():
    with pytest.raises(ValueError, match="there is no mesh: call jax.set_mesh"):
        mc.muon(1e-2, shardings=P("fsdp")).init(PARAMS)


@pytest.mark.more
def test_names_of_axes_in_a_list():
    """As good as a tuple; what is no name is refused."""
    state = mc.muon(1e-2).init(PARAMS)
    mapped = jax.vmap(
        lambda g: mc.muon(1e-2, axis_name=["data"]).update(g, state, PARAMS)[0],
        axis_name="data",
    )
    found = mapped(jax.tree.map(lambda x: jnp.stack([x, 3 * x]), PARAMS))
    expected, _ = mc.muon(1e-2).update(
        jax.tree.map(lambda x: 2 * x, PARAMS), state, PARAMS
    )
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], found), expected, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="axis_name must be a name or a tuple"):
        mc.muon(1e-2, axis_name=[["data"]])


def test_a_function_under_inject_hyperparams_by_static_args():
    """Optax calls other functions with the count of steps, as schedules."""
    specs = jax.tree.map(lambda _: P(), PARAMS) | {"up": P("fsdp")}
    make = optax.inject_hyperparams(mc.muon, static_args=("shardings",))
    with jax.set_mesh(MESH):
        state = make(1e-2, shardings=lambda params: specs).init(PARAMS)
    mu = state.inner_state.inner_states["muon"].inner_state[0].mu["up"]
    assert mu.sharding.spec == P("fsdp") and np.all(mu == 0)
