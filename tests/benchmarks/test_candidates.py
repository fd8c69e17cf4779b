"""Candidates of the field, adapters and iterations, against their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from evidence.adapters import adapted, draw_adapters, only_b
from evidence.candidates import GAINS
from evidence.experiments import cheaper_iterations, tokens_per_parameter
from evidence.iterations import (
    as_long,
    BLOCKS,
    even,
    exact,
    high_pass,
    in_blocks,
    iteration_flop,
    now_and_then,
    step_flop,
)
from evidence.lab import losses
from evidence.optimizers import hyperparameters, make_optimizer
from evidence.run import Run
from evidence.tokens import Outcome
from evidence.training import train
from evidence.tuning import Pair
from helpers import assert_close, few, matrix_of, of_newton_schulz, tolerance
from trees import is_shape
from walk import walk

import muonclip_jax as mc


SHAPES = {
    "embed": {"embedding": (64, 8)},
    "query": {"kernel": (8, 2, 4)},  # a matrix for each of two heads
    "out": {"kernel": (2, 4, 8)},  # one matrix, whose rows are two axes
    "up": {"kernel": (8, 32)},
    "norm": {"scale": (8,)},
    "head": {"kernel": (8, 64)},
}
MATRICES, WORDS = ("query", "out", "up"), ("embed", "head")
RATE, ADAM_RATE, DECAY, BETA = 0.1, 0.02, 0.3, 0.9
RUN = Run(
    matrices="per_head",
    learning_rate=RATE,
    adam_learning_rate=ADAM_RATE,
    weight_decay=DECAY,
    beta=BETA,
    schedule="constant",
    warm_up=0.0,
)
# Sums of at most 256 products, eleven one after the other, each a norm's square, and
# differences of results that are at most four times as large.
CLOSE = tolerance(np.float32, size=256, slopes=(1.0,) * 11, condition=4.0)


def gradients(seed):
    """In which a word was not seen and another hardly."""
    tree = jax.tree.map(np.array, drawn(seed))
    for words in (tree["embed"]["embedding"], tree["head"]["kernel"].T):
        words[5], words[6] = 0, 1e-4 * words[6]
    return tree


def steps_of(candidate, count):
    """The params before each of some steps, and their updates."""
    run = RUN.but(candidate=candidate)
    tx, params = make_optimizer(run, hyperparameters(run)[0]), drawn(0)
    state, update, steps = tx.init(params), jax.jit(tx.update), []
    for i in range(count):
        updates, state = update(gradients(i + 1), state, params)
        steps.append((params, updates))
        params = optax.apply_updates(params, updates)
    return steps


@pytest.fixture(scope="module")
def muon():
    """The first step of Muon itself, from where the candidates begin."""
    return steps_of("", 1)[0][1]


def without(tree, names):
    return {name: leaf for name, leaf in tree.items() if name not in names}


def matrices(name, *trees):
    """The matrices of a leaf of every tree in float64, `(fan_in, fan_out)`."""
    leaves = [np.asarray(tree[name]["kernel"], np.float64) for tree in trees]
    if name == "query":
        return zip(*(x.swapaxes(0, 1) for x in leaves), strict=True)
    return [tuple(x.reshape(-1, x.shape[-1]) for x in leaves)]


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.more
@pytest.mark.parametrize("name", few(GAINS, "SAMuon-lite 1.5"))
def test_samuon_lite_holds_back_the_first_direction_alone(name, muon):
    gain = float(name.split()[-1])
    params, ours = steps_of(name, 1)[0]
    for leaf in MATRICES:
        for found, update, weights, momentum in matrices(
            leaf, ours, muon, params, gradients(1)
        ):
            u = unit(momentum @ momentum[np.argmax((momentum**2).sum(axis=1))])
            v = unit(u @ momentum)
            decay = -RATE * DECAY * weights
            step = update - decay
            expected = gain * step - (gain - 1) * (u @ step @ v) * np.outer(u, v)
            assert_close(found, expected + decay, CLOSE)
    assert_close(without(ours, MATRICES), without(muon, MATRICES), CLOSE)


def sinkhorn_step(grads):
    """DeepSeek V4.1's update of a matrix whose rows are words."""
    momentum = sum(BETA**i * g for i, g in enumerate(reversed(grads)))
    x = grads[-1] + BETA * momentum
    lengths = np.sqrt((x**2).sum(axis=1))
    active = lengths > 1e-3 * lengths.mean()
    assert active.sum() == len(x) - 2
    x = x[active]
    for i in range(11):
        x = x / np.sqrt((x**2).sum(axis=1 - i % 2, keepdims=True))
    update = np.zeros_like(momentum)
    update[active] = 0.18 * x.shape[1] ** 0.5 * x
    return update


@pytest.mark.more
def test_sinkhorn_is_the_step_of_embedding_and_head(muon):
    steps = steps_of("sinkhorn", 2)
    for i, (params, ours) in enumerate(steps):
        trees = [params, ours, *map(gradients, range(1, i + 2))]
        embeddings = [tree["embed"]["embedding"] for tree in trees]
        heads = [tree["head"]["kernel"].T for tree in trees]
        for weights, update, *grads in (embeddings, heads):
            doubles = [np.asarray(g, np.float64) for g in grads]
            expected = sinkhorn_step(doubles) + DECAY * np.asarray(weights)
            assert_close(update, -ADAM_RATE * expected, CLOSE)
    assert_close(without(steps[0][1], WORDS), without(muon, WORDS), CLOSE)


def test_hyperball_turns_matrices_and_keeps_their_norm(muon):
    steps = steps_of("hyperball", 3)
    params, ours = steps[0]
    for leaf in MATRICES:
        for found, update, weights in matrices(leaf, ours, muon, params):
            radius = np.linalg.norm(weights)
            direction = unit(update + RATE * DECAY * weights)  # points downhill
            expected = radius * unit(weights + RATE * radius * direction) - weights
            assert_close(found, expected, CLOSE)
        after = optax.apply_updates(*steps[-1])
        for weights, turned in matrices(leaf, params, after):
            share = np.linalg.norm(turned) / np.linalg.norm(weights)
            assert share == pytest.approx(1, abs=len(steps) * CLOSE)
    assert_close(without(ours, MATRICES), without(muon, MATRICES), CLOSE)


SMALL = Run(corpus="prose", layers=1, width=16, heads=2, batch=4, context=16, steps=20)


def drawn(seed=0, shapes=SHAPES):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.float32(generator.standard_normal(shape)),
        shapes,
        is_leaf=is_shape,
    )


def test_adapters_are_products_of_two_factors_of_each_matrix():
    params = drawn()
    adapters = draw_adapters(jax.random.key(0), params, rank=2)
    assert_close(adapted(params, adapters), params, 0.0)  # since `b` begins at zero
    # Three matrices of eight inputs or outputs: those that Muon would take.
    sizes = sorted((x["a"].shape[0], x["b"].shape[1]) for x in adapters.values())
    assert sizes == [(8, 8), (8, 8), (8, 32)]
    moved = {
        place: factors | {"b": factors["b"] + 1.0 + int(place)}
        for place, factors in adapters.items()
    }
    found = jax.tree.map(np.subtract, adapted(params, moved), params)
    for name in ("embed", "norm", "head"):
        assert not np.any(jax.tree.leaves(found[name])[0])
    for name, inputs in dict(query=8, out=8, up=8).items():
        product = found[name]["kernel"].reshape(inputs, -1)
        assert np.linalg.matrix_rank(product, tol=1e-4) == 1  # all of `b` is alike
        sums = [np.asarray(f["a"], np.float64).sum(axis=1) for f in adapters.values()]
        # Each column is what the factors `a` add up to, times its `b`.
        matches = [
            s * (1 + int(place)) for place, s in zip(adapters, sums, strict=True)
        ]
        assert any(np.allclose(product[:, 0], one, atol=1e-4) for one in matches)


def test_muon_on_b_alone_leaves_a_to_adamw():
    adapters = draw_adapters(jax.random.key(0), drawn(), rank=2)
    tx = mc.muon(0.1, weight_decay=0.0, per_head=False, dimension_numbers=only_b)
    grads = jax.tree.map(lambda x: x + 1.0, adapters)
    updates, _ = jax.jit(tx.update)(grads, tx.init(adapters), adapters)
    for factors in updates.values():
        # AdamW's first step is the rate, with the gradient's sign.
        np.testing.assert_allclose(np.abs(factors["a"]), 0.1, rtol=1e-4)
        assert np.linalg.matrix_rank(factors["b"], tol=1e-4) == 1


@pytest.mark.more
@pytest.mark.usefixtures("fast_compilation")
def test_a_run_goes_on_where_the_run_before_ended():
    before = SMALL.but(seed=1)
    start = tuple(SMALL.settings.items())
    after = SMALL.but(seed=1, corpus="drama", start=start, learning_rate=1e-6)
    after = after.but(adam_learning_rate=1e-6, weight_decay=0.0)
    assert after.before == before and SMALL.before is None
    assert after.program == before.program
    ends = losses([train(before)])
    result = train(after)
    assert result["forgotten"][0] == pytest.approx(ends[0], rel=1e-4)
    assert result["forgotten"][1] == pytest.approx(ends[0], abs=1e-3)  # as it stood
    lora = train(after.but(rank=2, optimizer="adamw", learning_rate=0.03))
    assert lora["forgotten"][0] == pytest.approx(ends[0], rel=1e-4)
    assert losses([lora])[0] < losses([result])[0] - 0.01


SPREAD = matrix_of([1.0, 0.5, 0.1, 1e-3], 4, 12)


@pytest.mark.parametrize("turned", [False, True])
def test_orthogonalizers_against_their_definitions_in_float64(turned):
    matrix = SPREAD.T if turned else SPREAD
    x = jnp.float32(matrix)
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    # The least direction is a thousandth, and as many times as far off.
    assert_close(exact(x), u @ vt, tolerance(jnp.float32, size=12, condition=1e3))
    assert_close(as_long(x), 2 * matrix / np.linalg.norm(matrix), 1e-5)
    s = s / np.linalg.norm(matrix)
    for _ in range(8):
        s = 1.5 * s - 0.5 * s**3
    for _ in range(2):
        s = 2.5 * s**3 - 1.5 * s**5
    slopes = (1.5,) * 8 + (1.0,) * 2
    close = tolerance(jnp.float32, size=12, slopes=slopes)
    assert_close(high_pass(x), (u * s) @ vt, close)
    assert s[0] > 0.99 and s[-1] < 0.01
    found = np.asarray(even(x))
    assert np.linalg.norm(found) == pytest.approx(2.0, rel=1e-5)
    lengths = np.linalg.norm(found, axis=0)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-5)
    blocks = np.split(matrix, BLOCKS, axis=int(turned))
    expected = [mc.newton_schulz(jnp.float32(block)) for block in blocks]
    close = of_newton_schulz(12)
    assert_close(in_blocks(x), np.concatenate(expected, axis=int(turned)), close)


def test_now_and_then_orthogonalizes_in_one_of_so_many_steps():
    shapes = {"up": {"kernel": (4, 12)}}
    direction = dict(beta=0.5, nesterov=False, per_head=False)
    tx = now_and_then(2, as_long, direction)
    state, update, momentum = tx.init(drawn(0, shapes)), jax.jit(tx.update), 0.0
    for i in range(4):
        grads = drawn(i, shapes)
        momentum = 0.5 * momentum + np.asarray(grads["up"]["kernel"], np.float64)
        found, state = update(grads, state, drawn(0, shapes))
        expected = mc.newton_schulz(jnp.float32(momentum)) if i % 2 == 0 else None
        if expected is None:
            expected = 2 * momentum / np.linalg.norm(momentum)
        scale = 0.2 * math.sqrt(12)
        close = of_newton_schulz(12)
        assert_close(found["up"]["kernel"], scale * np.asarray(expected), close)


def test_arithmetic_is_counted_product_by_product():
    run = Run(layers=1, width=4, heads=2, batch=2, context=8)

    def products(m, n, squares=True):
        return 2 * m * n * m + 2 * m * m * n + 2 * m**3 * squares

    shapes = [(2, 4)] * 6 + [(4, 4)] + [(4, 16)] * 2
    assert iteration_flop(run) == sum(products(*shape) for shape in shapes)
    expected = sum(products(*shape, squares=False) for shape in shapes)
    assert iteration_flop(run, squares=False) == expected
    halves = sum(2 * products(m / 2, n) for m, n in shapes)
    assert iteration_flop(run, blocks=2) == halves
    # A product of a token with each matrix and the head, and 8 logits and their sums.
    forward = 2 * (sum(m * n for m, n in shapes) + 4 * 256) + 2 * 2 * 8 * 4
    assert step_flop(run) == 3 * forward * 16


def test_loss_at_equal_work_is_that_of_a_shorter_default():
    run = Run(layers=3, width=64, heads=4)
    default = {steps: [3 - 0.3 * math.log(steps)] * 2 for steps in (340, 400, 460)}
    arms = {"5 steps": default[400], "3 steps": [default[400][0] + 0.01] * 2}
    measured = cheaper_iterations.Measured(dict.fromkeys(arms, run), arms, default)
    assert measured.at_equal_tokens("3 steps").mean == pytest.approx(0.01)
    work = [step_flop(run) + steps * iteration_flop(run) for steps in (3, 5)]
    expected = 0.01 + 0.3 * math.log(work[0] / work[1])
    assert measured.at_equal_work("3 steps").mean == pytest.approx(expected)


def test_the_fit_finds_the_powers_of_length_and_size():
    found = []
    for width in (32, 64):
        for steps in (30, 120, 480):
            run = Run(layers=2, width=width, steps=steps)
            count = 12 * 2 * width**2
            share = 0.3 * (run.tokens / count) ** 0.05 * count**0.03
            path = [(0.1, 2.0), (1.0, 1.0)]
            goal = 2.0 - math.log(share / 0.1) / math.log(10)
            outcome = Outcome(Pair(run, run), [goal] * 3, [path] * 3)
            of = dict.fromkeys(("the rule's rate", "rate tuned"), outcome)
            found.append(tokens_per_parameter.Measured(of))
    law = tokens_per_parameter.fitted(found)
    assert law.length.mean == pytest.approx(0.05) and law.length.half < 1e-9
    assert law.size.mean == pytest.approx(0.03)
    assert law.at(20, 1e6) == pytest.approx(0.3 * 20**0.05 * 1e6**0.03)


@pytest.mark.parametrize(
    ("rounds", "place"), [(0, 0), (1, 2), (2, 3), (3, 3), (None, 3)]
)
def test_a_walk_ends_where_no_neighbor_is_better_or_after_its_rounds(rounds, place):
    losses = [5.0, 4.0, 3.0, 1.0, 2.0]

    def near(i):
        return [j for j in (i - 1, i + 1, i + 2) if 0 <= j < len(losses)]

    def measured(places):
        return [losses[i] for i in places]

    assert walk(0, near, measured, rounds) == place
