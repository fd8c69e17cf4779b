"""The models of the evidence, a step of their training, and how they are clipped."""

import math

import jax
import jax.numpy as jnp
import kimi_k2_model
import numpy as np
import optax
import pytest
from evidence.experts import balance
from evidence.model import largest_logits, Transformer
from evidence.optimizers import (
    clip,
    Hyperparameters,
    is_numbers,
    make_optimizer,
    MATRICES,
)
from evidence.run import Run
from evidence.training import BALANCE_RATE, Carry, mean_loss, program
from flax import nnx
from helpers import more, randomize
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
SMALL = Run(layers=2, width=32, heads=4, batch=2, context=16, steps=10)
EXPERTS = Run(model="kimi_k2", layers=2, width=16, heads=2, batch=8, context=16)
STILL = Hyperparameters(0.0, 0.0, 0.0, 1.0)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 17))


def drawn(make, scale=0.3):
    """Graph, params and the rest of a model that is drawn without a compilation."""
    graph, params, others = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
    return graph, randomize(params, scale=scale), zeros


def drawn_by(run):
    return drawn(lambda: Transformer(run, nnx.Rngs(0)))


@pytest.mark.more
def test_the_clip_brings_every_head_to_the_threshold():
    run = SMALL.but(threshold=1.0)
    graph, params, others = drawn_by(run)

    @jax.jit
    def measure(params):
        model = nnx.merge(graph, params, others)
        return nnx.capture(model, nnx.Intermediate)(TOKENS)[1]

    # The second layer reads another stream once the first is clipped.
    stats = measure(params)
    before = np.asarray(largest_logits(stats))[0]
    tau = float(np.median(before))
    after = measure(clip(run, params, stats, STILL._replace(threshold=tau)))
    expected = np.minimum(before, tau)
    np.testing.assert_allclose(largest_logits(after)[0], expected, rtol=1e-4)


@pytest.fixture(scope="module")
def differentiated(fast_compilation):
    """A drawn model with its loss, statistics and gradient."""
    graph, params, others = drawn_by(SMALL)

    def loss_fn(params):
        model = nnx.merge(graph, params, others)
        return nnx.capture(mean_loss, nnx.Intermediate)(model, TOKENS)

    outputs, grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    return params, others, *outputs, grads


@pytest.mark.more
@pytest.mark.parametrize("optimizer", [more("adamw"), "muon"])
@pytest.mark.parametrize("threshold", [more(math.inf), 0.01])
def test_training_step_is_that_of_the_public_optimizer(
    optimizer, threshold, differentiated
):
    """The program's step against the package's transformation, put together by hand."""
    params, others, loss, stats, grads = differentiated
    if optimizer == "adamw":
        tx = optax.adamw(0.1, b2=0.95, weight_decay=0.3)
    else:
        options = dict(beta=0.95, per_head=False)
        tx = mc.muon(0.1, adam_learning_rate=0.02, weight_decay=0.3, **options)
    tx = optax.chain(tx, mc.qk_clip(threshold))
    update = jax.jit(tx.update)
    updates, _ = update(grads, tx.init(params), params, attention_stats=stats)
    expected = optax.apply_updates(params, updates)

    run = SMALL.but(optimizer=optimizer, threshold=threshold)
    at = Hyperparameters(*np.float32([0.1, 0.02, 0.3, threshold]))
    carry = Carry(params, make_optimizer(run, at).init(params), others)
    carry = jax.tree.map(jnp.copy, carry)  # since the step takes it
    after, seen, largest = program(run.program).step(carry, TOKENS, at)
    assert float(seen) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(largest, largest_logits(stats), rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.more
def test_model_with_experts_is_trained_balanced_and_evaluated():
    run = EXPERTS.but(matrices="one_expert_matrix")
    compiled, tokens = program(run.program), np.resize(TOKENS, (8, 17))
    _, params, others = drawn_by(run)
    carry = Carry(params, make_optimizer(run, STILL).init(params), others)
    assert jax.eval_shape(compiled.init, jax.random.key(0)) == jax.eval_shape(
        lambda: carry
    )
    before = compiled.evaluate(carry, tokens[None])
    at = Hyperparameters(0.02, 0.01, 0.1, 1.0)
    after, loss, _ = compiled.step(jax.tree.map(jnp.copy, carry), tokens, at)
    assert float(loss) == pytest.approx(float(before), rel=1e-5)
    assert compiled.evaluate(after, tokens[None]) < before
    bias, load = jax.tree.leaves(after.others)
    assert load.sum() == 2 * tokens[:, 1:].size
    assert bias.any() and set(np.abs(bias)) <= {0, np.float32(BALANCE_RATE)}


@pytest.mark.more
def test_the_miniature_of_kimi_k2_computes_what_that_of_the_example_does():
    graph, params, others = drawn_by(EXPERTS)
    sizes = kimi_k2_model.Sizes(256, EXPERTS.layers, EXPERTS.width, EXPERTS.heads)
    theirs, of_theirs, _ = drawn(lambda: kimi_k2_model.KimiK2(sizes, nnx.Rngs(0)))
    assert jax.tree.structure(params) == jax.tree.structure(of_theirs)

    ours, peer = (nnx.merge(g, params, others) for g in (graph, theirs))
    out, seen = nnx.jit(lambda m: nnx.capture(m, nnx.Intermediate)(TOKENS))(ours)
    # The example's model keeps no statistics: these are recorded around it.
    record = mc.record_attention(lambda model: model(TOKENS))
    expected, recorded = nnx.jit(record)(peer)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    recorded_by_model = jax.tree.leaves_with_path(jax.tree.map(np.asarray, seen))
    largest = {
        x.tobytes(): x
        for path, x in recorded_by_model
        if "max_logits" in jax.tree_util.keystr(path)
    }
    assert len(largest) == len(jax.tree.leaves(recorded)) == EXPERTS.layers
    for x, y in zip(largest.values(), jax.tree.leaves(recorded), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)
    balance(ours, 0.5)
    for router in peer.routers():
        router.balance(0.5)
    moved, expected = (
        jax.tree.leaves(nnx.split(m, nnx.Param, ...)[2]) for m in (ours, peer)
    )
    assert expected[0].any()
    for x, y in zip(moved, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_only_the_experts_matrices_are_chosen_anew():
    _, params, _ = drawn_by(EXPERTS)

    def numbers(choose):
        leaves = jax.tree_util.tree_leaves_with_path(choose(params), is_leaf=is_numbers)
        return {jax.tree_util.keystr(path): dims for path, dims in leaves}

    default = numbers(mc.flax_dimension_numbers)
    experts = {path for path in default if "experts" in path and default[path]}
    assert experts and all(default[path].output_axis in (-1, 2) for path in experts)
    for name, expected in [
        ("adam_experts", None),
        ("one_expert_matrix", MuonDimensionNumbers((-2,), (-3, -1))),
    ]:
        chosen = numbers(MATRICES[name])
        assert {path for path in default if chosen[path] != default[path]} == experts
        assert {chosen[path] for path in experts} == {expected}
