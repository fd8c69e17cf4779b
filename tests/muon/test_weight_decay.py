"""Weight decay against loops over entries, with masks, schedules and in Muon."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import first_update, mesh_of, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {"w": normal(0, 5, 7), "b": normal(1, 7), "s": jnp.array(0.0)}
UPDATES = {"w": normal(2, 5, 7), "b": normal(3, 7), "s": jnp.array(1.0)}


def naive(update, weight, rate):
    """Entry by entry, in float64."""
    result = np.array(update, np.float64)
    for i, (u, w) in enumerate(zip(result.flat, np.asarray(weight).flat, strict=True)):
        if u * float(w) > 0:
            result.flat[i] = u + rate * float(w)
    return result


@pytest.mark.parametrize("rate", [0.1, -0.2, 0])
def test_equals_a_loop_over_entries(rate):
    tx = mc.add_cautious_decayed_weights(rate)
    updates, _ = jax.jit(tx.update)(UPDATES, tx.init(PARAMS), PARAMS)
    for name, update in updates.items():
        expected = naive(UPDATES[name], PARAMS[name], rate)
        np.testing.assert_allclose(update, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_cautious", [False, True])
def test_schedules_count_their_steps(is_cautious):
    """Optax 0.2.6 decays by the first value of a schedule for ever."""

    def schedule(count):
        return 0.1 * (count + 1)

    options = {"beta": 0.0, "cautious_weight_decay": is_cautious}
    tx = mc.muon(1.0, weight_decay=schedule, **options)
    zero = mc.muon(1.0, beta=0.0, weight_decay=0.0)
    state, plain = tx.init(PARAMS), zero.init(PARAMS)
    for step in range(3):
        updates, state = tx.update(UPDATES, state, PARAMS)
        direction, plain = zero.update(UPDATES, plain, PARAMS)
        u, w = -np.asarray(direction["w"], np.float64), np.asarray(PARAMS["w"])
        rate = 0.1 * (step + 1)
        expected = naive(u, w, rate) if is_cautious else u + rate * w
        np.testing.assert_allclose(-updates["w"], expected, rtol=1e-5, atol=1e-6)


def test_small_numbers_have_signs_too():
    tx = mc.add_cautious_decayed_weights(0.5)
    params, updates = jnp.array([1e-30, -1e-30]), jnp.array([1e-30, 1e-30])
    after, _ = tx.update(updates, tx.init(params), params)
    np.testing.assert_allclose(after, [1.5e-30, 1e-30], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_both_sides_of_muon_and_dtypes(dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    updates = jax.tree.map(lambda p: p.astype(dtype), UPDATES)
    make = functools.partial(mc.muon, 0.1, adam_learning_rate=0.1)
    cautious = make(weight_decay=0.5, cautious_weight_decay=True)
    plain, none = make(weight_decay=0.5), make(weight_decay=0.0)
    results = [first_update(tx, updates, params) for tx in (cautious, plain, none)]
    for name, w in params.items():
        with_care, decayed, bare = (np.asarray(r[name], np.float64) for r in results)
        agrees = np.asarray(-bare * np.asarray(w, np.float64)) > 0
        np.testing.assert_array_equal(with_care, np.where(agrees, decayed, bare))
        assert results[0][name].dtype == dtype


@pytest.mark.parametrize("type_", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(type_):
    sharding = NamedSharding(mesh_of(type_, a=4, b=2), P("a", "b"))
    pair = {"w": normal(0, 8, 4)}, {"w": normal(1, 8, 4)}
    tx = mc.add_cautious_decayed_weights(0.1)
    params, updates = jax.device_put(pair, sharding)
    update = jax.jit(tx.update)
    after, _ = update(updates, tx.init(params), params)
    expected, _ = tx.update(pair[1], tx.init(pair[0]), pair[0])
    np.testing.assert_array_equal(after["w"], expected["w"])
    text = update.lower(updates, tx.init(params), params).compile().as_text()
    assert "all-" not in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"neuron_b2": 0.9},
        {"cautious_weight_decay": True, "weight_decay_mask": {"w": True, "b": False}},
        {"dimension_numbers": {"w": mc.MuonDimensionNumbers(0, 1), "b": None}},
    ],
)
def test_where_nothing_decays_no_params_are_needed(options):
    """Code that was written for `optax.adam` gives none."""
    params = {"w": normal(0, 6, 4), "b": normal(1, 4)}
    tx = mc.muon(0.1, weight_decay=0.0, **options)
    state = tx.init(params)
    bare, after = tx.update(params, state)
    expected, after_params = tx.update(params, state, params)
    chex.assert_trees_all_equal((bare, after), (expected, after_params))
    with pytest.raises(ValueError, match="needs the params.*weight_decay=0.0"):
        mc.muon(0.1, adam_weight_decay=0.0, **options).update(params, state)


NOTHING = jax.tree.map(lambda _: False, PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        mc.muon(0.1, weight_decay=np.float32(0.0)),
        mc.muon(0.1, weight_decay=jnp.zeros(())),
        mc.muon(0.1, weight_decay_mask=NOTHING, cautious_weight_decay=True),
        mc.muon(0.1, adam_weight_decay=0.0, weight_decay_mask={**NOTHING, "b": True}),
        mc.multi_steps(mc.muon(0.1, weight_decay=0.0, neuron_b2=0.9), 1),
        optax.apply_if_finite(mc.muon(0.1, weight_decay=0.0), 2),
        optax.inject_hyperparams(mc.muon, static_args="weight_decay")(
            0.1, weight_decay=0.0
        ),
    ],
)
def test_no_params_where_nothing_decays(tx):
    """As with them, which nothing looks at."""
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        without, _ = update(UPDATES, state)
        chex.assert_trees_all_equal(without, update(UPDATES, state, PARAMS)[0])


def test_a_decay_that_is_traced_may_be_any():
    tx = optax.inject_hyperparams(mc.muon)(0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"static_args=\('weight_decay',\)"):
        jax.jit(tx.update)(UPDATES, tx.init(PARAMS))
