"""What the experiments compute from their runs, and what the runs train on."""

import dataclasses
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


sys.path.append(str(pathlib.Path(__file__).parent.parent / "benchmarks"))

from evidence import intervals, tokens, tuning
from evidence.balanced_clip import balanced_clip
from evidence.experiments import (
    other_seeds,
    token_conditions,
    width_transfer,
)
from evidence.lab import Lab, losses, Unfinished
from evidence.model import largest_logits, Transformer
from evidence.optimizers import (
    clip,
    Hyperparameters,
    hyperparameters,
    is_numbers,
    MATRICES,
    schedule,
)
from evidence.plan import Plan
from evidence.probe import geometry, svd_entropy
from evidence.run import Run
from evidence.spikes import spikes
from evidence.texts import Text
from evidence.training import evaluates, last_fired, program, scaled, train


pytestmark = pytest.mark.usefixtures("fast_compilation")
SMALL = Run(layers=2, width=32, heads=4, batch=2, context=16, steps=10)


def test_spikes_by_the_stated_rule():
    generator = np.random.default_rng(0)
    losses = 2.0 + 0.1 * generator.standard_normal(400)
    losses[[120, 121, 300]] = 3.5, 3.4, 2.9
    losses[10] = 9.0  # too early to have fifty steps before it
    assert spikes(losses) == [120, 300]
    losses[200] = math.nan
    assert spikes(losses) == [120, 200, 300]


def test_interval_against_the_table_of_student():
    # t(0.975, 2) = 4.3027
    of = intervals.interval([1.0, 2.0, 3.0])
    assert of.mean == 2.0
    assert of.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    pair = intervals.paired([1.0, 2.5, 3.0], [0.0, 1.0, 2.5])
    assert pair.mean == pytest.approx(1.0)
    assert pair.half == pytest.approx(4.3027 * 0.5 / 3**0.5, rel=1e-4)


def test_intervals_cover_as_often_as_they_say():
    generator = np.random.default_rng(0)
    found = [intervals.interval(x) for x in generator.standard_normal((4000, 5))]
    inside = np.mean([of.low < 0 < of.high for of in found])
    assert inside == pytest.approx(0.95, abs=0.015)


def test_svd_entropy():
    assert svd_entropy(np.eye(5)) == pytest.approx(1.0)
    assert svd_entropy(np.outer(np.arange(1.0, 4), np.ones(4))) == pytest.approx(
        0, abs=1e-6
    )
    shares = np.array([0.5, 0.25, 0.25])
    expected = -(shares * np.log(shares)).sum() / np.log(3)
    assert svd_entropy(np.diag(shares**0.5)) == pytest.approx(expected)


def test_rms_of_a_step_leaves_weight_decay_out():
    before = {"up": {"kernel": np.full((4, 8), 3.0)}, "scale": np.ones(4)}
    step = np.random.default_rng(0).standard_normal((4, 8))
    after = {"up": {"kernel": (1 - 0.1 * 0.5) * 3.0 - 0.1 * step}, "scale": np.ones(4)}
    seen = geometry(before, after, Hyperparameters(0.1, 0.1, 0.5, math.inf))
    assert set(seen) == {"up/kernel"}
    assert seen["up/kernel"]["shape"] == [4, 8]
    assert seen["up/kernel"]["update_rms"] == pytest.approx(
        (step**2).mean() ** 0.5, rel=1e-4
    )


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("sharing", ["head", "balanced"])
def test_both_ways_to_share_bring_every_head_to_the_threshold(keys, sharing):
    run = SMALL.but(key_heads=keys, sharing=sharing, threshold=1.0)
    graph, params, rest = nnx.split(Transformer(run, nnx.Rngs(0)), nnx.Param, ...)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 16))

    @jax.jit
    def measure(params):
        def forward(model):
            return model(tokens)

        _, stats = nnx.capture(forward, nnx.Intermediate)(
            nnx.merge(graph, params, rest)
        )
        return stats

    stats = measure(params)
    before = np.asarray(largest_logits(stats))
    # The layers read the same stream only if the first is alone: clip one at a time.
    tau = float(np.median(before[0]))
    at = Hyperparameters(0.0, 0.0, 0.0, tau)
    after = np.asarray(largest_logits(measure(clip(run, params, stats, at))))
    np.testing.assert_allclose(after[0], np.minimum(before[0], tau), rtol=1e-4)


def test_balanced_clip_shrinks_a_key_by_the_root_of_the_least_gamma():
    kernel = jnp.ones((8, 4, 2))
    params = {
        "blocks": {
            0: {
                "attention": {
                    "query": {"kernel": kernel},
                    "key": {"kernel": kernel[:, :2]},
                }
            }
        }
    }
    stats = {
        "blocks": {0: {"attention": {"max_logits": jnp.array([40.0, 5.0, 5.0, 5.0])}}}
    }
    layer = balanced_clip(params, stats, jnp.asarray(10.0))["blocks"][0]["attention"]
    np.testing.assert_allclose(layer["key"]["kernel"][0, :, 0], [0.5, 1.0])
    np.testing.assert_allclose(layer["query"]["kernel"][0, :, 0], [0.5, 2.0, 1.0, 1.0])


def test_clipping_by_layer_scales_all_heads_by_the_largest():
    run = SMALL.but(sharing="layer", threshold=1.0)
    params = {
        "attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}
    }
    stats = {"attention": {"max_logits": jnp.array([1.0, 4.0])}}
    after = clip(run, params, stats, Hyperparameters(0.0, 0.0, 0.0, 1.0))
    np.testing.assert_allclose(after["attention"]["key"]["kernel"], 0.5)


def test_what_is_counted_of_the_clip():
    logits = np.array(
        [[[1.0, 3.0], [1.0, 1.0]], [[1.0, 1.0], [4.0, 1.0]], [[1.0] * 2] * 2]
    )
    run = Run(heads=2, threshold=2.0)
    assert scaled(logits, run) == 2
    assert scaled(logits, run.but(sharing="layer")) == 4
    assert scaled(logits, run.but(sharing="balanced", key_heads=1)) == 4
    assert last_fired(logits, 2.0) == [[0, 1], [2, 0]]


def test_schedules():
    for name in ("cosine", "constant", "decay"):
        factors = schedule(Run(steps=200, schedule=name))
        np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10)
        assert factors.shape == (200,) and factors.min() > 0 and factors.max() == 1
    assert (schedule(Run(steps=200, schedule="constant"))[10:] == 1).all()
    decay = schedule(Run(steps=200, schedule="decay"))
    assert (decay[10:162] == 1).all() and decay[163] < 1
    assert decay[-1] < 0.03
    cosine = schedule(Run(steps=200))
    assert (np.diff(cosine[10:]) < 0).all()
    assert cosine[105] == pytest.approx(0.5, abs=0.01)
    at = hyperparameters(Run(steps=200, learning_rate=0.5, adam_learning_rate=0.1))
    assert at[9] == (0.5, np.float32(0.1), np.float32(0.1), math.inf)


def test_evaluations_are_spread_evenly_and_the_last_is_at_the_end():
    run = Run(steps=400, evaluations=10)
    assert [i + 1 for i in range(400) if evaluates(run, i)] == list(range(40, 401, 40))
    run = Run(steps=30, evaluations=4)
    places = [i + 1 for i in range(30) if evaluates(run, i)]
    assert len(places) == 4 and places[-1] == 30
    assert [i for i in range(30) if evaluates(run.but(evaluations=1), i)] == [29]


def test_parts_of_a_text_do_not_overlap(tmp_path):
    file = tmp_path / "text.txt"
    content = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint8)
    file.write_bytes(content.tobytes())
    source = Text(str(file), tune=7, report=15)
    assert len(source.train) + len(source.parts["tune"]) + len(
        source.parts["report"]
    ) == len(content)
    assert len(source.parts["tune"]) > 15_000 < len(source.parts["report"])
    whole = np.concatenate([source.train, source.parts["tune"], source.parts["report"]])
    np.testing.assert_array_equal(np.bincount(whole), np.bincount(content))
    place = content.tobytes().find(source.parts["report"][:64].tobytes())
    assert (
        place >= 0
        and source.train.tobytes().find(source.parts["report"][:64].tobytes()) < 0
    )
    np.testing.assert_array_equal(
        parts.batch(4, 16, seed=3, step=5), parts.batch(4, 16, seed=3, step=5)
    )
    assert (parts.batch(4, 16, 3, 5) != parts.batch(4, 16, 4, 5)).any()


def test_text_that_is_too_short_is_said_to_be_so(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("too short")
    with pytest.raises(SystemExit, match="too few for context 64"):
        Text(str(file), tune=7, report=15).batch(4, 64, seed=0, step=0)


def test_every_field_is_part_of_the_key():
    assert json.loads(Run().key) == {}
    assert json.loads(Run(seed=2, fused=True).key) == {"seed": 2, "fused": True}
    others = {
        bool: lambda x: not x,
        str: lambda x: x + "!",
        tuple: lambda x: (("a", 1),),
    }
    keys = set()
    for field in dataclasses.fields(Run):
        default = field.default
        change = others.get(type(default), lambda x: 3 if x is None else x / 2 + 7)
        changed = 9.0 if field.name == "threshold" else change(default)
        keys.add(Run(**{field.name: changed}).key)
    assert len(keys | {Run().key}) == 1 + len(dataclasses.fields(Run))


def test_one_program_serves_all_rates_and_corpora():
    run = SMALL.but(learning_rate=0.3, weight_decay=1.0, seed=7, corpus="prose")
    assert run.program == SMALL.program
    assert run.but(threshold=30.0).program == run.but(threshold=10.0).program
    assert run.but(threshold=30.0).program != run.program
    assert run.but(muon=(("nesterov", False),)).program != run.program


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("threshold", [math.inf, 0.01])
def test_training_step_is_that_of_the_public_optimizer(optimizer, threshold):
    """The program's step against the package's transformation, put together by hand."""
    import optax

    import muonclip_jax as mc

    run = SMALL.but(optimizer=optimizer, threshold=threshold)
    compiled = program(run.program)
    first = compiled.init(jax.random.key(0))
    params, others = first.params, first.others
    graph, _, _ = nnx.split(Transformer(run, nnx.Rngs(0)), nnx.Param, ...)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 17))
    if optimizer == "muon":
        tx = mc.muon(0.1, adam_learning_rate=0.02, weight_decay=0.3)
    else:
        tx = optax.adamw(0.1, b2=0.95, weight_decay=0.3)
    tx = optax.chain(tx, mc.qk_clip(threshold))

    def loss_fn(params):
        def loss(model):
            logits = model(tokens[:, :-1])
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        return nnx.capture(loss, nnx.Intermediate)(nnx.merge(graph, params, others))

    (loss, stats), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    updates, _ = jax.jit(tx.update)(
        grads, tx.init(params), params, attention_stats=stats
    )
    expected = jax.device_get(optax.apply_updates(params, updates))
    at = Hyperparameters(*np.float32([0.1, 0.02, 0.3, threshold]))
    after, seen, largest = compiled.step(first, tokens, at)
    assert float(seen) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(largest, largest_logits(stats), rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


class Bowl:
    """A lab whose losses are known: least at the place given."""

    def __init__(self, *best):
        self.best, self.asked = best, set()

    def results(self, runs, kept_in):
        assert kept_in == "tuning"
        return [self.result(run) for run in runs]

    def result(self, run):
        place = (
            tuning.RATES.index(run.learning_rate),
            tuning.DECAYS.index(run.weight_decay),
            tuning.RATES.index(run.adam_learning_rate),
        )[: len(self.best)]
        self.asked.add(place)
        loss = sum((a - b) ** 2 for a, b in zip(place, self.best, strict=True))
        return {"curve": [[10, loss if run.learning_rate < 0.2 else math.nan, 0.0]]}


def test_tuning_ends_where_both_axes_have_worse_neighbours():
    for best in [(3, 2), (7, 4), (5, 0), (6, 5)]:
        lab = Bowl(*best)
        start = dict(learning_rate=tuning.RATES[6], adam_learning_rate=tuning.RATES[6])
        run = tuning.tuned(lab, Run(**start))
        assert (
            tuning.RATES.index(run.learning_rate),
            tuning.DECAYS.index(run.weight_decay),
        ) == best
        rate, decay = best
        around = {
            (rate - 1, decay),
            (rate + 1, decay),
            (rate, decay - 1),
            (rate, decay + 1),
        }
        assert {(r, d) for r, d in around if 0 <= d < len(tuning.DECAYS)} <= lab.asked


def test_tuning_walks_along_the_axes_it_is_given():
    start = Run(learning_rate=tuning.RATES[6], adam_learning_rate=tuning.RATES[6])
    found = tuning.tuned(Bowl(7, 3, 2), start, (*tuning.AXES, "adam_learning_rate"))
    assert found == start.but(
        learning_rate=tuning.RATES[7],
        weight_decay=tuning.DECAYS[3],
        adam_learning_rate=tuning.RATES[2],
    )
    found = tuning.tuned(Bowl(7, 3, 2), start)
    assert found.adam_learning_rate == tuning.RATES[6]


def test_arms_are_runs_of_every_corpus_and_seed():
    arms = Plan(["code", "prose"], first_seed=5).arms(
        {"free": {}, "low": dict(threshold=3.0)}, 2, steps=7, threshold=9.0
    )
    assert list(arms) == [(c, a) for c in ("code", "prose") for a in ("free", "low")]
    assert arms["prose", "low"] == [
        Run(corpus="prose", steps=7, threshold=3.0, seed=seed) for seed in (5, 6)
    ]
    assert {run.threshold for run in arms["code", "free"]} == {9.0}


class Known:
    """A lab that has trained everything: the loss is a function of the run."""

    def __init__(self, loss):
        self.loss = loss

    def results(self, runs, kept_in=""):
        return [{"curve": [[r.steps, self.loss(r), self.loss(r)]]} for r in runs]

    def gather(self, runs):
        return {key: self.results(of_key) for key, of_key in runs.items()}


def test_shares_of_the_tokens_by_condition():
    # Muon's loss falls with the logarithm of its steps, and more so with its batch.
    def loss(run):
        off = abs(math.log(run.learning_rate / 1.6e-2))
        off -= 0.1 * (run.matrices == "per_head")
        if run.optimizer == "adamw":
            return 3.0 - math.log(run.steps) + off
        return 3.0 - math.log(run.steps * (1 + run.batch / 64)) + off

    outcomes = token_conditions.measure_all(Known(loss), Plan(), "code")
    shares = {name: outcome.shares for name, outcome in outcomes.items()}
    others = ("rates tuned for every length", "AdamW side tuned too")
    for name in ("one matrix per head", "and AdamW side tuned"):
        assert len(shares.pop(f"{name}, largest model")) == 3
    assert {len(of_seed) for of_seed in shares.values()} == {token_conditions.SEEDS}
    assert shares["64 sequences"] == pytest.approx([0.5] * 6)
    for name in ("16 sequences, 400 steps", "1,600 steps", *others):
        assert shares[name] == pytest.approx([0.8] * 6)
    assert shares["one matrix per head"] == pytest.approx([0.8 * math.exp(-0.1)] * 6)
    # At a quarter of its rate AdamW loses log 4: Muon's shortest run is better.
    assert shares["AdamW at 1/4 of its rate"] == [0.35] * 6
    assert token_conditions.difference(outcomes).mean == pytest.approx(-0.3)
    assert token_conditions.saves(outcomes["64 sequences"])
    assert not token_conditions.saves(outcomes["4 sequences"])


def test_a_repetition_lies_inside_its_interval():
    reported = intervals.Interval(1.0, 0.1)
    assert other_seeds.repeats(reported, intervals.Interval(1.14, 9.0))
    assert not other_seeds.repeats(reported, intervals.Interval(0.85, 0.1))
    pair = other_seeds.figures(Known(lambda run: run.seed), Plan(["code"]))
    assert pair["code", "no clip: loss"].mean == pytest.approx(4.5)
    assert pair["code", "threshold 5: difference"].mean == 0


def test_share_of_the_tokens_is_interpolated_in_the_logarithm():
    path = [(0.25, 3.0), (0.5, 2.0), (1.0, 1.0)]
    assert tokens.reached(path, 1.5) == pytest.approx(0.5 * 2**0.5)
    assert tokens.reached(path, 2.0) == pytest.approx(0.5)
    assert math.isnan(tokens.reached(path, 0.5))


def test_best_octave_is_the_vertex_of_the_parabola():
    x = np.arange(5.0)
    assert width_transfer.best_octave((x - 2.3) ** 2 + 1) == pytest.approx(2.3)
    assert math.isnan(width_transfer.best_octave(x))


def test_lab_keeps_results_over_interruptions(tmp_path):
    lab = Lab(tmp_path, environment="here")
    lab.open("first")
    assert lab.once("a", lambda: {"value": 1})["value"] == 1
    with (tmp_path / "first.jsonl").open("a") as file:
        file.write('{"run": "b", "val')  # cut off
    lab = Lab(tmp_path, environment="there")
    lab.open("first")
    assert lab.once("a", lambda: pytest.fail("measured again"))["value"] == 1
    assert lab.once("c", lambda: {"value": 3})["value"] == 3
    lab = Lab(tmp_path, trains=False)
    assert [lab.once(name, dict)["value"] for name in "ac"] == [1, 3]
    assert lab.environments() == ["here", "there"]
    other = Lab(tmp_path / "other", known=tmp_path / "first.jsonl")
    assert other.once("a", lambda: pytest.fail("measured again"))["value"] == 1
    with pytest.raises(Unfinished, match="1 runs are missing"):
        lab.results([Run()])


def test_a_run_that_diverged_is_the_worst():
    results = [{"curve": [[10, math.nan, math.nan]]}]
    results += [{"curve": [[5, 3.0, 4.0], [10, 1.0, 2.0]]}]
    assert losses(results) == [math.inf, 2.0]
    assert losses(results, part="tune") == [math.inf, 1.0]


def test_quick_plan_is_small_and_seeds_differ_from_tuning():
    plan = Plan()
    assert 0 not in plan.seeds(8) and len(plan.seeds(8)) == 8
    assert Plan(quick=True).run("code").tokens < plan.run("code").tokens / 20


@pytest.mark.parametrize("matrices", ["one_expert_matrix", "adam_experts"])
def test_models_with_experts_train_and_are_evaluated(matrices):
    run = Run(model="kimi_k2", layers=2, steps=2, batch=16, matrices=matrices)
    result = train(run)
    assert result["curve"][-1][0] == 2 and result["curve"][-1][1] < 6


def test_only_the_experts_matrices_are_chosen_anew():
    model = Transformer(Run(model="kimi_k2", layers=2), nnx.Rngs(0))
    params = nnx.split(model, nnx.Param, ...)[1]

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
