"""Muon against torch's trajectories, optax's Muon and a naive float64 loop."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    first_update,
    more,
    normal,
    one_at_a_time,
    polynomial_of,
    ROOT,
    step_of,
    trained,
)
from internals import platform_with

import muonclip_jax as mc


@pytest.fixture
def every_speed_feature():
    """As for large matrices: two blocks, batches, and stacks of one leaf."""
    with platform_with("cpu", block_rows=2, batch_entries=1, stack_entries=1):
        yield


@pytest.mark.more
@pytest.mark.parametrize("scale", [more("original"), "match_rms_adamw"])
@pytest.mark.parametrize("momentum", ["nesterov", more("heavyball")])
def test_follows_torch_with_every_speed_feature(scale, momentum, every_speed_feature):
    options = {"orthogonalizer": mc.NewtonSchulz(method="gram")}
    check_against_torch(like_torch(scale, momentum, **options), f"{scale}_{momentum}")


@pytest.mark.parametrize(
    "method, momentum, scale",
    one_at_a_time(
        ["auto", "standard"], ["nesterov", "heavyball"], ["original", "match_rms_adamw"]
    ),
)
def test_follows_torch(scale, momentum, method):
    options = {"orthogonalizer": mc.NewtonSchulz(method=method)}
    check_against_torch(like_torch(scale, momentum, **options), f"{scale}_{momentum}")


def like_torch(scale, momentum, **options):
    options |= {"consistent_rms": 0.2 if scale == "match_rms_adamw" else None}
    options |= {"nesterov": momentum == "nesterov", "weight_decay": 0.1, "beta": 0.95}
    return mc.muon(0.02, **options)


def check_against_torch(tx, name):
    recorded = np.load(ROOT / f"tests/data/torch_muon_{name}.npz")
    count = sum(name.endswith("grads") for name in recorded)
    trajectory = {j: recorded[f"{j}_params"] for j in range(count)}
    params = {j: jnp.asarray(steps[0]) for j, steps in trajectory.items()}
    state = tx.init(params)
    for t in range(5):
        grads = {j: jnp.asarray(recorded[f"{j}_grads"][t]) for j in range(count)}
        params, state = step_of(tx)(grads, state, params)
        expected = {j: steps[t + 1] for j, steps in trajectory.items()}
        chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)


def gradients(seed, shapes):
    return {k: normal((seed, i), *x) for i, (k, x) in enumerate(shapes.items())}


@pytest.mark.more
@pytest.mark.skipif(
    "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters,
    reason="Optax before 0.2.8 has one scaling",
)
@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_equals_optax_without_nesterov(consistent_rms):
    shapes = {"wide": (8, 24), "tall": (24, 8), "square": (12, 12), "vector": (5,)}
    params = gradients(0, shapes)
    same = dict(beta=0.95, nesterov=False, weight_decay=0.1)
    same |= {"consistent_rms": consistent_rms}
    ours = mc.muon(0.02, **same)
    adam = dict(adam_b2=0.95, adam_weight_decay=0.1)
    theirs = optax.contrib.muon(0.02, **same, **adam)
    grads = [gradients(t + 1, shapes) for t in range(4)]
    found, expected = (trained(tx, params, grads)[0] for tx in (ours, theirs))
    chex.assert_trees_all_close(found, expected, atol=2e-5)


#: As given, and what it is in each step.
BETAS = {
    "constant": (0.9, [0.9] * 5),
    "rising": (
        optax.linear_schedule(0.5, 0.9, 3),
        [0.5, 0.5 + 0.4 / 3, 0.5 + 0.8 / 3, 0.9, 0.9],
    ),
}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_direction_and_momentum_against_a_naive_loop(nesterov, consistent_rms, beta):
    shape, (given, betas) = (6, 10), BETAS[beta]
    options = {"nesterov": nesterov, "consistent_rms": consistent_rms}
    tx = mc.scale_by_muon(beta=given, **options)
    state, update = tx.init({"w": jnp.zeros(shape)}), jax.jit(tx.update)
    momentum = np.zeros(shape)
    factor = np.sqrt(10 / 6) if consistent_rms is None else 0.2 * np.sqrt(10)
    for t, of_step in enumerate(betas):
        g = np.random.default_rng(t).normal(size=shape)
        updates, state = update({"w": jnp.asarray(g, jnp.float32)}, state)
        momentum = of_step * momentum + g
        direction = g + of_step * momentum if nesterov else momentum
        expected = factor * polynomial_of(direction, mc.NS_COEFFS["keller"])
        np.testing.assert_allclose(updates["w"], expected, atol=1e-4)
        np.testing.assert_allclose(state.mu["w"], momentum, rtol=1e-5, atol=1e-6)
    assert state.count == 5


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (8, 128)])
def test_update_has_the_root_mean_square_of_adamw(shape):
    g = gradients(3, {"w": shape})
    updates = first_update(mc.scale_by_muon(), g)
    rms = float(jnp.sqrt(jnp.mean(updates["w"] ** 2)))
    assert 0.2 * 0.68 < rms < 0.2 * 1.2


def test_per_head_matrices():
    """Every head of query, key and value is orthogonalized by itself."""
    kernel = normal(0, 6, 3, 4)
    out = {"kernel": jnp.swapaxes(kernel, 0, 1).swapaxes(1, 2)}
    params = {name: {"kernel": kernel} for name in ("query", "key", "value")}
    numbers = functools.partial(mc.flax_dimension_numbers, per_head=True)
    tx = mc.scale_by_muon(dimension_numbers=numbers, beta=0.0)
    updates = first_update(tx, params | {"out": out})
    for name in params:
        for h in range(3):
            exact = polynomial_of(np.asarray(kernel[:, h]), mc.NS_COEFFS["keller"])
            actual = updates[name]["kernel"][:, h]
            np.testing.assert_allclose(actual, 0.2 * np.sqrt(6) * exact, atol=1e-4)
    whole = np.asarray(out["kernel"]).reshape(12, 6)
    exact = 0.2 * np.sqrt(12) * polynomial_of(whole, mc.NS_COEFFS["keller"])
    found = updates["out"]["kernel"].reshape(12, 6)
    np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.parametrize(
    "mu_dtype, dtype",
    one_at_a_time(
        [None, jnp.bfloat16, jnp.float32], [jnp.float16, jnp.bfloat16, jnp.float32]
    ),
)
def test_dtypes_never_change(dtype, mu_dtype):
    params = {"w": jnp.ones((4, 6), dtype), "b": jnp.ones(4, dtype)}
    tx = mc.muon(1e-2, mu_dtype=mu_dtype)
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    chex.assert_trees_all_equal_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    (mu,) = jax.tree.leaves(after.inner_states["muon"].inner_state[0].mu)
    assert mu.dtype == (mu_dtype or dtype)


def test_init_accepts_abstract_params():
    params = {
        "w": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    for tx in (mc.muon(1e-2), mc.muonclip(1e-2)):
        concrete = tx.init(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), params))
        abstract = jax.eval_shape(tx.init, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
        tx.init(params)


def test_learning_rate_schedule():
    params = {"w": jnp.eye(3), "b": jnp.ones(3)}
    tx = mc.muon(optax.linear_schedule(1.0, 0.0, 2), weight_decay=0.0)
    state, norms = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update(params, state, params)
        norms.append(float(jnp.linalg.norm(updates["w"])))
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4) and norms[2] == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (3, 0, 4)])
@pytest.mark.parametrize("consistent_rms", [0.2, None, lambda m, n: (m / n) ** 0.5])
def test_a_leaf_without_entries_has_no_scale(shape, consistent_rms):
    params = {"nothing": jnp.zeros(shape), "w": jnp.ones((4, 8))}
    numbers = mc.MuonDimensionNumbers(-2, -1)
    tx = mc.scale_by_muon(consistent_rms=consistent_rms, dimension_numbers=numbers)
    updates = first_update(tx, params)
    assert updates["nothing"].shape == shape and updates["w"].any()


PARAMS = {"w": normal(0, 8, 12)}
RISING = optax.linear_schedule(0.5, 0.9, 3)


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
@pytest.mark.parametrize("wrap", [lambda make: make, optax.inject_hyperparams])
def test_rises_from_085_to_095_over_300_steps_by_default(make, wrap):
    rising = {"beta": lambda count: 0.85 + 0.1 * jnp.minimum(count, 300) / 300}
    ends = []
    for options in ({}, rising):
        tx = wrap(make)(0.1, orthogonalizer=mc.NewtonSchulz(steps=1), **options)
        state = tx.init(PARAMS)
        # From a step before its end, in the counts that both kinds of state keep.
        state = optax.tree.map_params(
            tx, lambda x: x, state, transform_non_params=lambda x: _later(x, 298)
        )
        for step in range(4):
            g = {"w": normal((step, 2), 8, 12)}
            update, state = tx.update(g, state, PARAMS, attention_stats={})
        ends.append(update["w"])
    np.testing.assert_allclose(*ends, atol=1e-5)


def _later(x, steps):
    """A count that is `steps` further on; what is no count stays."""
    is_count = jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 0
    return x + steps if is_count else x


@pytest.mark.parametrize("made, given", [(RISING, 0.9), (0.9, RISING)])
def test_a_run_goes_on_with_a_beta_of_the_other_kind(made, given):
    tx = mc.scale_by_muon(beta=made)
    _, state = tx.update(PARAMS, tx.init(PARAMS))
    first = state.mu["w"]
    _, state = mc.scale_by_muon(beta=given).update(PARAMS, state)
    beta = given(1) if callable(given) else given
    expected = beta * first + PARAMS["w"]
    np.testing.assert_allclose(state.mu["w"], expected, rtol=1e-5)
    assert state.count == 2


@pytest.mark.parametrize("value, clipped", [(-0.5, 0.0), (1.5, 1.0), (np.nan, 0.0)])
def test_out_of_range(value, clipped):
    """An error where it begins so; later clipped, where it would grow or destroy."""
    for make in (mc.scale_by_muon, functools.partial(mc.muonclip, 0.1)):
        with pytest.raises(ValueError, match="beta must be in .*begins at"):
            make(beta=lambda step: value).init(PARAMS)
        # Under `jit` a schedule of arrays has no value yet.
        jax.jit(make(beta=lambda step: jnp.asarray(value)).init)(PARAMS)
    tx = mc.scale_by_muon(beta=lambda step: jnp.where(step < 1, 0.5, value))
    _, state = tx.update(PARAMS, tx.init(PARAMS))
    for update in (tx.update, jax.jit(tx.update)):
        _, after = update(PARAMS, state)
        expected = (1 + clipped) * PARAMS["w"]
        np.testing.assert_allclose(after.mu["w"], expected, rtol=1e-6)
