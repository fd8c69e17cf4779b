"""Micro-batches: one clip per real step, by the maximum of their statistics."""

import functools
import inspect
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import inputs, nnx_model, nnx_stats, randomize

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


KERNEL = randomize(jnp.ones((8, 2, 4)))
PARAMS = {
    name: {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}} for name in "ab"
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def stats(a, b):
    return {
        "a": {"max_logits": jnp.asarray(a)},
        "b": {"max_logits": (jnp.asarray(b),)},  # as a plain sow leaves it
    }


MICRO = [
    stats([50.0, 400.0], [90.0, 90.0]),
    stats([200.0, 50.0], [800.0, 90.0]),
    stats([90.0, 90.0], [90.0, 90.0]),
]
COMBINED = stats([200.0, 400.0], [800.0, 90.0])


def run(tx, micro_batches, grads=ZEROS):
    """Returns the params after every micro-batch, and the last state."""
    step, state, params, seen = jax.jit(tx.update), tx.init(PARAMS), PARAMS, []
    for each in micro_batches:
        updates, new_state = step(grads, state, params, attention_stats=each)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        params, state = optax.apply_updates(params, updates), new_state
        seen.append(params)
    return seen, state


def test_arguments_that_the_installed_optax_has():
    own = inspect.signature(optax.MultiSteps.__init__).parameters
    if "accumulator_dtype" not in own:
        pytest.skip("optax before 0.2.8 accumulates in the dtype of the gradients")
    options = {"accumulator_dtype": jnp.bfloat16}
    tx = mc.multi_steps(mc.muonclip(0.1), 3, **options)
    kept = optax.MultiSteps(optax.sgd(0.1), 3, **options).init(PARAMS).acc_grads
    chex.assert_trees_all_equal_dtypes(tx.init(PARAMS).acc_grads, kept)
    _, state = run(tx, MICRO[:2], jax.tree.map(jnp.ones_like, PARAMS))
    chex.assert_trees_all_equal_dtypes(state.acc_grads, kept)
    with pytest.raises(TypeError, match="accumulate_in"):
        mc.multi_steps(mc.muonclip(0.1), 3, accumulate_in=jnp.bfloat16)


def test_clips_once_per_real_step_by_the_maximum():
    seen, state = run(mc.multi_steps(mc.muonclip(0.0), 3), MICRO * 2)
    for i in (0, 1):
        chex.assert_trees_all_equal(seen[i], PARAMS)
    expected = mc.clip_qk(PARAMS, COMBINED)
    for i in (2, 3, 4):
        chex.assert_trees_all_close(seen[i], expected, rtol=1e-6)
    # The second real step starts a new maximum, with the same statistics.
    chex.assert_trees_all_close(seen[5], mc.clip_qk(expected, COMBINED), rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mc.scalars(state, PARAMS)["num_clipped"] == 3


def test_statistics_of_a_step_do_not_leak_into_the_next():
    calm = stats([90.0, 90.0], [90.0, 90.0])
    seen, state = run(mc.multi_steps(mc.muonclip(0.0), 2), [*MICRO[:2], calm, calm])
    chex.assert_trees_all_equal(seen[3], seen[1])
    assert mc.scalars(state, PARAMS)["max_logit"] == 90


def test_layers_of_a_stack_have_maxima_of_their_own():
    params = {
        "layers": {
            n: {"kernel": randomize(jnp.ones((3, 8, 2, 4)))} for n in ("query", "key")
        }
    }
    rows = [
        jnp.asarray([[50.0, 400], [90, 90], [300, 5]]) * scale for scale in (1.0, 0.5)
    ]
    rows[1] = rows[1][::-1]
    tx = mc.multi_steps(mc.muonclip(0.0), 2)
    state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    for row in rows:
        stats = {"layers": {"max_logits": row}}
        updates, state = tx.update(zeros, state, params, attention_stats=stats)
    expected = mc.clip_qk(params, {"layers": {"max_logits": jnp.maximum(*rows)}})
    found = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_plain_multi_steps_sees_the_last_micro_batch_alone():
    """What the wrapper is for: a witness that these statistics tell the two apart."""
    seen, state = run(
        optax.MultiSteps(mc.muonclip(0.0), 3).gradient_transformation(), MICRO
    )
    chex.assert_trees_all_equal(seen[2], PARAMS)
    with pytest.warns(UserWarning, match="last micro-batch alone.*mc.multi_steps"):
        mc.scalars(state, PARAMS)


def test_missing_statistics_of_any_micro_batch_are_an_error():
    tx = mc.multi_steps(mc.muonclip(0.0), 2)
    with pytest.raises(ValueError, match="needs attention_stats"):
        tx.update(ZEROS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="no statistics.*'b'"):
        partial = {"a": MICRO[0]["a"]}
        tx.update(ZEROS, tx.init(PARAMS), PARAMS, attention_stats=partial)
    with pytest.raises(ValueError, match="needs the params"):
        tx.update(ZEROS, tx.init(PARAMS), attention_stats=MICRO[0])


def test_a_model_without_attention():
    params = {"w": jnp.ones((2, 2))}
    tx = mc.multi_steps(mc.muonclip(0.1), 2)
    updates, state = tx.update(params, tx.init(params), params, attention_stats={})
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert state.running.shape == (0,)


@pytest.mark.more
def test_in_an_nnx_optimizer():
    model = nnx_model()
    optimizer = nnx.Optimizer(
        model, mc.multi_steps(mc.muonclip(0.0, threshold=1e-3), 2), wrt=nnx.Param
    )
    before = nnx.to_pure_dict(nnx.state(model))

    @nnx.jit
    def step(model, optimizer):
        stats = nnx_stats(model, inputs())
        grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads, attention_stats=stats)

    moved = []
    for _ in range(2):
        step(model, optimizer)
        after = nnx.to_pure_dict(nnx.state(model))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
        moved.append(not all(jax.tree.leaves(same)))
    assert moved == [False, True]
    metrics = mc.scalars(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert metrics["ever_clipped_fraction"] > 0


@pytest.mark.parametrize("is_mean", [True, False])
def test_what_optax_has_of_its_state_and_of_updates(is_mean):
    """Field by field, through a skipped micro-batch and two real steps."""
    options = {"should_skip_update_fn": optax.skip_not_finite}
    options["use_grad_mean"] = is_mean
    theirs = optax.MultiSteps(optax.sgd(0.1), 2, **options)
    ours = mc.multi_steps(optax.chain(optax.sgd(0.1), mc.qk_clip(1e9)), 2, **options)
    states = [ours.init(PARAMS), theirs.init(PARAMS)]
    grads = randomize(PARAMS, 3)
    broken = jax.tree.map(lambda g: g * jnp.inf, grads)
    seen = []
    for each in (grads, broken, grads, grads, grads):
        # What is skipped takes its logits along.
        stats = jax.tree.map(lambda s, x=each: s * (9 if x is broken else 1), COMBINED)
        updates, states[0] = ours.update(each, states[0], PARAMS, attention_stats=stats)
        expected, states[1] = theirs.update(each, states[1], PARAMS)
        chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
        for name in set(states[1]._fields) - {"inner_opt_state"}:
            pair = [getattr(x, name) for x in states]
            chex.assert_trees_all_close(*pair, rtol=1e-6)
        updated = [
            bool(x.has_updated(y)) for x, y in zip((ours, theirs), states, strict=True)
        ]
        assert updated[0] == updated[1]
        seen.append(updated[0])
        assert not seen[-1] or optax.tree.get(states[0], "max_logit") == 800
    assert seen == [False, False, True, False, True]
    assert int(optax.tree.get(states[0], "gradient_step")) == 2
    # Optax's is no transformation, and gives one by a method.
    assert ours.gradient_transformation() is ours


def test_other_arguments_reach_the_optimizer_as_they_are():
    given = {
        "kind": "warm",
        "is_last": True,
        "every": 3,
        "nested": {"line_search": max, "none": None},
        "flags": np.array([True]),
    }
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append({name: extra[name] for name in given})
        # A flag that were traced would have no truth value.
        is_on = extra["is_last"] and extra["flags"][0]
        return jax.tree.map(lambda u: u * int(is_on), updates), state

    of_user = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = mc.multi_steps(optax.chain(mc.muonclip(0.1), of_user), 1)
    tx.update(ZEROS, tx.init(PARAMS), PARAMS, attention_stats=COMBINED, **given)
    assert seen and all(x[name] is given[name] for x in seen for name in given)


def test_arrays_among_other_arguments_compile_once():
    traced, counts = [], []

    def update(updates, state, params=None, *, value, **extra):
        traced.append(value)
        return jax.tree.map(lambda u: u * value, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = mc.multi_steps(optax.chain(scaled, mc.qk_clip(1e9)), 1)
    state = tx.init(PARAMS)
    for value in (2.0, 3.0):
        options = {"attention_stats": COMBINED, "value": jnp.asarray(value)}
        updates, state = tx.update(PARAMS, state, PARAMS, **options)
        expected = jax.tree.map(lambda p, v=value: v * p, PARAMS)
        chex.assert_trees_all_close(updates, expected, rtol=1e-6)
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


def run_without_statistics(opt, params=PARAMS):
    tx = mc.multi_steps(opt, 2)
    state, before = tx.init(params), params
    for _ in range(2):
        updates, new_state = tx.update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        params, state = optax.apply_updates(params, updates), new_state
    assert bool(tx.has_updated(state))
    return before, params


def test_no_statistics_where_nothing_is_clipped():
    # By names alone QK-Clip would refuse this attention, which nobody asks it about.
    params = {"q_proj": {"kernel": KERNEL[:, 0]}, "k_proj": {"kernel": KERNEL[:, 0]}}
    before, after = run_without_statistics(mc.muon(0.1), params)
    assert not np.allclose(before["q_proj"]["kernel"], after["q_proj"]["kernel"])
    labels = {"a": "muon", "b": "sgd"}
    rest = {"muon": mc.muon(0.1), "sgd": optax.sgd(0.1)}
    before, after = run_without_statistics(optax.partition(rest, labels))
    # Two equal gradients of one step of descent.
    expected = 0.9 * before["b"]["key"]["kernel"]
    np.testing.assert_allclose(after["b"]["key"]["kernel"], expected, rtol=1e-6)


def test_attention_that_a_clip_refuses_is_no_matter_without_one():
    def loss(params, x):
        q, k, v = (jnp.einsum("td,dhk->htk", x, params[n]) for n in "qkv")
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        return jnp.sum((jax.nn.softmax(q @ k.mT) @ v) ** 2)

    params = {name: KERNEL for name in "qkv"}
    reading = mc.read_model(loss, params, jnp.ones((3, 8)))
    make = functools.partial(mc.multi_steps, every_k_schedule=2, model=reading)
    state = make(mc.muon(0.1, model=reading)).init(params)
    assert not state.running.size
    with pytest.raises(ValueError, match="(?s)without a gain.*, or use mc.muon$"):
        make(optax.chain(optax.sgd(0.1), mc.qk_clip(attention=()))).init(params)


@pytest.mark.more
def test_no_statistics_in_flaxs_optimizers_without_a_clip():
    tx = mc.multi_steps(mc.muon(0.1), 2)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for _ in range(2):
        state = state.apply_gradients(grads=PARAMS)
    assert int(state.opt_state.gradient_step) == 1
    model = nnx_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.state(model, nnx.Param))
    assert int(optimizer.opt_state.gradient_step[...]) == 1
    assert bool(tx.has_updated(optimizer.opt_state))


def test_a_part_of_a_partition_that_clips():
    """The partition passes on statistics of layers that the other part has."""
    parts = {
        "clipped": mc.multi_steps(optax.chain(optax.sgd(0.0), mc.qk_clip()), 2),
        "rest": mc.multi_steps(optax.sgd(0.0), 2),
    }
    tx = optax.partition(parts, {"a": "clipped", "b": "rest"})
    seen, _ = run(tx, MICRO[:2])
    expected = mc.clip_qk(PARAMS, COMBINED)
    chex.assert_trees_all_close(seen[1]["a"], expected["a"], rtol=1e-6)
    chex.assert_trees_all_equal(seen[1]["b"], PARAMS["b"])


def test_short_params_keep_the_dtypes_of_their_state():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    run_without_statistics(mc.muon(0.1), params)


def test_a_state_of_another_optimizer():
    bare = mc.muonclip(0.1)
    tx = mc.multi_steps(bare, 2)
    for one, other in ((tx, bare), (tx, mc.qk_clip()), (mc.qk_clip(), tx)):
        with pytest.raises(ValueError, match="a checkpoint of the same optimizer"):
            one.update(ZEROS, other.init(PARAMS), PARAMS, attention_stats=COMBINED)


@pytest.mark.parametrize(
    "first, second",
    [(-jnp.inf, -jnp.inf), (jnp.inf, 5.0), (jnp.nan, 5.0), (5.0, jnp.nan)],
)
def test_micro_batches_count_a_head_whose_logit_is_not_finite(first, second):
    """A head that sees no key has -inf, which is not the same as no logit yet."""
    odd, even = (stats([x, 400.0], [90.0, 90.0]) for x in (first, second))
    tx = mc.multi_steps(mc.muonclip(1e-2), 2)
    state = tx.init(PARAMS)
    for given in (odd, even, MICRO[2], MICRO[2]):
        _, state = tx.update(PARAMS, state, PARAMS, attention_stats=given)
        if tx.has_updated(state):
            numbers = mc.scalars(state, PARAMS, heads=True)
            assert numbers["num_nonfinite"] == int(given is even)
            assert ("max_logit/a/head_0" in numbers) == (given is MICRO[2])
