"""`init` shards the moments as their parameters, so that one compilation does."""

import jax
import jax.numpy as jnp
import optax
import pytest
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


@pytest.mark.parametrize("types", [(A, A), (E, E), (A, E)])
def test_told_and_jitted(types):
    _, shardings, params = placed(*types)
    tx = make(shardings)
    state = jax.jit(tx.init)(params)
    assert not misplaced(state, shardings)
    assert compilations(tx, state, params) == 1


@pytest.mark.parametrize("is_set", [False, True])
def test_explicit_axes_tell(is_set):
    mesh, shardings, params = placed(E, E)
    if is_set:
        with jax.set_mesh(mesh):
            state = jax.jit(make().init)(params)
    else:
        state = jax.jit(make().init)(params)
    assert not misplaced(state, shardings)
    assert compilations(make(), state, params) == 1


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


def test_the_direction_alone():
    _, shardings, params = placed(A, A)
    matrices = {name: params[name] for name in ("up", "down")}
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    tx = mc.scale_by_muon(
        dimension_numbers=numbers,
        mu_dtype="bfloat16",
        shardings={name: shardings[name] for name in matrices},
    )
    mu = jax.jit(tx.init)(matrices).mu
    for name, x in mu.items():
        assert x.dtype == jnp.bfloat16 and not x.any()
        assert x.sharding.is_equivalent_to(shardings[name], x.ndim)


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


@pytest.mark.parametrize("type_", [A, E])
def test_an_axis_of_one_device_cuts_nothing(type_):
    """JAX drops its name from what a program returns; that contradicts no sharding."""
    mesh = jax.make_mesh((1, 4), ("one", "b"), axis_types=(type_,) * 2)
    told = NamedSharding(mesh, P("one", "b"))
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    tx = mc.muon(
        1e-2,
        shardings=told,
        dimension_numbers=numbers,
        orthogonalizer=mc.NewtonSchulz(steps=2),
    )
    matrix = jnp.arange(32.0).reshape(4, 8)
    alone = mc.muon(
        1e-2, dimension_numbers=numbers, orthogonalizer=mc.NewtonSchulz(steps=2)
    )
    expected, _ = alone.update(matrix, alone.init(matrix), matrix)
    for spec in (P("one", "b"), P(None, "b")):
        x = jax.device_put(matrix, NamedSharding(mesh, spec))
        if type_ == E and spec != told.spec:
            continue  # there it is another type
        updates, _ = tx.update(x, tx.init(x), x)
        assert jnp.allclose(updates, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="shardings says"):
        tx.init(jax.device_put(matrix, NamedSharding(mesh, P("b"))))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "b", "a")])
def test_kernels_that_the_mesh_cuts_through_their_pieces(spec, nesterov):
    """Such a kernel is gathered to be iterated; its momentum stays where it is."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(A, A))
    sharding = NamedSharding(mesh, spec)
    params = {"qkv": jax.device_put(jnp.ones((2, 8, 24)), sharding)}
    tx = mc.scale_by_muon(
        nesterov=nesterov,
        orthogonalizer=mc.NewtonSchulz(steps=2),
        dimension_numbers={"qkv": mc.MatrixAxes(1, 2, parts=(4, 8, 12))},
        shardings={"qkv": sharding},
    )
    state = tx.init(params)
    step = jax.jit(tx.update).lower(params, state, params).compile()
    for _ in range(2):  # a program that was compiled ahead accepts its own state
        updates, state = step(params, state, params)
    assert state.mu["qkv"].sharding.is_equivalent_to(sharding, 3)
    assert updates["qkv"].sharding.is_equivalent_to(sharding, 3)


def assert_stays(tx, params, *, compiled):
    """The state of three steps is of one type, sharded as `init` made it."""
    state = first = tx.init(params)
    update = jax.jit(tx.update) if compiled else tx.update
    for _ in range(3):
        _, state = update(params, state, params)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(state), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(y).sharding.spec
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    if compiled:  # one that was compiled ahead takes no other
        step = jax.jit(tx.update).lower(params, first, params).compile()
        step(params, step(params, first, params)[1], params)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 1), (1, 4)])
def test_neurons_where_an_explicit_axis_has_one_device(sizes):
    """Such an axis cuts nothing, and is in the type all the same."""
    count = sizes[0] * sizes[1]
    mesh = jax.make_mesh(
        sizes, ("a", "b"), axis_types=(E, E), devices=jax.devices()[:count]
    )
    with jax.set_mesh(mesh):
        spec = P(None, "a", "b")
        params = {"w": jax.device_put(jnp.ones((2, 4, 12)), NamedSharding(mesh, spec))}
        tx = mc.normalize_neurons(
            dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1)
        )
        assert_stays(tx, params, compiled=True)
        state = tx.init(params)
        jax.lax.scan(lambda s, _: (tx.update(params, s)[1], None), state, length=2)


@pytest.mark.parametrize("compiled", [True, False])
def test_neurons_of_pieces(compiled):
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(A, A), devices=jax.devices()[:4]
    )
    sharding = NamedSharding(mesh, P("b", "a"))
    params = {"qkv": jax.device_put(jnp.ones((4, 24)), sharding)}
    tx = mc.normalize_neurons(
        dimension_numbers={"qkv": mc.MatrixAxes(0, 1, parts=(8, 4), groups=2)}
    )
    assert_stays(tx, params, compiled=compiled)


@pytest.mark.parametrize("type_", [A, E])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: mc.multi_steps(tx, 2)])
def test_leaves_of_no_entries(type_, wrap):
    """Along automatic axes every program replicates what has no entries."""
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(type_,) * 2, devices=jax.devices()[:4]
    )
    specs = {"up": P(None, "a"), "down": P("b"), "bias": P("a")}
    shapes = {"up": (0, 8), "down": (4, 8, 0), "bias": (0,)}
    params = {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    assert_stays(wrap(make(shapes=shapes)), params, compiled=True)
