"""What TPUs do, here on CPU: iterations in turns, tall matrices as they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, matrix_of, more, of_newton_schulz, polynomial_of
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._muon.one_device import orthogonalize_on_one_device
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.make_solver import make_solver
from muonclip_jax._newton_schulz.turns import take_turns


KELLER = mc.NS_COEFFS["keller"]
PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def solver_for(platform, method="auto", preconditioning="frobenius"):
    return make_solver("keller", 5, method, jnp.float32, preconditioning, "xla").on(
        platform
    )


def matrices(count, m, n, seed=0):
    values = np.linspace(1, 0.3, min(m, n))
    return np.stack([matrix_of(values * (i + 1), m, n, seed + i) for i in range(count)])


def exact(stack):
    return np.stack([polynomial_of(x, KELLER) for x in stack])


def test_no_iteration_goes_on_before_all_have_stored():
    events = []

    def iteration(name):
        for i in range(3):
            events.append(f"{name}{i}")
            sent = yield jnp.float32(i)
            assert sent == i
        return name

    assert take_turns(map(iteration, "ab")) == ["a", "b"]
    assert events == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert take_turns([iteration("c")]) == ["c"]


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_later_passes_wait_for_what_is_to_be_there_halfway(method, shape):
    """Seen by a zero that is none: the first passes do not know it, the others do."""
    solver = solver_for("tpu", method)
    stack = solver.prepare(jnp.asarray(matrices(2, *shape), jnp.float32))
    ((plain,), (waited,), (spoilt,)) = (
        solver.iterate(stack, halfway=zero)
        for zero in (None, jnp.int32(0), jnp.float32(jnp.nan))
    )
    assert_close(plain, waited, of_newton_schulz(24))
    assert np.isnan(spoilt).any()
    one_pass = make_solver("keller", 1, "standard", jnp.float32, "frobenius", "xla")
    (begun,) = one_pass.on("tpu").iterate(stack, halfway=jnp.float32(jnp.nan))
    assert np.isfinite(begun).all()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), more((14, 14))])
def test_stacks_in_turns_are_those_alone(method, shape):
    stacks = [matrices(1, *shape), matrices(3, *shape, seed=5), matrices(2, *shape)]
    solver = solver_for("tpu", method)
    results = jax.jit(lambda *xs: solver.orthogonalize(*xs))(*map(jnp.float32, stacks))
    for stack, result in zip(stacks, results, strict=True):
        assert_close(result, exact(stack), of_newton_schulz(30))


def test_products_in_turns_wait_for_each_other():
    """A barrier for each that is stored, which holds both."""
    solver = solver_for("tpu", "standard")
    stacks = [jnp.ones((2, 6, 6))] * 2
    lowered = jax.jit(lambda *xs: solver.iterate(*xs)).lower(*stacks)
    pairs = lowered.as_text().count("tensor<2x6x6xf32>, tensor<2x6x6xf32>\n")
    barriers = lowered.as_text().count("optimization_barrier")
    assert barriers >= 15 and pairs >= 15


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("kind", ["frobenius", "aol", "equilibrated"])
def test_tall_matrices_are_wide_ones_turned(monkeypatch, platform, method, kind):
    """In one block and, as on CPU, in two."""
    monkeypatch.setattr(platforms, "BLOCK_ROWS", 4)
    solver = solver_for(platform, method, kind)
    assert solver.strategy((12, 30), jnp.dtype("float32")).blocks == (
        2 if platform == "cpu" else 1
    )
    wide = jnp.float32(matrices(2, 12, 30))
    (expected,) = solver.orthogonalize(wide)
    (result,) = solver.orthogonalize(wide.mT)
    assert_close(result.mT, expected, of_newton_schulz(30))
    if kind == "frobenius":
        assert_close(result.mT, exact(wide), of_newton_schulz(30))


@pytest.mark.parametrize("batch", [1, more(60), 130, more(10**6)])
def test_leaves_on_one_tpu(monkeypatch, batch):
    """Alone, in turns and in loops; of several shapes and dtypes."""
    monkeypatch.setitem(platforms.BATCH_ENTRIES, "tpu", batch)
    monkeypatch.setitem(platforms.STACK_ENTRIES, "tpu", batch / 2)
    shapes = [(4, 6), (6, 4), (5, 4, 6), (6, 4), (4, 6), (3, 6, 4), (5, 5), (4, 6)]
    dtypes = ["float32"] * 7 + ["bfloat16"]
    leaves = [
        jnp.asarray(matrices(*(1, *shape)[-3:], seed=i).reshape(shape), dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    views = [matrix_view(shape, PLAIN) for shape in shapes]
    results = jax.jit(
        lambda leaves: orthogonalize_on_one_device(
            solver_for("tpu"), leaves, views=views
        )
    )(leaves)
    for leaf, result in zip(leaves, results, strict=True):
        assert result.dtype == jnp.float32
        stack = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        assert_close(result.reshape(stack.shape), exact(stack), of_newton_schulz(6))
