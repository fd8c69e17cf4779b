"""`mu_dtype="int8"` against float32, and its codes against their formula."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, more, normal, updates_of
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import eight_bits, matrix_view
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

SHAPE = (256, 1024)
INDICES = np.arange(1, SHAPE[0] + 1)
SPECTRA = {
    "Gaussian": None,
    "power law": 1 / INDICES,
    "rank 1": np.ones(1),
    "rank 10": np.ones(10),
}

LEAVES = {
    "up": ((96, 160), Numbers(0, 1)),
    "query": ((96, 4, 40), Numbers(0, (1, 2))),
    "out": ((4, 40, 96), Numbers((0, 1), 2)),
    "heads": ((100, 4, 140), Numbers(0, 2)),
    "experts": ((4, 160, 96), Numbers(1, 2)),
    "odd": ((100, 257), Numbers(0, 1)),
    "small": ((4, 6), Numbers(0, 1)),
}
NUMBERS = {name: numbers for name, (_, numbers) in LEAVES.items()}
PARAMS = {
    name: normal(i, *shape) for i, (name, (shape, _)) in enumerate(LEAVES.items())
}


def grads_at(step):
    return {name: p + 0.5 * normal((step, 7), *p.shape) for name, p in PARAMS.items()}


def cosine(x, y):
    x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def gradients(values, generator):
    """Of given singular values, which come and go from step to step."""
    rank = SHAPE[0] if values is None else len(values)
    values = generator.uniform(0.5, 1.5, rank) if values is None else values
    left, right = (
        np.linalg.qr(generator.normal(size=(size, rank)))[0] for size in SHAPE
    )
    while True:
        gains = values * (1 + 0.5 * generator.normal(size=rank))
        yield jnp.asarray((left * gains) @ right.T, jnp.float32)


@pytest.mark.more
@pytest.mark.parametrize("spectrum", few(SPECTRA, "rank 10"))
def test_update_after_200_steps(spectrum):
    stream = gradients(SPECTRA[spectrum], np.random.default_rng(0))
    quick, whole = (
        [
            mc.scale_by_muon(
                mu_dtype=dtype,
                orthogonalizer=mc.NewtonSchulz(steps=steps),
                dimension_numbers=Numbers(0, 1),
            )
            for dtype in (None, "int8")
        ]
        for steps in (1, 5)
    )
    states = [tx.init(jnp.zeros(SHAPE)) for tx in quick]
    steps = [jax.jit(lambda g, s, tx=tx: tx.update(g, s)[1]) for tx in quick]
    for _ in range(199):
        gradient = next(stream)
        states = [step(gradient, s) for step, s in zip(steps, states, strict=True)]
    gradient = next(stream)
    updates = [tx.update(gradient, s)[0] for tx, s in zip(whole, states, strict=True)]
    assert cosine(*updates) > 0.99


def test_bytes_of_gpt2():
    width = 768
    shapes = {
        **{name: (width, 12, 64) for name in ("query", "key", "value")},
        "out": (12, 64, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    numbers = {
        name: Numbers((0, 1), 2)
        if name == "out"
        else Numbers(0, tuple(range(1, len(s))))
        for name, s in shapes.items()
    }
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    tx = mc.scale_by_muon(mu_dtype="int8", dimension_numbers=numbers)
    state = jax.eval_shape(tx.init, params)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    entries = sum(p.size for p in params.values())
    assert 1 < held / entries <= 1.06


@functools.partial(jax.jit, static_argnums=1)
def coded(momentum, view):
    layout = eight_bits.parts_of_scales(0, view)
    scales = jax.tree.map(
        lambda part: jnp.zeros(
            [part.sizes.get(i, n) for i, n in enumerate(view.shape)], part.dtype
        ),
        layout,
        is_leaf=lambda x: hasattr(x, "sizes"),
    )
    for _ in range(3):
        codes, scales = eight_bits.encode(momentum, scales, view)
    return codes, scales, eight_bits.decode(codes, scales, view)


def naive_decode(codes, scales, view):
    """What directions say and what codes say, by the formula, in float64."""
    share = np.vectorize(lambda c: c / (254 - abs(c)))
    rows, columns = (np.float64(np.float32(x)) for x in scales[:2])
    coded = share(np.float64(codes)) * np.minimum(rows, columns)
    low_rank = np.zeros(coded.shape)
    if scales.directions is None:
        return low_rank, coded
    left, right = (
        share(np.float64(x.codes)) * np.float64(x.scale) for x in scales.directions
    )
    along, across = view.output[0], view.reduction[0]
    for k in range(left.shape[along]):
        low_rank += left.take([k], along) * right.take([k], across)
    return low_rank, coded


@pytest.mark.parametrize("name", few(LEAVES, "heads", "odd"))
def test_codes_are_what_the_formula_says(name):
    shape, numbers = LEAVES[name]
    view = matrix_view(shape, numbers)
    sides = view.reduction, view.output
    # The squares of the smaller matrices of a stack leave float32.
    unit = np.ones([n if i in view.batch else 1 for i, n in enumerate(shape)])
    unit *= 10.0 ** (-9 * np.arange(unit.size).reshape(unit.shape))
    first = normal(4, shape[0], *[1] * (len(shape) - 1))
    momentum = normal(3, *shape) + 10 * (first + np.sign(first))
    momentum *= unit
    codes, scales, decoded = coded(jnp.float32(momentum), view)
    low_rank, rest = naive_decode(codes, scales, view)
    momentum, low_rank, rest, decoded = (
        np.float64(x) / unit for x in (momentum, low_rank, rest, decoded)
    )
    np.testing.assert_allclose(decoded, low_rank + rest, rtol=1e-5, atol=1e-5)
    exact = momentum - low_rank
    scale = [np.float64(np.float32(x)) / unit for x in scales[:2]]
    for found, side in zip(scale, sides[::-1], strict=True):
        ratio = found / np.abs(exact).max(side, keepdims=True)
        assert ratio.min() >= 1 and ratio.max() <= 1.012  # rounded up, in bfloat16
    # Half a step of the coarsest part of the scale.
    sizes = np.minimum(*scale)
    assert (np.abs(exact - rest) <= 0.0080 * sizes + 1e-5).all()
    assert (scales.directions is None) == (name == "small")
    if name != "small":
        for vectors, side in zip(scales.directions, sides, strict=True):
            assert (np.abs(np.int32(vectors.codes)).max(side) == 127).all()
        # The rank-one part is ten times the rest.
        most = np.abs(momentum).max((*view.reduction, *view.output), keepdims=True)
        assert (sizes < 0.5 * most).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-25, 25),
    zeroed=st.sampled_from(["nothing", "rows", "columns", "everything"]),
)
def test_any_scale_and_nothing(seed, exponent, zeroed):
    view = matrix_view((48, 96), Numbers(0, 1))
    momentum = np.random.default_rng(seed).normal(size=view.shape) * 10.0**exponent
    momentum[{"rows": slice(9), "everything": ...}.get(zeroed, slice(0))] = 0
    if zeroed == "columns":
        momentum[:, ::3] = 0
    _, _, decoded = coded(jnp.asarray(momentum, jnp.float32), view)
    error = np.abs(np.asarray(decoded, np.float64) - momentum).max()
    assert error <= 0.01 * np.abs(momentum).max()
    assert np.isfinite(decoded).all()


def test_what_is_not_finite_stays_so():
    view = matrix_view((48, 96), Numbers(0, 1))
    for bad in (np.nan, np.inf):
        *_, decoded = coded(normal(0, 48, 96).at[3, 5].set(bad), view)
        assert not np.isfinite(decoded[3, 5])


def walk(tx, steps, names):
    params = {name: PARAMS[name] for name in names}
    gradients = ({name: grads_at(i)[name] for name in names} for i in range(steps))
    return updates_of(tx, gradients, params)


@pytest.mark.more
@pytest.mark.parametrize(
    "nesterov, names", [more(True, tuple(LEAVES)), (False, ("up",))]
)
def test_every_layout_of_axes(nesterov, names):
    numbers = {name: NUMBERS[name] for name in names}
    options = dict(dimension_numbers=numbers, nesterov=nesterov)
    updates, state = walk(mc.scale_by_muon(mu_dtype="int8", **options), 20, names)
    expected, _ = walk(mc.scale_by_muon(**options), 20, names)
    for name in names:
        assert cosine(updates[name], expected[name]) > 0.99, name
        assert state.mu[name].dtype == jnp.int8


def test_no_matrix_is_gathered_to_be_coded():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    view = matrix_view((256, 512), Numbers(0, 1))
    sharding = NamedSharding(mesh, P("a", "b"))
    momentum = jax.device_put(normal(0, *view.shape), sharding)
    text = coded.lower(momentum, view).compile().as_text()
    rank = eight_bits.number_of_directions(view)
    lines = text.splitlines()
    for line in (x for x in lines if " all-gather(" in x or "all-to-all(" in x):
        shape = line.split("[")[1].split("]")[0]
        size = np.prod([int(n) for n in shape.split(",") if n])
        assert size <= rank * max(view.shape), line


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_of_updates(dtype):
    params = {"w": 1e4 * normal(0, 32, 48).astype(dtype)}
    tx = mc.scale_by_muon(mu_dtype="int8")
    state = tx.init(params)
    for _ in range(30):  # the sum exceeds float16
        updates, after = tx.update(params, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        state = after
    assert updates["w"].dtype == dtype
    chex.assert_tree_all_finite(updates)


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_steps_where_nothing_orthogonalizes(nesterov):
    """The gradient is added in float32, and what is kept decays by beta, as such."""
    gradient = {"w": normal(0, 8, 12)}

    def walk(beta, mu_dtype):
        options = dict(nesterov=nesterov, orthogonalizer=lambda x: x)
        tx = mc.scale_by_muon(mu_dtype=mu_dtype, beta=beta, **options)
        first, state = tx.update(gradient, tx.init(gradient))
        second, _ = tx.update({"w": jnp.zeros((8, 12))}, state)
        return first["w"], second["w"]

    (first, second), (expected, _) = walk(0.95, "int8"), walk(0.95, None)
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    _, half = walk(0.5, "int8")
    power = 2 if nesterov else 1
    np.testing.assert_allclose(second, half * (0.95 / 0.5) ** power, rtol=1e-6)


def test_refusals():
    for dtype in ("int4", jnp.uint8, "bool"):
        with pytest.raises(ValueError, match="mu_dtype must be a float dtype, .*int8"):
            mc.scale_by_muon(mu_dtype=dtype)
        with pytest.raises(ValueError, match="mu_dtype must be"):
            mc.muonclip(1e-2, mu_dtype=dtype)
    params = {"w": jnp.ones((4, 8), jnp.complex64)}
    with pytest.raises(ValueError, match="'w' are complex; use mu_dtype=None"):
        mc.scale_by_muon(mu_dtype="int8").init(params)
    floats, codes = mc.scale_by_muon(), mc.scale_by_muon(mu_dtype=jnp.int8)
    real = {"w": jnp.ones((4, 8))}
    with pytest.raises(ValueError, match="it has .scales.*mu_dtype='int8'"):
        floats.update(real, codes.init(real))
    with pytest.raises(ValueError, match="it lacks .scales.*mu_dtype='int8'"):
        codes.update(real, floats.init(real))
