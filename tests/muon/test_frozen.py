"""Leaves that a reading calls frozen: no update, no decay, no state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, updates_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {
    "up": normal(0, 8, 16),
    "teacher": {"kernel": normal(1, 8, 16), "bias": normal(2, 16)},
    "bias": normal(3, 16),
    "down": normal(4, 16, 8),
    "out": normal(5, 8, 4),
}
GRADS = jax.tree.map(lambda x: normal(6, *x.shape), PARAMS)


def loss(p, x, is_frozen=False):
    own = jax.nn.relu(x @ p["up"] + p["bias"])
    other = jax.nn.relu(x @ p["teacher"]["kernel"] + p["teacher"]["bias"])
    other = jax.lax.stop_gradient(other) if is_frozen else other
    return jnp.mean((jax.nn.relu((own + other) @ p["down"]) @ p["out"]) ** 2)


def read():
    return mc.read_model(loss, PARAMS, normal(7, 3, 8))


def frozen():
    return mc.read_model(loss, PARAMS, normal(7, 3, 8), is_frozen=True)


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
def test_nothing_moves_them_and_the_rest_is_as_it_was(make):
    updates = []
    for model in (read(), frozen()):
        tx = make(0.1, weight_decay=0.5, neuron_b2=0.9, model=model)
        updates.append(updates_of(tx, [GRADS] * 2, PARAMS, attention_stats={})[0])
    before, after = updates
    for leaf, update in after.pop("teacher").items():
        assert np.any(before["teacher"][leaf]) and not np.any(update)
        assert update.dtype == GRADS["teacher"][leaf].dtype
    before.pop("teacher")
    # Two programs. Rounding, magnified by the slope of the steps, of entries up to 0.1.
    atol = 0.1 * 3.4445**5 * 2**-24
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), after, before
    )


def test_they_have_no_state_and_without_them_the_state_is_as_ever():
    by_names, by_reading = (mc.muon(0.1, model=x).init(PARAMS) for x in (None, read()))
    assert set(by_names.inner_states) == set(by_reading.inner_states)
    size = lambda state: sum(x.size for x in jax.tree.leaves(state))  # noqa: E731
    state = mc.muon(0.1, model=frozen()).init(PARAMS)
    # One momentum of the kernel, two moments of the bias.
    assert size(by_reading) - size(state) == 8 * 16 + 2 * 16


def test_what_looks_says_so():
    model = frozen()
    labels = mc.param_labels(PARAMS, model=model)
    assert labels["teacher"] == {"kernel": "frozen", "bias": "frozen"}
    mask = mc.matrix_mask(PARAMS, model=model)
    assert mask["up"] and not any(mask["teacher"].values())
    table, totals, _ = mc.describe(PARAMS, model=model, weight_decay=0.5).split("\n\n")
    lines = {line.split()[0]: line.split() for line in table.splitlines()}
    assert lines["teacher/kernel"][4:6] == ["frozen", "-"]
    assert lines["up"][-4:-2] == ["muon", "0.5"]
    found = [line.split() for line in totals.splitlines()[1:]]
    names, sizes, *_ = zip(*found, strict=True)
    assert names == ("muon", "adamw", "frozen", "all")
    whole = sum(x.size for x in jax.tree.leaves(PARAMS))
    frozen_size = 8 * 16 + 16
    assert int(sizes[2]) == frozen_size and int(sizes[3]) == whole
    assert found[2][-2:] == ["0", "B"]
    numbers = mc.scalars((), PARAMS, model=model)
    expected = np.linalg.norm([np.linalg.norm(x) for x in PARAMS["teacher"].values()])
    np.testing.assert_allclose(numbers["param_norm/frozen"], expected, rtol=1e-5)


@pytest.mark.parametrize("numbers", [mc.MuonDimensionNumbers(0, 1), None])
def test_what_is_given_is_not_frozen(numbers):
    options = dict(model=frozen(), dimension_numbers={"teacher/kernel": numbers})
    tx = mc.muon(0.1, **options)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert np.any(updates["teacher"]["kernel"])
    assert not np.any(updates["teacher"]["bias"])
    label = mc.param_labels(PARAMS, **options)["teacher"]["kernel"]
    assert label == ("matrix" if numbers else "vector")
    assert mc.matrix_mask(PARAMS, **options)["teacher"]["kernel"] is (label == "matrix")


def test_a_matrix_that_is_given_to_adamw_is_none():
    options = dict(model=read(), dimension_numbers={"up*": None})
    assert mc.param_labels(PARAMS, **options)["up"] == "vector"
    expected = mc.matrix_mask(PARAMS, model=read()) | {"up": False}
    assert mc.matrix_mask(PARAMS, **options) == expected


def test_labels_of_a_reading_part_the_optimizer():
    """By `optax.partition`: zeros for what is frozen, as `mc.muon` itself has them."""
    model, zero = frozen(), optax.set_to_zero()
    labels = mc.param_labels(PARAMS, model=model)
    groups = dict.fromkeys(set(jax.tree.leaves(labels)), optax.sgd(1.0))
    tx = optax.partition(groups | {"frozen": zero}, labels)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert not any(map(np.any, updates["teacher"].values())) and np.any(updates["up"])
