"""QK-Clip: the next forward gives min(S, tau), and nothing else moves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    clip_at_rest,
    inputs,
    largest,
    leaf_pairs,
    linen_stats,
    linen_variables,
    LinenModel,
    nnx_model,
    nnx_stats,
    normal,
    one_at_a_time,
    query_and_key,
    randomize,
    ScannedModel,
)
from internals import paths

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def without_biases(params, clipped):
    """What a clip that forgets the biases leaves: a witness for the tests."""
    tree = paths.flatten(params)
    leaves = zip(tree.paths, tree.leaves, tree.of(clipped), strict=True)
    kept = [old if path[-1] == "bias" else new for path, old, new in leaves]
    return tree.unflatten(kept)


zero_step = clip_at_rest()


def linen_case(model):
    x = inputs()
    params = linen_variables(model, x)["params"]
    return params, jax.jit(lambda p: linen_stats(model, p, x))


def nnx_case(**options):
    graph, state = nnx.split(nnx_model(**options))
    return state, jax.jit(lambda s: nnx_stats(nnx.merge(graph, s), inputs()))


CASES = {
    "linen": lambda: linen_case(LinenModel()),
    "scan and remat": lambda: linen_case(ScannedModel()),
    "nnx": nnx_case,
    "nnx grouped-query": lambda: nnx_case(kv_heads=2),
    "nnx multi-query": lambda: nnx_case(kv_heads=1),
}


@functools.cache
def case_of(name):
    return CASES[name]()


@pytest.mark.parametrize("alpha, case", one_at_a_time([0.0, 0.3, 0.5, 1.0], CASES))
def test_next_forward_gives_min_of_logit_and_threshold(case, alpha):
    """By the transformation and by the function, as long as no bias is forgotten."""
    params, measure = case_of(case)
    stats = measure(params)
    before = largest(stats)
    tau = float(np.median(before))  # so that half the heads are over
    expected = np.minimum(before, tau)
    clipped, state = zero_step(params, stats, tau, alpha)
    np.testing.assert_allclose(largest(measure(clipped)), expected, rtol=1e-4)
    assert optax.tree.get(state, "num_clipped") == (before > tau).sum()
    logit = optax.tree.get(state, "max_logit")
    np.testing.assert_allclose(logit, before.max(), rtol=1e-6)
    by_function = mc.clip_qk(params, stats, tau, alpha=alpha)
    for x, y in leaf_pairs(clipped, by_function):
        np.testing.assert_allclose(x, y, rtol=3e-7, atol=0)
    # By the new logits nothing is left to clip.
    again = mc.clip_qk(by_function, measure(by_function), tau, alpha=alpha)
    for x, y in leaf_pairs(again, by_function):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    forgotten = largest(measure(without_biases(params, by_function)))
    assert np.abs(forgotten / expected - 1).max() > 1e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_at_or_under_the_threshold_stay_bit_identical(dtype):
    params, measure = case_of("linen")
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    stats = jax.tree.map(
        lambda s: jnp.asarray([50.0, 100.0, 150.0, -3.0]), measure(params)
    )
    updates = jax.tree.map(lambda p: (1e-3 * randomize(p, 5)).at[0].set(-0.0), params)
    tx = mc.qk_clip(100.0)
    clipped, _ = tx.update(updates, tx.init(params), params, attention_stats=stats)
    changed = mc.clip_qk(params, stats, 100.0)
    for name in ("query", "key"):
        for leaf in ("kernel", "bias"):
            for before, after in ((updates, clipped), (params, changed)):
                old, new = (
                    t["layer_0"]["attention"][name][leaf] for t in (before, after)
                )
                # Bits, not values: -0.0 and 0.0 differ.
                old = old.astype(new.dtype)
                same = np.asarray(old).view(np.uint8) == np.asarray(new).view(np.uint8)
                same = same.reshape(*old.shape[:-1], -1).all(axis=-1).reshape(-1, 4)
                assert same[:, [0, 1, 3]].all() and not same[:, 2].all()
    for name in ("value", "out"):
        chex.assert_trees_all_equal(
            clipped["layer_1"]["attention"][name], updates["layer_1"]["attention"][name]
        )


@pytest.mark.parametrize("update_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_params_are_rounded_once(update_dtype):
    """`p + u'` is the float64 value of `scale * (p + u)`, rounded to bfloat16."""
    kernel = normal(0, 64, 4, 32, dtype=jnp.bfloat16, scale=0.05)
    update = normal(1, 64, 4, 32, dtype=update_dtype, scale=1e-3)
    params = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
    updates = {"query": {"kernel": update}, "key": {"kernel": update}}
    stats = {"max_logits": jnp.asarray([101.0, 150.0, 399.0, 1e5])}
    tx = mc.qk_clip(100.0)
    clipped, _ = tx.update(updates, tx.init(params), params, attention_stats=stats)
    actual = optax.apply_updates(params, clipped)["query"]["kernel"]
    scale = np.sqrt(100 / np.asarray([101.0, 150.0, 399.0, 1e5]))[None, :, None]
    exact = scale * (np.asarray(kernel, np.float64) + np.asarray(update, np.float64))
    expected = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    # Products that fall on a tie of bfloat16 may round either way.
    assert (np.asarray(actual) != np.asarray(expected)).mean() < 1e-3


def test_empty_statistics_suit_a_model_without_attention():
    params = {"w": jnp.ones((2, 2))}
    after, state = zero_step(params, {}, 100.0)
    chex.assert_trees_all_equal(after, params)
    assert optax.tree.get(state, "num_clipped") == 0
    assert "max_logit" not in mc.scalars(state, params)


def test_schedule_of_the_threshold_must_begin_above_zero():
    params = {"attn": query_and_key(8, 2, 4)}
    for tx in (
        mc.qk_clip(optax.linear_schedule(0.0, 100.0, 1000)),
        mc.muonclip(1e-3, threshold=lambda step: -1.0 + step),
    ):
        with pytest.raises(ValueError, match="its schedule begins at"):
            tx.init(params)


def test_a_threshold_that_falls_below_zero_clips_nothing():
    params = {"attn": query_and_key(8, 2, 4)}
    stats = {"attn": {"max_logits": jnp.array([5.0, 6.0])}}
    tx = mc.qk_clip(lambda step: 100.0 - 101.0 * step)
    state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        updates, state = tx.update(zeros, state, params, attention_stats=stats)
        assert not any(jnp.any(u != 0) for u in jax.tree.leaves(updates))
    clip = jax.jit(lambda threshold: mc.clip_qk(params, stats, threshold))
    for threshold in (0.0, -3.0):
        after = clip(threshold)["attn"]["query"]["kernel"]
        np.testing.assert_array_equal(after, params["attn"]["query"]["kernel"])


@pytest.mark.parametrize("key_heads", [2, 1])
def test_a_steep_clip_in_a_chain(key_heads):
    """As exact as a sum of float32 can be, and never dead: later steps go on."""
    params = {
        "query": {"kernel": normal(0, 8, 2, 4)},
        "key": {"kernel": normal(1, 8, key_heads, 4)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = mc.qk_clip(1.0)
    state = tx.init(params)
    for ratio in 10.0 ** np.arange(2, 30, 3):
        after, largest, steps = params, ratio, 0
        while largest > 1.01 and steps < 9:
            stats = {"max_logits": jnp.full(2, largest, jnp.float32)}
            updates, state = tx.update(zeros, state, after, attention_stats=stats)
            after, largest = optax.apply_updates(after, updates), ratio
            steps += 1
            for name in params:
                scales = np.float64(after[name]["kernel"]) / params[name]["kernel"]
                scale = np.median(scales)
                # A sum rounds to 2**-24 of the weight before, and so to 2**-10 of one
                # that is scaled by 2**-14.
                bound = 2.0**-23 / scale if steps == 1 else steps * 2.0**-10
                np.testing.assert_allclose(scales, scale, rtol=bound)
                largest *= scale
        np.testing.assert_allclose(largest, 1.0, rtol=steps * 2.0**-9)
        # In one step where each side is scaled by no less than 2**-14.
        assert (steps == 1) == (ratio <= 2.0 ** (28 if key_heads == 2 else 14))


@pytest.mark.parametrize("value", [-0.5, 1.5, float("nan")])
def test_alpha_schedules_out_of_range(value):
    params = query_and_key(8, 2, 4)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with pytest.raises(ValueError, match="alpha must be in .*begins at"):
        mc.qk_clip(alpha=lambda step: value).init(params)
    tx = mc.qk_clip(alpha=lambda step: jnp.where(step < 1, 0.5, value))
    stats = {"max_logits": jnp.full(2, 400.0)}
    # In the second step it is known no more, and is clipped.
    _, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    updates, _ = jax.jit(tx.update)(zeros, state, params, attention_stats=stats)
    after = optax.apply_updates(params, updates)
    expected = mc.clip_qk(params, stats, alpha=1.0 if value > 1 else 0.0)
    chex.assert_trees_all_close(after, expected, rtol=1e-6)


def test_a_head_at_the_threshold_is_not_counted():
    """MindFormers: [[99, 100], [101, 150]] with tau 100 counts two."""
    params = query_and_key(2, 4, 2, 2)
    stats = {"max_logits": jnp.asarray([[99.0, 100.0], [101.0, 150.0]])}
    _, state = zero_step(params, stats, 100.0)
    assert optax.tree.get(state, "num_clipped") == 2


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_non_finite_statistic_leaves_its_head_alone_and_is_counted(value):
    kernel = randomize(jnp.ones((4, 3, 2)))
    params = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
    stats = {"max_logits": jnp.asarray([value, 400.0, 50.0])}
    after, state = zero_step(params, stats, 100.0)
    assert jnp.isfinite(after["query"]["kernel"]).all()
    chex.assert_trees_all_equal(after["query"]["kernel"][:, [0, 2]], kernel[:, [0, 2]])
    assert optax.tree.get(state, "num_nonfinite") == 1
    assert optax.tree.get(state, "num_clipped") == 1
    assert optax.tree.get(state, "max_logit") == 400


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"intermediates": {"attn": {"max_logits": s}}},
        lambda s: {"intermediates": {"params": {"attn": {"max_logits": s}}}},
        lambda s: {"attn": {"max_logits": (s,)}},
        lambda s: {"attn": {"max_logits": s, "attention_weights": (jnp.ones((2, 2)),)}},
        lambda s: {"attn": {"max_logits": (s, s - 1)}},
        lambda s: {"attn": {"max_logits": np.asarray(s)}},
        lambda s: nnx.State({"attn": {"max_logits": nnx.Intermediate(s)}}),
        lambda s: nnx.State({"attn": {"max_logits": nnx.Intermediate((s,))}}),
    ],
)
@pytest.mark.parametrize("outer", [False, True])
def test_statistics_in_every_wrapping(wrap, outer):
    ones = jnp.ones((3, 2, 2))
    params = {"attn": {"query": {"kernel": ones}, "key": {"kernel": ones}}}
    given = {"params": params} if outer else params
    after = mc.clip_qk(given, wrap(jnp.asarray([50.0, 400.0])))
    after = after["params"] if outer else after
    np.testing.assert_allclose(after["attn"]["query"]["kernel"][0, :, 0], [1, 0.5])
