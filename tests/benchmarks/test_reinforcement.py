"""Environments, advantages and brackets of the reinforcement learning in small."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence.lab import Lab
from evidence.reinforcement import (
    advantages,
    beginnings,
    cart_pole,
    DISCOUNT,
    GIVEN,
    is_closed,
    pendulum,
    play,
    Played,
    TASKS,
    TRACE,
)
from evidence.run import Run


def test_a_cart_pole_falls_as_newton_says():
    """By the Lagrangian of cart and rod: both equations of motion hold."""
    environment, state = cart_pole(), jnp.float32([0.1, 0.2, 0.1, -0.3])
    after, reward, fell = environment.step(state, jnp.int32(1))
    cart, pole, half, gravity, force = 1.0, 0.1, 0.5, 9.8, 10.0
    angle, turning = 0.1, -0.3
    move, turn = (np.asarray(after - state) / 0.02)[[1, 3]]
    along = (cart + pole) * move + pole * half * (
        turn * np.cos(angle) - turning**2 * np.sin(angle)
    )
    assert along == pytest.approx(force, rel=1e-4)
    around = 4 / 3 * half * turn + move * np.cos(angle)
    assert around == pytest.approx(gravity * np.sin(angle), rel=1e-3)
    assert reward == 1 and not fell
    fallen = environment.step(jnp.float32([0, 0, 0.25, 0]), jnp.int32(0))
    assert fallen[2]


def test_a_pendulum_keeps_its_energy_and_is_rewarded_for_standing():
    environment = pendulum()
    state, energies = jnp.float32([np.cos(2.5), np.sin(2.5), 0.0]), []
    for _ in range(100):
        state, reward, _ = environment.step(state, jnp.int32(1))  # no torque
        # Of a rod of length and mass 1: a third of the squared speed, and its height.
        energies.append(float((8 * state[2]) ** 2 / 6 + 10 * state[0] / 2))
    # The steps are symplectic: the energy swings about its own and does not drift.
    assert np.mean(energies) == pytest.approx(5 * np.cos(2.5), abs=0.2)
    assert reward < -0.3
    assert environment.step(jnp.float32([1, 0, 0]), jnp.int32(1))[1] == 0


def test_advantages_are_discounted_sums_of_surprises():
    generator = np.random.default_rng(0)
    values, rewards = generator.standard_normal((2, 5, 1))
    ends = np.array([0, 0, 1, 0, 0], bool)[:, None]
    seen = Played(*[jnp.zeros((5, 1))] * 3, *map(jnp.float32, (values, rewards)), ends)
    found = advantages(seen, jnp.float32([0.7]))
    later = [*values[1:, 0], 0.7]
    surprise = rewards[:, 0] + DISCOUNT * np.where(ends[:, 0], 0, later) - values[:, 0]
    for i in range(5):
        stop = 3 if i < 3 else 5  # an episode ends with the third step
        expected = sum(
            (DISCOUNT * TRACE) ** (j - i) * surprise[j] for j in range(i, stop)
        )
        assert found[i, 0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("written", "closed"),
    [("()[]", 1), ("([])", 1), ("([)]", 0), ("(()", 0), ("())", 0), (")(", 0)],
)
def test_brackets_are_closed_in_order(written, closed):
    tokens = jnp.int32(["()[]".index(x) for x in written])
    assert is_closed(tokens) == closed


def test_every_beginning_can_be_completed():
    for given in np.asarray(beginnings(jax.random.key(0), 8)):
        answer = [*given, *(given[::-1] + 1)]  # and is, by closing all from the last
        assert is_closed(jnp.int32(answer)) and len(given) == GIVEN


@pytest.mark.more
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("task", list(TASKS))
def test_a_task_is_learned_a_little_and_kept_by_the_lab(task, tmp_path):
    model = "attention" if task == "pendulum" else "mlp"
    run = Run(task=task, model=model, width=16, heads=2, layers=1, statistics=False)
    run = run.but(steps=12, learning_rate=1e-2, candidate="high-pass", warm_up=0.0)
    result = play(run)
    assert [step for step, *_ in result["curve"]][-1] == 12
    assert np.isfinite(result["curve"]).all() and len(result["curve"]) == 10
    (tmp_path / "known.jsonl").write_text(json.dumps({"run": run.key} | result))
    assert Lab(tmp_path, trains=False).results([run])[0]["curve"] == result["curve"]


@pytest.mark.more
@pytest.mark.usefixtures("fast_compilation")
def test_a_pole_is_balanced_longer_after_some_updates():
    run = Run(task="cart-pole", model="mlp", width=32, schedule="linear")
    curve = play(run.but(steps=40, optimizer="adamw", learning_rate=4e-3))["curve"]
    assert curve[-1][2] < 1.5 * curve[0][2] < 0
