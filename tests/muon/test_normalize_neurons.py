"""NorMuon against loops written from its formulas, alone and on a mesh."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_where,
    first_update,
    mesh_of,
    more,
    normal,
    on_mesh,
    updates_of,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

#: Shape, reduction axes, output axes, and how to get `(matrix, input, output)`.
LEAVES = {
    "wide": ((6, 10), (0,), (1,), "io->io"),
    "tall": ((10, 6), (0,), (1,), "io->io"),
    "turned": ((10, 6), (1,), (0,), "oi->io"),
    "square": ((6, 6), (0,), (1,), "io->io"),
    "square and turned": ((6, 6), (1,), (0,), "oi->io"),
    "stacked": ((3, 6, 10), (1,), (2,), "nio->nio"),
    "stacked last": ((6, 3, 10), (0,), (2,), "ino->nio"),
    "per head": ((12, 3, 4), (0,), (2,), "ino->nio"),
    "query": ((8, 3, 4), (0,), (1, 2), "ihd->i(hd)"),
    "out": ((3, 4, 8), (0, 1), (2,), "hdo->(hd)o"),
}
NUMBERS = {
    name: Numbers(reduction, output)
    for name, (_, reduction, output, _) in LEAVES.items()
}


def matrices(name, x):
    """The leaf as a list of float64 `(inputs, outputs)`, views of one copy."""
    shape, reduction, output, _ = LEAVES[name]
    batch = [i for i in range(len(shape)) if i not in reduction + output]
    moved = np.asarray(x, np.float64).transpose(*batch, *reduction, *output)
    sizes = [
        np.prod([shape[i] for i in axes], dtype=int) for axes in (reduction, output)
    ]
    return moved.reshape(-1, *sizes)


def naive(updates, b2, eps):
    """Neuron by neuron, for each step the list of matrices."""
    v, results = {}, []
    for matrix_list in updates:
        result = []
        for n, o in enumerate(matrix_list):
            rows, columns = o.shape
            u = o.copy()
            for k in range(max(rows, columns)):
                neuron = (slice(None), k) if columns >= rows else (k, slice(None))
                mean = np.mean(o[neuron] ** 2)
                v[n, k] = b2 * v.get((n, k), 0.0) + (1 - b2) * mean
                u[neuron] = o[neuron] / np.sqrt(max(v[n, k], eps))
            u *= np.linalg.norm(o) / np.linalg.norm(u)
            result.append(u)
        results.append(result)
    return results


def updates_at(step):
    """Neurons of unlike size, as those of real layers are."""
    return {
        name: normal((step, i), *shape) * jnp.exp(normal(i, *shape[-1:]))
        for i, (name, (shape, *_)) in enumerate(LEAVES.items())
    }


def walk(tx, steps=5):
    state, results = tx.init(updates_at(0)), []
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(updates_at(step), state)
        results.append(updates)
    return results, state


@pytest.mark.parametrize("b2, eps", [(0.95, 1e-10), (0.5, 1e-1)])
def test_equals_a_loop_over_neurons(b2, eps):
    results, _ = walk(mc.normalize_neurons(b2, eps=eps, dimension_numbers=NUMBERS))
    for name in LEAVES:
        given = [matrices(name, updates_at(step)[name]) for step in range(5)]
        for step, expected in enumerate(naive(given, b2, eps)):
            actual = matrices(name, results[step][name])
            np.testing.assert_allclose(
                actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max()
            )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_and_nothing(dtype):
    tx = mc.normalize_neurons()
    updates = {"w": jnp.zeros((4, 8), dtype), "v": normal(0, 4, 8).astype(dtype)}
    after, state = tx.update(updates, tx.init(updates))
    assert after["w"].dtype == dtype and not after["w"].any()
    assert jnp.isfinite(after["v"].astype(jnp.float32)).all()
    assert state.v["w"].dtype == jnp.float32
    empty = {"w": jnp.zeros((0, 8), dtype)}
    tx = mc.normalize_neurons(dimension_numbers=Numbers(0, 1))
    assert tx.update(empty, tx.init(empty))[0]["w"].shape == (0, 8)


def test_muon_puts_it_after_the_direction():
    params = {"up": {"kernel": normal(1, 8, 24), "bias": normal(2, 24)}}
    by_option = mc.muon(0.1, neuron_b2=0.8, weight_decay=0.0)
    by_hand = optax.chain(
        mc.scale_by_muon(), mc.normalize_neurons(0.8), optax.scale(-0.1)
    )
    kernel = {"up": {"kernel": params["up"]["kernel"]}}
    state, other = by_option.init(params), by_hand.init(kernel)
    for step in range(3):
        grads = jax.tree.map(lambda p, t=step: normal(t, *p.shape), params)
        updates, state = by_option.update(grads, state, params)
        alone, other = by_hand.update({"up": {"kernel": grads["up"]["kernel"]}}, other)
        np.testing.assert_allclose(
            updates["up"]["kernel"], alone["up"]["kernel"], rtol=1e-6, atol=1e-8
        )


def test_leaves_without_a_matrix_are_named():
    params = {"up": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"normalize_neurons got .*'up/bias'"):
        mc.normalize_neurons().init(params)
    masked = optax.masked(mc.normalize_neurons(), mc.matrix_mask)
    assert (first_update(masked, params)["up"]["bias"] == 1).all()


ON_A_MESH = {
    "up": ((8, 32), Numbers(0, 1), P("b", "a")),
    "down": ((32, 8), Numbers(0, 1), P("a", "b")),
    "stack": ((4, 8, 16), Numbers(1, 2), P(None, "b", "a")),
    "query": ((8, 4, 8), Numbers(0, (1, 2)), P("a", None, "b")),
}


@pytest.mark.parametrize("type_", [more(AxisType.Auto), AxisType.Explicit])
def test_on_a_mesh(type_):
    shapes, numbers, specs = (
        {name: of[i] for name, of in ON_A_MESH.items()} for i in range(3)
    )
    shardings = on_mesh(mesh_of(type_, a=4, b=2), specs)
    whole = {k: normal(i, *shape) for i, (k, shape) in enumerate(shapes.items())}
    cut = jax.device_put(whole, shardings)
    tx = mc.normalize_neurons(dimension_numbers=numbers)
    state, update = tx.init(cut), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(cut, state)
    assert_where(updates, shardings)
    alone = mc.normalize_neurons(dimension_numbers=numbers)
    expected, _ = updates_of(alone, [whole] * 2)
    for name in whole:
        np.testing.assert_allclose(updates[name], expected[name], atol=1e-5)
    assert update._cache_size() == 1
    assert_vectors_only(update.lower(cut, state).compile().as_text())


def assert_vectors_only(text):
    """No collective carries more than a vector of each matrix."""
    collectives = re.findall(
        r"= (\(?[^=]*?\)?) (?:all-reduce|all-gather|all-to-all|collective-permute|"
        r"reduce-scatter)[-\w]*\(",
        text,
    )
    for shapes in collectives:
        for sizes in re.findall(r"\[([\d,]*)\]", shapes):
            entries = np.prod([int(s) for s in sizes.split(",") if s], dtype=int)
            assert entries <= 4 * 16 * 2, shapes


@pytest.mark.more
@pytest.mark.parametrize("type_", [more(AxisType.Auto), AxisType.Explicit])
def test_next_to_metadata_of_axes(type_):
    """Flax lays what is in a param's box as the param: `v` is in none."""
    mesh = mesh_of(type_, x=4)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0), kernel_init=init)
        tx = mc.muon(0.1, neuron_b2=0.95)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = jnp.asarray(model.kernel[...])
        optimizer.update(model, nnx.state(model, nnx.Param))
        assert (model.kernel[...] != before).all()


def test_next_to_boxes_of_linen():
    mesh = mesh_of(x=4, y=2)
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("x", "y"))
    layer = nn.Dense(16, use_bias=False, kernel_init=init)
    tx = mc.muon(0.1, neuron_b2=0.9)

    def create():
        params = layer.init(jax.random.key(0), jnp.ones((1, 8)))
        return params, tx.init(params)

    shardings = nn.get_sharding(jax.eval_shape(create), mesh)
    params, state = jax.jit(create, out_shardings=shardings)()
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert jax.tree.leaves(updates)[0].shape == (8, 16)


@pytest.mark.more
def test_the_derivative_at_zero():
    params = {"w": normal(0, 4, 6)}
    tx = mc.muon(0.1, weight_decay=0.0, neuron_b2=0.9)

    def size(grads):
        return jnp.sum(first_update(tx, grads, params)["w"] ** 2)

    assert jnp.isfinite(jax.grad(size)({"w": jnp.zeros((4, 6))})["w"]).all()


@pytest.mark.parametrize("b2", [-0.1, 1.5, math.nan])
def test_decays_outside_the_unit_interval_are_refused(b2):
    with pytest.raises(ValueError, match=r"^b2 must be in \[0, 1\]"):
        mc.normalize_neurons(b2)
    with pytest.raises(ValueError, match=r"neuron_b2 must be in \[0, 1\]"):
        mc.muon(1e-2, neuron_b2=b2)


def test_init_does_not_read_values():
    tx = mc.normalize_neurons()
    with jax.debug_nans(True), jax.debug_infs(True):
        tx.init({"w": jnp.full((400, 6), 6e4, jnp.float16)})
