"""What a person looks at: numbers of each layer and head, over time."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import of_heads, ones

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(*shape):
    return {name: {"kernel": ones(*shape)} for name in ("query", "key")}


PARAMS = {"deep": {"layers": layer(3, 8, 2, 4)}, "head": layer(8, 4, 2)}
CALM = {
    "deep": {"layers": {"max_logits": jnp.full((3, 2), 5.0)}},
    "head": {"max_logits": jnp.full(4, 7.0)},
}


def firing(index, value=400.0):
    stats = {"deep": dict(CALM["deep"]), "head": CALM["head"]}
    fired = CALM["deep"]["layers"]["max_logits"].at[index].set(value)
    stats["deep"]["layers"] = {"max_logits": fired}
    return stats


def run(tx, steps, params=PARAMS):
    step, state = jax.jit(tx.update), tx.init(params)
    grads = jax.tree.map(jnp.zeros_like, params)
    for stats in steps:
        _, state = step(grads, state, params, attention_stats=stats)
    return state


def numbers_of(state, params=PARAMS, **options):
    return mc.scalars(state, params, heads=True, **options)


def test_by_layer_and_head_over_time():
    state = run(mc.muonclip(0.0), [firing((2, 1)), firing((0, 0)), CALM, CALM])
    found = numbers_of(state)
    np.testing.assert_array_equal(
        of_heads(found, "steps_since_clip", "deep/layers"), [[2, -1], [-1, -1], [-1, 3]]
    )
    of_head = [of_heads(found, x, "head") for x in ("steps_since_clip", "max_logit")]
    np.testing.assert_array_equal(of_head, [[-1] * 4, [7.0] * 4])
    gamma = of_heads(found, "gamma", "deep/layers")
    np.testing.assert_array_equal(gamma, np.ones((3, 2)))
    assert found["ever_clipped_fraction"] == np.float32(2 / 10)
    assert found["clipped_fraction"] == 0 == found["num_clipped"]
    assert found["max_logit"] == 7 == found["max_logit/head"]
    assert found["max_logit/deep/layers"] == 5
    # They are all that is added: of 10 heads three numbers.
    plain = mc.scalars(state, PARAMS)
    assert plain.items() <= found.items() and len(found) == len(plain) + 30


def test_of_the_step_that_clips():
    found = numbers_of(run(mc.muonclip(0.0), [firing((1, 0))]))
    gamma = of_heads(found, "gamma", "deep/layers")
    np.testing.assert_allclose(gamma, [[1, 1], [0.25, 1], [1, 1]])
    assert found["max_logit/deep/layers/1/head_0"] == 400 == found["max_logit"]
    assert found["steps_since_clip/deep/layers/1/head_0"] == 0
    assert found["num_clipped"] == 1 and found["clipped_fraction"] == np.float32(0.1)


def test_before_the_first_step_no_logit_is_known():
    state = mc.muonclip(0.0).init(PARAMS)
    found = numbers_of(state)
    json.dumps(found, allow_nan=False)
    assert not [name for name in found if name.startswith("max_logit")]
    np.testing.assert_array_equal(of_heads(found, "gamma", "head"), np.ones(4))
    assert found["ever_clipped_fraction"] == 0
    # A trace has no values to go by.
    traced = jax.jit(numbers_of)(state)
    assert traced["max_logit"] == -jnp.inf == traced["max_logit/head/head_3"]
    assert found.keys() < traced.keys()


def test_watching_alone_reports_logits_and_no_clip():
    state = run(mc.qk_clip(float("inf")), [firing((1, 0))])
    found = numbers_of(state)
    assert found["max_logit"] == 400 and found["num_clipped"] == 0
    since = of_heads(found, "steps_since_clip", "deep/layers")
    np.testing.assert_array_equal(since, np.full((3, 2), -1))


def test_under_jit_and_in_any_wrapping():
    injected = optax.inject_hyperparams(mc.muonclip)(learning_rate=0.0)
    tx = optax.chain(optax.clip(1.0), optax.apply_if_finite(injected, 3))
    state = run(tx, [firing((0, 1))])
    traced, found = jax.jit(numbers_of)(state), numbers_of(state)
    assert traced["gamma/deep/layers/0/head_1"] == 0.25
    assert traced.keys() == found.keys()
    for name, number in found.items():
        np.testing.assert_allclose(traced[name], number, rtol=1e-6, err_msg=name)


def test_without_a_clip_there_are_no_heads():
    found = numbers_of(optax.sgd(0.1).init(PARAMS))
    assert all(name.startswith("param_norm/") for name in found)


def thresholds(**of):
    """Layers of stock Flax with thresholds of their own."""

    def find(params):
        layers = mc.flax_attention_layers(params)
        return [x._replace(threshold=of.get(x.path.split("/")[0])) for x in layers]

    return find


@pytest.mark.parametrize("jit", [False, True])
def test_a_threshold_per_layer(jit):
    each = thresholds(deep=jnp.asarray([2.0, 50.0, 4.0]))
    tx = mc.qk_clip(3.5, attention=each)
    update = jax.jit(tx.update) if jit else tx.update
    deep = jnp.asarray([[5.0, 8.0], [5.0, 40.0], [16.0, 3.0]])
    stats = {"deep": {"layers": {"max_logits": deep}}}
    stats["head"] = {"max_logits": jnp.asarray([7.0, 14.0, 3.0, 35.0])}
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS, attention_stats=stats)
    found, expected = numbers_of(state), [[0.4, 0.25], [1, 1], [0.25, 1]]
    gamma = of_heads(found, "gamma", "deep/layers")
    np.testing.assert_allclose(gamma, expected, rtol=1e-6)
    of_head = of_heads(found, "gamma", "head")
    np.testing.assert_allclose(of_head, [0.5, 0.25, 1, 0.1], rtol=1e-6)
    after = mc.clip_qk(PARAMS, stats, 3.5, attention=each)
    scales = after["deep"]["layers"]["query"]["kernel"][:, 0, :, 0]
    np.testing.assert_allclose(scales, np.sqrt(expected), rtol=1e-6)


def test_a_schedule_for_one_layer():
    each = thresholds(head=lambda step: jnp.where(step < 1, 100.0, 3.5))
    state = run(mc.qk_clip(attention=each), [CALM])
    assert numbers_of(state)["num_clipped"] == 0
    state = run(mc.qk_clip(attention=each), [CALM, CALM])
    assert numbers_of(state)["num_clipped"] == 4
    with pytest.raises(ValueError, match="clip_qk does not count steps"):
        mc.clip_qk(PARAMS, CALM, attention=each)


def test_a_threshold_of_a_layer_that_is_not_positive():
    with pytest.raises(ValueError, match="threshold of layer 'head' must be positive"):
        mc.qk_clip(attention=thresholds(head=0.0)).init(PARAMS)


def test_the_state_survives_a_random_walk_of_statistics():
    """Fractions and steps agree with counts that the test keeps."""
    generator = np.random.default_rng(0)
    last, tx = np.full((3, 2), -1), mc.qk_clip(100.0)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for step in range(30):
        logits = generator.uniform(0, 110, (3, 2)).astype(np.float32)
        stats = {"deep": {"layers": {"max_logits": logits}}, "head": CALM["head"]}
        _, state = update(PARAMS, state, PARAMS, attention_stats=stats)
        last = np.where(logits > 100, step, last)
    found = numbers_of(state)
    np.testing.assert_array_equal(
        of_heads(found, "steps_since_clip", "deep/layers"),
        np.where(last < 0, -1, 29 - last),
    )
    assert found["ever_clipped_fraction"] == np.float32((last >= 0).sum() / 10)
