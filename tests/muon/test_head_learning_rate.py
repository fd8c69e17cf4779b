"""`head_learning_rate`: the output head takes AdamW's step at a rate of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import more, normal
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


PARAMS = {
    "embed": {"embedding": normal(0, 24, 8)},
    "up": {"kernel": normal(1, 8, 16), "bias": normal(2, 16)},
    "down": {"kernel": normal(3, 16, 8)},
    "lm_head": {"kernel": normal(4, 8, 24), "bias": normal(5, 24)},
}
GRADS = jax.tree.map(lambda x: normal(6, *x.shape), PARAMS)
RATES = dict(learning_rate=0.1, adam_learning_rate=0.02)


def updates_of(tx, params=PARAMS, grads=GRADS, steps=3):
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(actual, expected, rtol=1e-6):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-7)
    jax.tree.map(compare, actual, expected)


@pytest.mark.parametrize("cautious", [more(False), True])
def test_only_the_head_changes(cautious):
    """As with a second optimizer for the head alone, whose bias stays with the rest."""
    rates = RATES | dict(cautious_weight_decay=cautious)
    actual = updates_of(mc.muon(**rates, head_learning_rate=0.005))
    others = updates_of(mc.muon(**rates))
    slow = updates_of(mc.muon(**rates | dict(adam_learning_rate=0.005)))
    expected = others | {"lm_head": others["lm_head"] | slow["lm_head"]}
    expected["lm_head"]["bias"] = others["lm_head"]["bias"]
    assert_close(actual, expected)
    changed = jnp.abs(actual["lm_head"]["kernel"] - others["lm_head"]["kernel"])
    assert changed.max() > 0.01


def test_the_head_by_adamw_of_optax():
    kernel = PARAMS["lm_head"]["kernel"]
    actual = updates_of(mc.muon(**RATES, head_learning_rate=0.005))
    adamw = optax.adamw(0.005, 0.9, 0.95, weight_decay=0.1)
    expected = updates_of(adamw, kernel, GRADS["lm_head"]["kernel"])
    assert_close(actual["lm_head"]["kernel"], expected, rtol=1e-5)


def test_a_schedule():
    rate = optax.linear_schedule(0.01, 0.0, 2)
    tx = mc.muon(**RATES, head_learning_rate=rate)
    two, three = (updates_of(tx, steps=n)["lm_head"]["kernel"] for n in (2, 3))
    assert_close(two, three)


def test_injected():
    """A traced rate, changed between steps."""
    make = optax.inject_hyperparams(mc.muon)
    tx = make(**RATES, head_learning_rate=0.005)
    state = tx.init(PARAMS)
    state.hyperparams["head_learning_rate"] = jnp.asarray(0.0)
    updates, _ = tx.update(GRADS, state, PARAMS)
    assert not jnp.any(updates["lm_head"]["kernel"])
    assert jnp.any(updates["lm_head"]["bias"])


@pytest.mark.parametrize(
    "numbers",
    [
        {"up/kernel": Numbers((0,), (1,))},
        functools.partial(mc.flax_dimension_numbers),
        mc.flax_dimension_numbers(PARAMS),
    ],
    ids=["patterns", "function", "tree"],
)
def test_beside_dimension_numbers(numbers):
    rates = RATES | dict(head_learning_rate=0.005)
    found = updates_of(mc.muon(**rates, dimension_numbers=numbers))
    assert_close(found, updates_of(mc.muon(**rates)))


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(24, 8, rngs=rngs)
            self.up = nnx.Linear(8, 8, rngs=rngs)
            self.head = nnx.Linear(8, 24, rngs=rngs)

    model = Model(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(
        model, mc.muon(**RATES, weight_decay=0.0, head_learning_rate=0.0), wrt=nnx.Param
    )
    optimizer.update(model, jax.tree.map(jnp.ones_like, before))
    after = nnx.state(model, nnx.Param)
    assert_close(after["head"]["kernel"], before["head"]["kernel"])
    moved = after["head"]["bias"][...] - before["head"]["bias"][...]
    assert jnp.all(moved != 0)


def test_inside_shard_map():
    """The head is found by the shapes of whole leaves."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.tree.map(lambda x: P("fsdp") if x.ndim == 2 else P(), PARAMS)
    tx = mc.muon(**RATES, head_learning_rate=0.005, shardings=specs)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, specs), out_specs=specs
    )
    def step(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    alone = mc.muon(**RATES, head_learning_rate=0.005)
    assert_close(step(PARAMS, GRADS), updates_of(alone, steps=1), rtol=1e-4)


def test_without_a_head():
    tx = mc.muon(**RATES, head_learning_rate=0.005)
    with pytest.raises(ValueError, match="no leaf .* an output head.*leave"):
        tx.init({name: PARAMS[name] for name in ("embed", "up", "down")})
    everywhere = {"lm_head/kernel": Numbers((0,), (1,))}
    with pytest.raises(ValueError, match="no leaf"):
        mc.muon(**RATES, head_learning_rate=0.005, dimension_numbers=everywhere).init(
            PARAMS
        )
