"""LightBench's tasks against its own modules, and when an attempt passes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import lightbench
import numpy as np
import optax
import pytest
from helpers import assert_close, few, ROOT, tolerance
from lightbench_recurrent import LSTM, Pairs, Parity, RNN
from lightbench_tasks import loss_at_most, Step, Task, TASKS


RECORDED = np.load(ROOT / "tests/data/lightbench.npz")
# Difficulty, step, and how many times rounding of the parameters grows in the result:
# `a**5` five times, the cosine and sine by the slope of what they are of.
MODULES = {
    "beale": (None, 1, 20),
    "rosenbrock": (None, 1, 20),
    "rastrigin": (None, 1, 2 * np.pi * 2.2),
    "saddle_point": (2, 1, 5),
    "plateau_navigation": (4, 1, 20),
    "discontinuous_gradient": (None, 1, 2),
    "constrained_optimization": (1e2, 1, 10),
    "quadratic_varying_scale": (16, 1, 2),
    "quadratic_varying_target": (16, 1, 10),
    "scale_invariant": (2, 1, 2),
    "layer_wise_scale": (1e1, 1, 2),
    "parameter_scale": (1e1, 1, 2),
    "momentum_utilization": (0.02, 7, 20),
    "adversarial_gradient": (100, 7, 10),
    "dynamic_landscape": (100, 7, 20),
}
NETWORKS = {
    "xor_sequence": Pairs(LSTM),
    "xor_sequence_rnn": Pairs(RNN),
    "xor_digit": Parity(LSTM),
    "xor_digit_rnn": Parity(RNN),
    "xor_spot": Parity(LSTM, marks=True),
    "xor_spot_rnn": Parity(RNN, marks=True),
}
KEY = jax.random.key(0)


def at(number: int) -> Step:
    keys = [jax.random.fold_in(KEY, number - i) for i in (0, 1)]
    return Step(jnp.asarray(number), *keys)


def recorded(task: str, of: str):
    """PyTorch's parameters or gradients by our names, kernels (in, out)."""
    prefix = f"{task}/{of}/"
    names = [name for name in RECORDED if name.startswith(prefix)]
    flat = {name.removeprefix(prefix): RECORDED[name] for name in names}
    if set(flat) <= {"param", "layer1", "layer2", "layer3"}:
        return {name.replace("param", "x"): x for name, x in flat.items()}
    tree = {
        "norm": {"scale": flat["proj.0.weight"], "bias": flat["proj.0.bias"]},
        "head": {"kernel": flat["proj.1.weight"].T, "bias": flat["proj.1.bias"]},
    }
    for theirs, ours in {
        "embed": "embedding",
        "enc": "encoder",
        "dec": "decoder",
    }.items():
        for name in [n for n in flat if n.startswith(theirs)]:
            module, leaf = name.split(".")
            if theirs == "embed":
                tree[module.replace(theirs, ours)] = flat[name]
                continue
            kind = {"weight_ih": "input", "weight_hh": "recurrent"}
            kind |= {"bias_ih": "input_bias", "bias_hh": "recurrent_bias"}
            tree.setdefault(ours, {})[kind[leaf.removesuffix("_l0")]] = flat[name].T
    return tree


def in_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@pytest.mark.parametrize("name", MODULES)
def test_a_loss_and_its_gradient_are_those_of_lightbench(name):
    difficulty, number, condition = MODULES[name]
    params = in_float32(recorded(name, "params"))
    loss, gradient = jax.value_and_grad(TASKS[name].loss)(
        params, at(number), difficulty
    )
    share = tolerance(jnp.float32, size=16, condition=condition)
    assert_close(loss, RECORDED[f"{name}/loss"], share)
    assert_close(gradient, recorded(name, "gradients"), share)


@pytest.mark.parametrize("name", few(NETWORKS, "xor_sequence", "xor_spot_rnn"))
def test_networks_are_those_of_lightbench(name):
    params = in_float32(recorded(name, "params"))
    data = [jnp.asarray(RECORDED[f"{name}/{which}"]) for which in ("first", "second")]
    loss, gradient = jax.value_and_grad(NETWORKS[name].loss)(params, *data)
    # Ten steps of a cell and a norm, whose slopes are near one; sums of 24 products.
    share = tolerance(jnp.float32, size=24, slopes=[1.5] * 12)
    assert_close(loss, RECORDED[f"{name}/loss"], share)
    assert_close(gradient, recorded(name, "gradients"), share)


def test_targets_are_the_exclusive_or_of_the_bits_that_count():
    bits, marks = Parity(RNN, marks=True).draw(KEY, 96)
    assert bits.shape == (96, 256) and set(np.unique(bits)) == {0, 1}
    # 512 of 96 places with return: one is missed with a probability of 0.5 %.
    assert 90 <= marks.sum() <= 96
    first, second = Pairs(RNN).draw(KEY, 3)
    assert first.shape == second.shape == (3, 256) and (first != second).any()


def mean_of_losses(name: str, params, difficulty, numbers) -> float:
    loss = jax.jit(lambda number: TASKS[name].loss(params, at(number), difficulty))
    return np.mean([loss(number) for number in numbers])


def test_noise_has_the_size_that_lightbench_gives_it():
    x = {"x": jnp.full(4096, 2.0)}
    # 4 + 1 / (4 + n)^2 on average; of 4,096 draws, 4 standard deviations.
    noisy = mean_of_losses("gradient_noise_scale", x, 4, [1])
    assert noisy == pytest.approx(4 + 1 / 5**2, abs=4 * 2 * 2 / 5 / 4096**0.5)
    # The first step sees a share of 1/8, later ones the union of that and the last.
    sparse = {"x": jnp.ones(2**16)}
    for number, share in ((1, 1 / 8), (9, 1 - (7 / 8) ** 2)):
        seen = mean_of_losses("sparse_gradient", sparse, 1 / 8, [number])
        assert seen == pytest.approx(share, abs=4 * 0.5 / 2**8)
    # The power of the noise is between that of the parameters and 1/256 of it.
    losses = [
        mean_of_losses("batch_size_scaling", x, 2**16, [n]) / 4 - 1
        for n in range(1, 60)
    ]
    off = 4 * 2 / 4096**0.5
    assert 1 / 256 - off < min(losses) < 1 / 64 and 1 / 4 < max(losses) < 1 + off
    # q^2 plus the mean square of a random walk, (n + 1) / 2, for n = 4.
    y = {"x": jnp.array([3.0, 0, 0, 0, 1.0, 0, 0, 0])}
    walk = mean_of_losses("minimax", y, 4, range(1, 200))
    assert walk == pytest.approx(8**2 + 2.5, abs=4 * 2 * 8 * 2.5**0.5 / 800**0.5)


def test_wide_linear_asks_for_what_its_loss_does_not_seek():
    task, sums = TASKS["wide_linear"], np.triu(np.ones((32, 32)))
    assert task.loss({"x": sums}, at(1), 32) < 32**2 * tolerance(jnp.float32, size=32)
    assert not task.passed({"x": sums}, 0.0)
    assert task.passed({"x": -sums}, 9.0)


@pytest.mark.parametrize(
    ("name", "right", "bound"),
    [
        ("quadratic_varying_scale", np.zeros(16), 1e-7),
        ("quadratic_varying_target", np.arange(16) / np.sqrt(1240), 1e-8),
        ("adversarial_gradient", np.zeros(16), 1e-3),
        ("constrained_optimization", np.ones(16), 1e-3),
    ],
)
def test_rules_on_parameters_have_lightbenchs_bounds(name, right, bound):
    with jax.enable_x64(True):
        for size, passes in ((0.9, True), (1.1, False)):
            params = {"x": jnp.asarray(right + size * bound)}
            assert bool(TASKS[name].passed(params, jnp.inf)) == passes


def test_attempts_end_where_lightbenchs_do():
    """Losses that fall, rise fast or slowly, are noisy, negative or a wave."""
    losses = jnp.asarray(RECORDED["stop_rule/losses"])
    watch = lightbench.Watch(jnp.zeros(20), jnp.zeros(8, int))

    def step(carry, now):
        watch, is_running = carry
        watch, goes_on = lightbench.watched(watch, *now)
        return (watch, is_running & goes_on), is_running

    @jax.vmap
    def steps_run(losses):
        numbers = jnp.arange(1, losses.size + 1)
        _, runs = jax.lax.scan(step, (watch, jnp.array(True)), (losses, numbers))
        return runs.sum()

    stops = RECORDED["stop_rule/stops"]
    assert len(set(stops)) > 5
    never = losses.shape[1]
    np.testing.assert_array_equal(steps_run(losses), np.where(stops < 0, never, stops))


def stranger(loss, attempts: int = 4) -> Task:
    """A task of one number that passes at a loss of at most 0."""

    def init(key, difficulty):
        return {"x": jnp.ones(1)}

    return Task(init, loss, loss_at_most(0), {}, attempts=attempts, steps=256)


def test_a_low_loss_passes_at_any_step_but_not_after_one_that_is_not_finite():
    def dips(params, step, difficulty):
        return jnp.sum(params["x"] ** 2) + jnp.where(step.number == 300, -1e9, 1.0)

    def breaks(params, step, difficulty):
        return dips(params, step, difficulty) + jnp.where(
            step.number == 299, jnp.inf, 0
        )

    # Two groups of 256 steps, the second in the second round.
    assert lightbench.search(stranger(dips), None, lightbench.adamw).step == 512
    assert lightbench.search(stranger(breaks), None, lightbench.adamw) is None


@pytest.mark.parametrize(("last", "passes"), [(256 * 21, True), (256 * 21 + 1, False)])
def test_the_best_attempts_go_on_four_and_sixteen_times_as_long(last, passes):
    def late(params, step, difficulty):
        return 1 + 0 * jnp.sum(params["x"]) - (step.number >= last)

    found = lightbench.search(stranger(late, attempts=16), None, lightbench.adamw)
    assert (found is not None) == passes


def test_the_best_are_those_with_the_least_loss():
    """A slope has the least loss after the greatest rate, which is left at the end."""
    rates = lightbench.draw_hyperparameters(16, seed=0)[:, 0]

    def falls(params, step, difficulty):
        loss = 1e6 + jnp.sum(params["x"])
        return jnp.where(step.number > 256 * 5, -1.0, loss)

    found = lightbench.search(stranger(falls, attempts=16), None, lightbench.adamw)
    assert found.rate == pytest.approx(rates.max(), rel=1e-6)


def test_hyperparameters_fill_lightbenchs_ranges():
    drawn = lightbench.draw_hyperparameters(256, seed=0)
    assert drawn.shape == (256, 3)
    logarithms = np.log10(drawn)
    for column, least, most in zip(logarithms.T, (-7, -5, -7), (2, 0, 0), strict=True):
        assert least <= column.min() < least + 0.1 and most - 0.1 < column.max() <= most
        assert np.median(column) == pytest.approx((least + most) / 2, abs=0.1)
    np.testing.assert_array_equal(drawn, lightbench.draw_hyperparameters(256, seed=0))
    assert (drawn != lightbench.draw_hyperparameters(256, seed=1)).all()


def test_a_search_ends_the_same_each_time():
    found = [
        lightbench.search(TASKS["rosenbrock"], None, lightbench.adamw) for _ in range(2)
    ]
    assert found[0] is not None and found[0] == found[1]


@functools.cache
def trained(optimizer, name: str, difficulty) -> dict:
    task = TASKS[name]
    make = functools.partial(optimizer, model=lightbench.read_task(task, difficulty))
    params = task.init(KEY, difficulty)
    attempt = lightbench.start(make, (0.03, 0.9, 0.99), params)
    attempt = lightbench.group_of_steps(task, difficulty, make, KEY, 1, attempt)
    return attempt.params


def test_the_loop_is_adamw_with_a_warm_up():
    task, params = TASKS["rosenbrock"], {"x": jnp.array([-7.0, -4.0])}
    tx = optax.adam(lambda n: 0.03 * jnp.minimum((n + 1) / 100, 1), 0.9, 0.99, 1e-8)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        gradient = jax.grad(task.loss)(params, at(1), None)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(params, updates), state

    for _ in range(256):
        params, state = step(params, state)
    # 256 steps of which each keeps the error of those before it.
    share = tolerance(jnp.float32, slopes=[1.0] * 256)
    assert_close(trained(lightbench.adamw, "rosenbrock", None), params, share)


def test_muon_is_adamw_where_there_is_no_matrix():
    for name, difficulty in (("rosenbrock", None), ("layer_wise_scale", 10)):
        model = lightbench.read_task(TASKS[name], difficulty)
        assert not lightbench.has_matrices(model)
        ours, adamw = (
            trained(optimizer, name, difficulty)
            for optimizer in (lightbench.muon, lightbench.adamw)
        )
        assert_close(ours, adamw, tolerance(jnp.float32, slopes=[1.0] * 256))


def test_kernels_of_cells_are_muons():
    labels = lightbench.read_task(TASKS["xor_digit"], 4).labels
    kernels = {"input": "matrix", "recurrent": "matrix"}
    biases = {"input_bias": "vector", "recurrent_bias": "vector"}
    assert labels["encoder"] == kernels | biases
    assert labels["embedding"] == "embedding"
    assert labels["head"]["kernel"] != "matrix"


def test_published_results_are_read_from_lightbenchs_table(tmp_path):
    file = tmp_path / "results.md"
    row = "| {} | {} | {} | No | {} | 0.2s | 2.01e-05 | {} | 0 | `any` |\n"
    file.write_text(
        "| Benchmark | Optimizer |\n|---|---|\n"
        + row.format("xor_spot-easy", "Muon", "No", "✓", 3)
        + row.format("xor_spot-trivial", "Muon", "No", "✓", 2)
        + row.format("xor_spot-trivial", "AdamW", "Yes", "✓", 9)
        + row.format("xor_spot-trivial", "AdamW", "No", "✗", 1000)
        + row.format("xor_spot-trivial", "LaProp", "No", "✓", 1)
    )
    passed = lightbench.read_published(file)["passed_at_attempt"]
    expected = {"xor_spot": {"AdamW": {}, "Muon": {"trivial": 2, "easy": 3}}}
    assert passed == expected


def test_all_that_lightbench_counts_is_kept():
    kept = json.loads(lightbench.PUBLISHED.read_text())["passed_at_attempt"]
    counts = [
        sum(len(task[name]) for task in kept.values()) for name in ("AdamW", "Muon")
    ]
    # The heads of its table: 107 of 148, and 78 of 153.
    assert counts == [107, 78]
    assert set(TASKS) <= set(kept)


def test_the_script_prints_what_passed(monkeypatch, capsys, tmp_path):
    file = tmp_path / "lightbench.json"
    arguments = ["--quick", "--tasks", "rosenbrock", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["lightbench.py", *arguments])
    lightbench.main()
    printed = capsys.readouterr().out
    assert "| rosenbrock | trivial | no | yes | yes | yes | yes |" in printed
    assert "| vectors | 1 | 1 | 1 | 1 | 1 |" in printed
    assert len(json.loads(file.read_text())["tables"]) == 3


def test_a_new_task_is_one_entry(monkeypatch, capsys):
    def bowl(params, step, difficulty):
        return jnp.sum(params["x"] ** 2) - 0.5

    task = dataclasses.replace(stranger(bowl), difficulties={"trivial": None})
    monkeypatch.setitem(TASKS, "bowl", task)
    monkeypatch.setattr("sys.argv", ["lightbench.py", "--tasks", "bowl"])
    lightbench.main()
    printed = capsys.readouterr().out
    assert "| bowl | trivial | no | yes | - | yes | - |" in printed


def test_a_task_that_does_not_exist_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lightbench.py", "--tasks", "beale", "bealle"])
    with pytest.raises(SystemExit):
        lightbench.main()
    assert "no task bealle; there are beale, rosenbrock" in capsys.readouterr().err
