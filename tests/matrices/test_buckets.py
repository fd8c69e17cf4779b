"""Stacks of same-shape matrices against every leaf by itself."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import matrix_of, normal, one_at_a_time, polynomial_of
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    matrix_view,
    orthogonalized,
    plan_stacks,
    platform_with,
    Solver,
    solver,
    unstack,
)
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
FUSED = MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
LAYOUTS = [
    ((4, 6), PLAIN), ((6, 4), PLAIN), ((5, 5), PLAIN), ((4, 2, 3), FUSED),
    ((2, 4, 6), PLAIN), ((3, 6, 4), PLAIN), ((2, 6, 2, 2), FUSED), ((1, 6), PLAIN),
]  # fmt: skip
SOLVER = solver()
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def gpt2_shapes(layers):
    attention = [(f"{i}/{name}", (768, 768)) for i in range(layers) for name in "qkvo"]
    up = [(f"{i}/up", (768, 3072)) for i in range(layers)]
    down = [(f"{i}/down", (3072, 768)) for i in range(layers)]
    return dict(attention + up + down)


def plan_of(shapes, dtype=jnp.float32):
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return plan_stacks(leaves, [matrix_view(shape, PLAIN).wide for shape in shapes])


def leaf_of(shape, dtype, seed):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.normal(size=shape), dtype)


def test_the_stacks_of_gpt2():
    plan = plan_of(gpt2_shapes(12).values())
    assert [(stack.shape, stack.count, len(stack.parts)) for stack in plan] == [
        ((768, 768), 48, 48),
        ((768, 3072), 24, 24),
    ]
    assert list(map(str, plan)) == [
        "48 x 768 x 768 float32 from 48 leaves",
        "24 x 768 x 3072 float32 from 24 leaves",
    ]


def test_stacked_leaves_share_a_stack_and_dtypes_do_not():
    shapes = [(12, 64, 256), (256, 64)]
    plan = plan_of(shapes)
    assert list(map(str, plan)) == ["13 x 64 x 256 float32 from 2 leaves"]
    views = [matrix_view(shape, PLAIN).wide for shape in shapes]
    mixed = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, DTYPES[:2], strict=True)
    ]
    assert list(map(str, plan_stacks(mixed, views))) == [
        "12 x 64 x 256 float32 from 1 leaf",
        "1 x 64 x 256 bfloat16 from 1 leaf",
    ]


def test_tall_matrices_that_are_not_transposed_have_stacks_of_their_own():
    shapes = [(4, 6), (6, 4), (2, 6, 4), (5, 5)]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    views = [matrix_view(shape, PLAIN) for shape in shapes]
    assert [(stack.shape, stack.count) for stack in plan_stacks(leaves, views)] == [
        ((4, 6), 1),
        ((6, 4), 3),
        ((5, 5), 1),
    ]


def test_stacks_of_several_leaves_stay_below_a_size():
    shapes = [(4, 6), (6, 4), (4, 6), (9, 4, 6), (4, 6)]
    leaves = [jnp.zeros(shape) for shape in shapes]
    views = [matrix_view(shape, PLAIN).wide for shape in shapes]
    plan = plan_stacks(leaves, views, max_entries=48)
    assert [[part.leaf for part in stack.parts] for stack in plan] == [
        [0, 1],
        [2],
        [3],
        [4],
    ]


@pytest.mark.more
def test_no_stack_has_more_leaves_than_compilers_put_together_fast():
    generator = np.random.default_rng(0)
    leaves = [np.float32(generator.normal(size=(2, 3))) for _ in range(600)]
    views = [matrix_view((2, 3), PLAIN)] * 600
    program = jax.jit(lambda leaves: orthogonalized(SOLVER, leaves, views))
    stacks = re.findall(r"tensor<(\d+)x2x3xf32>", program.lower(leaves).as_text())
    assert max(map(int, stacks)) == 256
    exact = [polynomial_of(np.float64(x), mc.NS_COEFFS["keller"]) for x in leaves]
    np.testing.assert_allclose(np.stack(program(leaves)), exact, atol=2e-4)


@pytest.mark.more
@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(DTYPES)), max_size=7
    ),
    seed=st.integers(0, 2**31),
)
def test_every_leaf_comes_out_as_it_would_alone(kinds, seed):
    leaves = [leaf_of(s, dtype, seed + i) for i, ((s, _), dtype) in enumerate(kinds)]
    views = [matrix_view(shape, numbers) for (shape, numbers), _ in kinds]
    together = orthogonalized(SOLVER, leaves, views)
    for leaf, view, result in zip(leaves, views, together, strict=True):
        assert result.dtype == jnp.float32 and result.shape == leaf.shape
        matrices = np.asarray(view.to_matrices(np.asarray(leaf)), np.float64)
        exact = [polynomial_of(m, mc.NS_COEFFS["keller"]) for m in matrices]
        actual = view.to_matrices(np.asarray(result))
        np.testing.assert_allclose(actual, np.stack(exact), atol=2e-4)


@pytest.mark.parametrize(
    "entries, slots", one_at_a_time([0, 24, 50, 96, 10**6], [0, 1, 4, 7])
)
def test_batches_do_not_change_the_result(slots, entries):
    stack = normal(0, slots, 4, 6, dtype=jnp.bfloat16)
    batches = []

    def function(x):
        batches.append(len(x))
        return jnp.float32(x) @ jnp.float32(x).mT @ jnp.float32(x)

    expected = function(stack)
    batches.clear()
    with platform_with("cpu", batch_entries=entries) as cpu:
        result = Solver(function, platform=cpu).orthogonalize_all(stack)
    assert result.dtype == stack.dtype
    np.testing.assert_allclose(np.float32(result), expected, rtol=2**-8, atol=1e-6)
    assert max(batches, default=0) * 24 <= max(entries, 24)


@pytest.mark.parametrize("first", [0, 1, 3, 6, 7])
def test_the_first_of_a_stack(first):
    """How many is known at run time alone, and so is how often the loop runs."""
    stack = normal(0, 7, 4, 6)
    exact = np.float64(stack) @ np.float64(stack).transpose(0, 2, 1) @ stack

    def function(x):
        assert len(x) <= 3
        return x @ x.mT @ x

    with platform_with("cpu", batch_entries=72) as cpu:
        by_function = Solver(function, platform=cpu)
        result = jax.jit(by_function.orthogonalize_all)(stack, first)
    assert result.shape == stack.shape
    np.testing.assert_allclose(result[:first], exact[:first], atol=1e-4)


def test_unstack_cuts_where_asked():
    stack = jnp.arange(24.0).reshape(6, 2, 2)
    for cut in (unstack, jax.vmap(unstack, (0, None))):
        batch = stack if cut is unstack else stack[None]
        parts = cut(batch, (1, 0, 3, 2))
        axis = 0 if cut is unstack else 1
        expected = jnp.split(batch, [1, 1, 4], axis=axis)
        chex.assert_trees_all_equal(list(parts), expected)


@pytest.mark.parametrize("most", [1, 2, 9])
def test_unstack_of_many_leaves(most):
    """On CPU by starts from a loop that carries few numbers: XLA is slow with many."""
    counts = [int(x) for x in np.random.default_rng(most).integers(0, most + 1, 400)]
    stack = np.arange(3.0 * sum(counts)).reshape(-1, 3, 1)
    program = jax.jit(lambda x: unstack(x, tuple(counts)))
    expected = np.split(stack, np.cumsum(counts)[:-1])
    chex.assert_trees_all_equal(list(program(stack)), expected)
    (loop,) = re.findall(r"stablehlo.while\((.*)\)", program.lower(stack).as_text())
    assert loop.count("%iterArg") <= 2 * np.sqrt(sum(counts)) + 4


@pytest.mark.more
@pytest.mark.parametrize("shape", [(512, 512), (300, 700), (257, 1029)])
@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
def test_blocks_of_hermitian_products_follow_the_polynomial(shape, method):
    x = matrix_of(np.geomspace(1, 1e-2, min(shape)), *shape)
    y = mc.newton_schulz(jnp.asarray(x, jnp.float32), method=method)
    expected = polynomial_of(x, mc.NS_COEFFS["keller"])
    assert np.linalg.norm(y - expected) < 2e-4 * np.linalg.norm(expected)


@pytest.mark.more
def test_a_leaf_more_of_a_known_shape_adds_a_few_operations():
    def operations(layers):
        leaves = [jnp.zeros(s) for s in gpt2_shapes(layers).values()]
        views = [matrix_view(leaf.shape, PLAIN) for leaf in leaves]
        program = jax.jit(lambda x: orthogonalized(SOLVER, x, views)).lower(leaves)
        return program.as_text().count(" = ")

    one, two, three = (operations(layers) for layers in (2, 3, 4))
    assert three - two == two - one <= 12 * 6


def test_under_jit_and_vmap():
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5)]
    leaves = [leaf_of((3, *shape), jnp.float32, i) for i, shape in enumerate(shapes)]
    views = [matrix_view(shape, PLAIN) for shape in shapes]

    def function(leaves):
        return orthogonalized(SOLVER, leaves, views)

    batched = jax.jit(jax.vmap(function))(leaves)
    for i in range(3):
        one = function([leaf[i] for leaf in leaves])
        chex.assert_trees_all_close([leaf[i] for leaf in batched], one, atol=1e-5)


def test_leaves_without_matrices_pass_through():
    masked = optax.MaskedNode()
    leaves = [masked, jnp.ones((0, 4, 6)), jnp.ones((2, 4, 6))]
    views = [None, *(matrix_view(leaf.shape, PLAIN) for leaf in leaves[1:])]
    results = orthogonalized(SOLVER, leaves, views)
    assert results[0] is masked and results[1].shape == (0, 4, 6)
    chex.assert_trees_all_close(results[2], mc.newton_schulz(leaves[2]), atol=1e-5)
    (empty,) = orthogonalized(SOLVER, leaves[1:2], views[1:2])
    assert empty.shape == (0, 4, 6)
    assert orthogonalized(SOLVER, [], []) == []


def test_abstract_leaves_keep_their_shapes_and_dtypes():
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for (name, shape), dtype in zip(gpt2_shapes(1).items(), DTYPES * 2, strict=True)
    }
    tx = mc.scale_by_muon()
    updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
