"""Everything optax and Flax users wrap an optimizer in."""

import functools
import inspect
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import (
    few,
    inputs,
    largest,
    linen_stats,
    linen_variables,
    LinenModel,
    more,
    nnx_model,
    nnx_stats,
    randomize,
    step_of,
)

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


KERNEL = (8, 2, 4)


def make_params(dtype=jnp.float32):
    attention = {
        name: {"kernel": jnp.ones(KERNEL, dtype), "bias": jnp.ones(KERNEL[1:], dtype)}
        for name in ("query", "key")
    }
    mlp = {"kernel": jnp.ones((8, 16), dtype), "bias": jnp.ones(16, dtype)}
    embed = {"embedding": jnp.ones((10, 8), dtype)}
    return randomize({"attn": attention, "mlp": mlp, "embed": embed})


STATS = {"attn": {"max_logits": jnp.asarray([90.0, 400.0])}}
PARAMS = make_params()
GRADS = randomize(PARAMS, 1)


def run(tx, steps=3, params=PARAMS, grads=GRADS, stats=STATS):
    """Takes jitted steps, in which neither state nor updates may change dtype."""
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, new_state = tx.update(grads, state, params, attention_stats=stats)
        # `apply_updates` would cast them.
        chex.assert_trees_all_equal_dtypes(updates, dtypes_after_clip(params))
        return optax.apply_updates(params, updates), new_state

    for _ in range(steps):
        params, new_state = step(params, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        state = new_state
    return params, state


def dtypes_after_clip(params):
    """Query and key are scaled, in float32 at least."""
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params["attn"])
    return params | {"attn": wide}


def complement(params):
    return jax.tree.map(operator.not_, mc.matrix_mask(params))


def explicit_chain():
    return optax.chain(
        optax.masked(mc.scale_by_muon(), mc.matrix_mask),
        optax.masked(optax.scale_by_adam(b2=0.95), complement),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-2),
        mc.qk_clip(),
    )


def explicit_partition():
    def labels(params):
        return jax.tree.map(lambda m: "muon" if m else "adam", mc.matrix_mask(params))

    return optax.named_chain(
        ("direction", optax.partition(
            {"muon": mc.scale_by_muon(), "adam": optax.scale_by_adam(b2=0.95)}, labels
        )),
        ("decay", optax.add_decayed_weights(0.1)),
        ("rate", optax.scale_by_learning_rate(1e-2)),
        ("clip", mc.qk_clip()),
    )  # fmt: skip


WRAPPERS = {
    "explicit chain of masks": explicit_chain,
    "named_chain and partition": explicit_partition,
    "inject_hyperparams": lambda: optax.inject_hyperparams(mc.muonclip)(1e-2),
    "inject_hyperparams, static orthogonalizer": lambda: optax.inject_hyperparams(
        mc.muonclip, static_args="orthogonalizer"
    )(1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(mc.muonclip(1e-2), 3),
    "MultiSteps of one": lambda: optax.MultiSteps(mc.muonclip(1e-2), 1),
    "schedules": lambda: mc.muonclip(
        optax.constant_schedule(1e-2), weight_decay=optax.constant_schedule(0.1)
    ),
    "masked with everything in": lambda: optax.masked(
        mc.muonclip(1e-2), jax.tree.map(lambda _: True, PARAMS)
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(mc.muonclip(1e-2)),
    "muon then clip": lambda: optax.chain(mc.muon(1e-2), mc.qk_clip()),
}


@functools.cache
def plain():
    return run(mc.muonclip(1e-2))


@pytest.mark.parametrize("name", few(WRAPPERS, "MultiSteps of one", "muon then clip"))
def test_wrapped_equals_plain(name):
    expected, plain_state = plain()
    actual, state = run(WRAPPERS[name]())
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    for key in ("max_logit", "num_clipped", "num_nonfinite"):
        assert optax.tree.get(state, key) == optax.tree.get(plain_state, key)


def always(step, **extra):
    return step >= 0


#: They choose between gradients and updates, which need one dtype.
CONDITIONAL = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, always),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, always),
}


def cast_first(wrap):
    cast = optax.stateless_with_tree_map(lambda g, _: g.astype(jnp.float32))
    return optax.chain(cast, wrap(mc.muonclip(1e-2)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, more(jnp.float16)])
@pytest.mark.parametrize("name", few(CONDITIONAL, "apply_if_finite"))
def test_conditional_wrappers_of_cast_gradients_change_nothing(name, dtype):
    grads = jax.tree.map(lambda g: g.astype(dtype), GRADS)
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    tx = cast_first(CONDITIONAL[name])
    actual, expected = run(tx, grads=grads), run(mc.muonclip(1e-2), grads=wide)
    chex.assert_trees_all_close(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    assert optax.tree.get(actual[1], "num_clipped") == 1


def finite_then_clip():
    """Without a cast: the wrapper sees no update of the clip."""
    return optax.chain(optax.apply_if_finite(mc.muon(1e-2), 3), mc.qk_clip())


LOW_PRECISION = {
    name: WRAPPERS[name] for name in ("inject_hyperparams", "MultiSteps of one")
} | {"apply_if_finite, then the clip": finite_then_clip}


@pytest.mark.parametrize("name", LOW_PRECISION)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, more(jnp.float16)])
def test_wrapped_keeps_low_precision(name, dtype):
    accepted = inspect.signature(optax.MultiSteps).parameters
    if name == "MultiSteps of one" and "accumulator_dtype" not in accepted:
        pytest.skip("Optax before 0.2.8 accumulates in the dtype of the updates")
    run(LOW_PRECISION[name](), params=make_params(dtype), grads=make_params(dtype))


@pytest.mark.more
def test_injected_hyperparams_can_be_set_between_steps():
    tx = optax.inject_hyperparams(mc.muonclip)(1e-2, threshold=100.0)
    state = tx.init(PARAMS)
    step = jax.jit(lambda s: tx.update(GRADS, s, PARAMS, attention_stats=STATS))
    _, first = step(state)
    assert optax.tree.get(first, "num_clipped") == 1
    state.hyperparams["threshold"] = jnp.asarray(50.0)
    _, second = step(state)
    assert optax.tree.get(second, "num_clipped") == 2
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = step(state)
    chex.assert_trees_all_equal(updates["mlp"]["kernel"], jnp.zeros((8, 16)))


def test_apply_if_finite_skips_update_and_clip_together():
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
    tx = optax.apply_if_finite(mc.muonclip(1e-2), 3)
    updates, state = tx.update(bad, tx.init(PARAMS), PARAMS, attention_stats=STATS)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    assert optax.tree.get(state, "num_clipped") == 0


def test_masking_out_a_whole_layer_leaves_it_unclipped():
    params = {"a": PARAMS["attn"], "b": PARAMS["attn"]}
    stats = {"a": STATS["attn"], "b": STATS["attn"]}
    mask = {
        "a": jax.tree.map(lambda _: True, params["a"]),
        "b": jax.tree.map(lambda _: False, params["b"]),
    }
    tx = optax.masked(mc.qk_clip(), mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    after = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(after["b"], params["b"])
    chex.assert_trees_all_close(after["a"], mc.clip_qk(params, stats)["a"], rtol=1e-6)
    assert optax.tree.get(state, "num_clipped") == 1


@pytest.mark.more
def test_scan_over_steps_and_donation_equal_single_steps():
    tx = mc.muonclip(1e-2)
    expected, _ = run(tx, steps=4)

    def step(carry, stats):
        params, state = carry
        carry = step_of(tx)(GRADS, state, params, attention_stats=stats)
        return carry, optax.tree.get(carry[1], "max_logit")

    @jax.jit
    def scan(params, state):
        stacked = jax.tree.map(lambda s: jnp.stack([s] * 4), STATS)
        return jax.lax.scan(step, (params, state), stacked)

    (scanned, _), logits = scan(PARAMS, tx.init(PARAMS))
    chex.assert_trees_all_close(scanned, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits, 400.0)

    donated = jax.jit(lambda carry: step(carry, STATS)[0], donate_argnums=0)
    carry = (jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS))
    for _ in range(4):
        carry = donated(carry)
    chex.assert_trees_all_close(carry[0], expected, rtol=1e-5, atol=1e-6)


def test_second_step_does_not_trace_again():
    tx = mc.muonclip(1e-2)

    @chex.assert_max_traces(1)
    def step(params, state):
        return step_of(tx)(GRADS, state, params, attention_stats=STATS)

    jitted, carry = jax.jit(step), (PARAMS, tx.init(PARAMS))
    for _ in range(3):
        carry = jitted(*carry)


def test_linen_train_state_with_the_function_form():
    x, model = inputs(), LinenModel()
    params = linen_variables(model, x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=mc.muon(0.0))
    stats = linen_stats(model, params, x)
    tau = 5.0
    before = largest(stats)
    assert (before > tau).any()

    @jax.jit
    def step(state, stats):
        state = state.apply_gradients(grads=state.params)
        return state.replace(params=mc.clip_qk(state.params, stats, tau))

    after = largest(linen_stats(model, step(state, stats).params, x))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


def test_nnx_optimizer_passes_the_captured_state():
    x, model = inputs(), nnx_model()
    optimizer = nnx.Optimizer(model, mc.muonclip(0.0, threshold=0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        captured = nnx.capture(lambda m: m(x).sum(), nnx.Intermediate)
        (_, stats), grads = nnx.value_and_grad(captured, has_aux=True)(model)
        optimizer.update(model, grads, attention_stats=stats)
        return stats

    before = largest(step(model, optimizer))
    assert (before > 0.05).any()
    after = largest(nnx_stats(model, x))
    np.testing.assert_allclose(after, np.minimum(before, 0.05), rtol=1e-4)
    clipped = optax.tree.get(optimizer.opt_state, "num_clipped")[...]
    assert clipped == (before > 0.05).sum()


def test_lookahead_steps_the_fast_params():
    """The optimizer sees these alone."""
    tx = optax.lookahead(mc.muon(1e-2), 2, 0.5)
    both = optax.LookaheadParams.init_synced(PARAMS)
    updates, _ = tx.update(GRADS, tx.init(both), both)
    plain, _ = run(mc.muon(1e-2), steps=1)
    found = optax.apply_updates(both, updates).fast
    # Params near 1, to which two programs add updates of 2e-3 at most.
    chex.assert_trees_all_close(found, plain, rtol=1e-6, atol=2**-23)


def test_optax_clip_after_any_optimizer():
    params, state = run(optax.chain(optax.adamw(1e-3), mc.qk_clip()), steps=1)
    adamw, _ = run(optax.adamw(1e-3), steps=1)
    chex.assert_trees_all_close(params, mc.clip_qk(adamw, STATS), rtol=1e-6)
    assert optax.tree.get(state, "num_clipped") == 1


@pytest.mark.parametrize("dtype", [jnp.float32, more(jnp.bfloat16)])
def test_orbax_round_trip_goes_on_bit_for_bit(tmp_path, dtype):
    tx = mc.muonclip(1e-2)
    params = make_params(dtype)
    params, state = run(tx, params=params, grads=params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "step", jax.eval_shape(lambda: (params, state))
        )
    chex.assert_trees_all_equal((params, state), restored)
    # Restored arrays are bound to a device, for which JAX would compile anew.
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), restored)
    grads = make_params(dtype)
    updates = [
        tx.update(grads, s, p, attention_stats=STATS)
        for p, s in ((params, state), restored)
    ]
    chex.assert_trees_all_equal(*updates)


def test_checkpoint_holds_no_hyperparameters():
    """A changed setting must take effect on resume."""
    other = mc.muonclip(
        0.5,
        threshold=7.0,
        alpha=0.1,
        beta=0.5,
        orthogonalizer="polar_express",
        consistent_rms=None,
        weight_decay=0.3,
        adam_learning_rate=0.7,
        adam_b1=0.6,
        adam_b2=0.8,
        adam_eps=1e-3,
        adam_weight_decay=0.4,
    )
    states = [tx.init(PARAMS) for tx in (mc.muonclip(1e-2), other)]
    assert jax.tree.leaves(states[0])
    chex.assert_trees_all_equal(*states)
