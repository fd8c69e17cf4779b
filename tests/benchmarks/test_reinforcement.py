"""Episodes, advantages and brackets of the reinforcement learning in small."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence.reinforcement import (
    advantages,
    beginnings,
    DISCOUNT,
    GIVEN,
    is_closed,
    play,
    Played,
    ppo,
    TRACE,
)
from evidence.run import Run


class Guessing:
    """An environment as gymnax has them: two letters are seen in turn, and a reward of
    1 is for the action of the same number; after eight steps it begins anew."""

    num_actions = 2

    def reset(self, key, constants):
        letter = jax.random.bernoulli(key).astype(jnp.int32)
        return self.seen(letter), (letter, jnp.int32(0))

    def step(self, key, state, action, constants):
        letter, age = state
        reward = jnp.where(action == letter, constants["reward"], 0.0)
        ended = age == 7
        seen, again = self.reset(key, constants)
        after = jax.random.bernoulli(jax.random.fold_in(key, 1)).astype(jnp.int32)
        state = jax.tree.map(
            lambda x, y: jnp.where(ended, x, y), again, (after, age + 1)
        )
        seen = jnp.where(ended, seen, self.seen(after))
        return seen, state, reward, ended, jnp.bool_(False), {}

    def seen(self, letter):
        return jax.nn.one_hot(letter, 2)


@pytest.fixture
def guessing(monkeypatch):
    """The environment in gymnax's place, whose releases want an older JAX."""
    gymnax = types.SimpleNamespace(make=lambda name: (Guessing(), {"reward": 1.0}))
    monkeypatch.setitem(sys.modules, "gymnax", gymnax)
    ppo.cache_clear()
    yield
    ppo.cache_clear()


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
@pytest.mark.usefixtures("fast_compilation", "guessing")
@pytest.mark.parametrize("model", ["mlp", "attention"])
def test_returns_are_those_of_whole_episodes_and_rise(model):
    """Half of eight are guessed at first; with what is seen all eight can be right."""
    run = Run(task="CartPole-v1", model=model, width=32, heads=2, schedule="linear")
    run = run.but(statistics=False, warm_up=0.0, weight_decay=0.0)
    curve = play(run.but(steps=30, optimizer="adamw", learning_rate=4e-3))["curve"]
    returns = [-loss for *_, loss in curve]
    # The first three updates are 3,072 steps: 384 episodes, of a spread of sqrt(2).
    assert returns[0] > 4 - 5 * (2 / 384) ** 0.5 and returns[-1] > 7.5
    assert max(returns) <= 8
