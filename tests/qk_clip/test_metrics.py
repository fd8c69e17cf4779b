"""What a person looks at: per layer and head, over time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import inputs, nnx_model, nnx_stats

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(*shape):
    return {name: {"kernel": jnp.ones(shape)} for name in ("query", "key")}


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


def test_by_layer_and_head_over_time():
    state = run(mc.muonclip(0.0), [firing((2, 1)), firing((0, 0)), CALM, CALM])
    metrics = mc.qk_clip_metrics(state, PARAMS)
    layers = metrics["layers"]
    assert set(layers) == {"deep/layers", "head"}
    np.testing.assert_array_equal(
        layers["deep/layers"]["steps_since_clip"], [[2, -1], [-1, -1], [-1, 3]]
    )
    np.testing.assert_array_equal(layers["head"]["steps_since_clip"], [-1] * 4)
    np.testing.assert_array_equal(layers["head"]["max_logits"], [7.0] * 4)
    np.testing.assert_array_equal(layers["deep/layers"]["gamma"], np.ones((3, 2)))
    assert metrics["ever_clipped_fraction"] == np.float32(2 / 10)
    assert metrics["clipped_fraction"] == 0 == metrics["num_clipped"]
    assert metrics["max_logit"] == 7


def test_of_the_step_that_clips():
    metrics = mc.qk_clip_metrics(run(mc.muonclip(0.0), [firing((1, 0))]), PARAMS)
    layers = metrics["layers"]["deep/layers"]
    np.testing.assert_allclose(layers["gamma"], [[1, 1], [0.25, 1], [1, 1]])
    assert layers["max_logits"][1, 0] == 400 == metrics["max_logit"]
    assert layers["steps_since_clip"][1, 0] == 0 and metrics["num_clipped"] == 1
    assert metrics["clipped_fraction"] == np.float32(0.1)


def test_before_the_first_step():
    metrics = mc.qk_clip_metrics(mc.muonclip(0.0).init(PARAMS), PARAMS)
    assert metrics["max_logit"] == -jnp.inf
    np.testing.assert_array_equal(metrics["layers"]["head"]["gamma"], np.ones(4))
    assert metrics["ever_clipped_fraction"] == 0


def test_watching_alone_reports_logits_and_no_clip():
    state = run(mc.qk_clip(float("inf")), [firing((1, 0))])
    metrics = mc.qk_clip_metrics(state, PARAMS)
    assert metrics["max_logit"] == 400 and metrics["num_clipped"] == 0
    since = metrics["layers"]["deep/layers"]["steps_since_clip"]
    np.testing.assert_array_equal(since, np.full((3, 2), -1))


def test_a_non_finite_head_is_counted_and_not_clipped():
    metrics = mc.qk_clip_metrics(
        run(mc.qk_clip(), [firing((1, 0), jnp.nan), firing((1, 1), jnp.inf)]), PARAMS
    )
    assert metrics["num_nonfinite"] == 1 and metrics["max_logit"] == 7
    assert metrics["ever_clipped_fraction"] == 0


def test_under_jit_and_in_any_wrapping():
    masked = optax.inject_hyperparams(mc.muonclip)(learning_rate=0.0)
    tx = optax.chain(optax.clip(1.0), optax.apply_if_finite(masked, 3))
    state = run(tx, [firing((0, 1))])
    metrics = jax.jit(lambda s: mc.qk_clip_metrics(s, PARAMS))(state)
    assert metrics["layers"]["deep/layers"]["gamma"][0, 1] == 0.25


def test_of_layers_that_the_mask_shows():
    mask = {"deep": False, "head": True}
    tx = optax.masked(mc.qk_clip(), mask)
    stats = {"head": {"max_logits": jnp.asarray([400.0, 1.0, 1.0, 1.0])}}
    state = run(tx, [stats])
    visible = {"head": PARAMS["head"]}
    metrics = mc.qk_clip_metrics(state, visible)
    np.testing.assert_allclose(metrics["layers"]["head"]["gamma"], [0.25, 1, 1, 1])


def test_in_an_nnx_optimizer_under_nnx_jit():
    model = nnx_model()
    optimizer = nnx.Optimizer(model, mc.muonclip(0.0, threshold=1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        stats = nnx_stats(model, inputs())
        grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads, attention_stats=stats)
        return mc.qk_clip_metrics(optimizer.opt_state, nnx.state(model, nnx.Param))

    metrics = step(model, optimizer)
    assert set(metrics["layers"]) == {"layers/0", "layers/1"}
    assert metrics["layers"]["layers/0"]["gamma"].shape == (4,)
    assert metrics["num_clipped"] == 8


@pytest.mark.parametrize("count", [0, 2])
def test_without_a_single_qk_clip_it_says_so(count):
    tx = optax.chain(optax.sgd(0.1), *[mc.qk_clip()] * count)
    with pytest.raises(ValueError, match=f"{count} qk_clip states"):
        mc.qk_clip_metrics(tx.init(PARAMS), PARAMS)


def test_of_other_params_it_says_so():
    with pytest.raises(ValueError, match="holds 10 heads, the params 4"):
        mc.qk_clip_metrics(mc.qk_clip().init(PARAMS), {"head": PARAMS["head"]})


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
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS, attention_stats=CALM)
    layers = mc.qk_clip_metrics(state, PARAMS)["layers"]
    np.testing.assert_allclose(
        layers["deep/layers"]["gamma"], [[0.4] * 2, [1] * 2, [0.8] * 2], rtol=1e-6
    )
    np.testing.assert_allclose(layers["head"]["gamma"], [0.5] * 4)
    after = mc.clip_qk(PARAMS, CALM, 3.5, attention=each)
    np.testing.assert_allclose(
        after["deep"]["layers"]["query"]["kernel"][:, 0, 0, 0],
        np.sqrt([0.4, 1, 0.8]),
        rtol=1e-6,
    )


def test_a_schedule_for_one_layer():
    each = thresholds(head=lambda step: jnp.where(step < 1, 100.0, 3.5))
    state = run(mc.qk_clip(attention=each), [CALM])
    assert mc.qk_clip_metrics(state, PARAMS)["num_clipped"] == 0
    state = run(mc.qk_clip(attention=each), [CALM, CALM])
    assert mc.qk_clip_metrics(state, PARAMS)["num_clipped"] == 4
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
    metrics = mc.qk_clip_metrics(state, PARAMS)
    np.testing.assert_array_equal(
        metrics["layers"]["deep/layers"]["steps_since_clip"],
        np.where(last < 0, -1, 29 - last),
    )
    assert metrics["ever_clipped_fraction"] == np.float32((last >= 0).sum() / 10)
