"""Tasks of LightBench as pure functions, and the rules by which they are passed.

A new task is one entry of `TASKS`. What a task draws (data, noise) follows from a key,
one for every step, so that all attempts see the same draws, as they do in LightBench.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from lightbench_recurrent import LSTM, Pairs, Parity, RNN


Array = jax.Array
Params = dict[str, Any]
DIFFICULTIES = ("trivial", "easy", "medium", "hard", "extreme", "nightmare")


@dataclass(frozen=True)
class Step:
    """A step of an attempt, from 1 on: its key, and that of the step before."""

    number: Array
    key: Array
    previous_key: Array


# Tasks are compared by identity, not by content: jit keys on them.
@dataclass(frozen=True, eq=False)
class Task:
    """A function of parameters, at several difficulties, and when it counts as passed.

    - `init(key, difficulty)` and `loss(params, step, difficulty)` get the number (a
        size, a scale) that `difficulties` names.
    - `passed(params, least_loss)` is asked every `group` steps, with the least loss of
        the steps since, so that a rule on the loss holds for every step.
    - `attempts` is how many hyperparameters are tried, each for `steps` at first; few
        where steps are long. `at_once` says that they run as one batch.
    """

    init: Callable[[Array, Any], Params]
    loss: Callable[[Params, Step, Any], Array]
    passed: Callable[[Params, Array], Array]
    difficulties: Mapping[str, Any]
    group: int = 256
    attempts: int = 256
    steps: int = 4096
    at_once: bool = True


# When a task is passed


def loss_at_most(bound: float) -> Callable[[Params, Array], Array]:
    return lambda params, least_loss: least_loss <= bound


def error_below(
    bound: float, error: Callable[[Array], Array] = lambda x: x
) -> Callable[[Params, Array], Array]:
    """The root mean square of what the one parameter lacks, at the end of a group."""
    return lambda params, least_loss: _rms(error(params["x"])) < bound


def all_near(target: float, distance: float) -> Callable[[Params, Array], Array]:
    return lambda params, least_loss: jnp.all(jnp.abs(params["x"] - target) < distance)


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


# Where an attempt starts


def point(*coordinates: float) -> Callable[[Array, Any], Params]:
    return lambda key, difficulty: {"x": jnp.array(coordinates, jnp.float32)}


def normal(size: int | None = None) -> Callable[[Array, Any], Params]:
    """One vector, of the given size or of that which the difficulty says."""
    return lambda key, n: {"x": jax.random.normal(key, (size or n,))}


def three_layers(key: Array, scales: tuple[float, float, float]) -> Params:
    keys = jax.random.split(key, 3)
    return {
        f"layer{i}": scale * jax.random.normal(k, (1024,))
        for i, (k, scale) in enumerate(zip(keys, scales, strict=True), 1)
    }


def log_scales(size: int, decades: float) -> Array:
    return jnp.logspace(-decades, decades, size)


# What is minimized


def beale(params: Params, step: Step, difficulty: None) -> Array:
    x, y = params["x"] + jnp.array([3.0, 0.5])
    targets = jnp.array([1.5, 2.25, 2.625])
    return jnp.sum(jnp.square(targets - x + x * y ** jnp.arange(1, 4)))


def rosenbrock(params: Params, step: Step, difficulty: None) -> Array:
    x, y = params["x"]
    return (1 - x) ** 2 + (y - x**2) ** 2


def rastrigin(params: Params, step: Step, difficulty: None) -> Array:
    x = params["x"]
    return jnp.mean(x**2 + 10 * (1 - jnp.cos(2 * jnp.pi * x)))


def saddle(params: Params, step: Step, power: int) -> Array:
    return jnp.sum(params["x"] ** (2 * power + 1)) + 10


def plateau(params: Params, step: Step, scale: float) -> Array:
    height = 1 / (1 + jnp.exp(-scale * (jnp.sum(params["x"] ** 2) - 1)))
    return height - 1 / (1 + math.exp(scale))


def kink(params: Params, step: Step, difficulty: None) -> Array:
    x = params["x"]
    return jnp.mean(jnp.where(x < 0, x**2, 2 * x))


def penalty(params: Params, step: Step, weight: float) -> Array:
    x = params["x"]
    return jnp.mean((x - 2) ** 2 + weight * jax.nn.relu(x - 1))


def varying_scale(params: Params, step: Step, size: int) -> Array:
    scales = jnp.arange(1, size + 1, dtype=jnp.float32)
    return params["x"] ** 2 @ (scales / scales.sum())


def varying_target(params: Params, step: Step, size: int) -> Array:
    return jnp.mean(jnp.square(from_ramp(params["x"])))


def from_ramp(x: Array) -> Array:
    ramp = jnp.arange(x.size, dtype=x.dtype)
    return x - ramp / jnp.linalg.norm(ramp)


def logarithm(params: Params, step: Step, decades: int) -> Array:
    return jnp.mean(jnp.log1p(params["x"] ** 2))


def weighted_layers(params: Params, step: Step, scale: float) -> Array:
    weights = (scale, 1.0, 1 / scale)
    squares = [jnp.mean(jnp.square(params[f"layer{i}"])) for i in (1, 2, 3)]
    return sum(w * s for w, s in zip(weights, squares, strict=True)) / jnp.float32(3)


def equal_layers(params: Params, step: Step, scale: float) -> Array:
    return weighted_layers(params, step, 1.0)


def oscillating(params: Params, step: Step, weight: float) -> Array:
    x, phase = params["x"], 0.1 * step.number
    return jnp.mean(x**2 + weight * jnp.sin(10 * x) * jnp.cos(phase))


def adversarial(params: Params, step: Step, period: float) -> Array:
    direction = jnp.sin(step.number * jnp.pi * 1.1 / period)
    return jnp.mean(params["x"] ** 2) + direction * jnp.mean(params["x"])


def moving_target(params: Params, step: Step, period: float) -> Array:
    x = params["x"]
    phase = jnp.linspace(0, 2 * jnp.pi, x.size) + step.number * 1.1 / period
    return jnp.mean(jnp.square(x - jnp.sin(phase)))


def noise_of_any_batch(params: Params, step: Step, largest_batch: int) -> Array:
    x = params["x"]
    key, scale_key = jax.random.split(step.key)
    noise = jax.random.normal(key, x.shape)
    # The batch is between 1 and the root of the largest, evenly in the logarithm.
    batch = largest_batch ** (jax.random.uniform(scale_key) / 2)
    norms = jnp.linalg.norm(x) / (jnp.linalg.norm(noise) + 1e-6)
    return jnp.mean(jnp.square(x + noise * jax.lax.stop_gradient(norms) / batch**0.5))


def fading_noise(params: Params, step: Step, offset: float) -> Array:
    x = params["x"]
    noise = jax.random.normal(step.key, x.shape) / (offset + step.number)
    return jnp.mean(jnp.square(x + noise))


def sparse(params: Params, step: Step, share: float) -> Array:
    x = params["x"]
    seen = jax.random.uniform(step.key, x.shape) < share
    seen_before = jax.random.uniform(step.previous_key, x.shape) < share
    seen |= seen_before & (step.number > 1)
    return jnp.mean(jnp.square(x * seen))


def minimax(params: Params, step: Step, size: int) -> Array:
    a, b = jnp.split(params["x"], 2)
    value = a @ b + (a @ a + b @ b) / 2
    targets = jnp.cumsum(jax.random.normal(step.key, (16, size)), axis=1)
    return jnp.mean(jnp.square(value - targets))


def cumulative_sum(params: Params, step: Step, size: int) -> Array:
    inputs = jax.random.normal(step.key, (16, size))
    return jnp.mean(jnp.square(inputs @ params["x"] - jnp.cumsum(inputs, axis=1)))


def recurrent(network: Pairs | Parity, bound: float, *lengths: int) -> "Task":
    """The lengths of the first difficulties; LightBench goes on to 14 and 96.

    Few attempts, one by one: steps are long, and batched products slow on a CPU.
    """

    def loss(params: Params, step: Step, length: int) -> Array:
        return network.loss(params, *network.draw(step.key, length))

    return Task(
        network.init,
        loss,
        loss_at_most(bound),
        _levels(*lengths),
        attempts=16,
        steps=256,
        at_once=False,
    )


def _levels(*values: Any) -> dict[str, Any]:
    return dict(zip(DIFFICULTIES, values, strict=False))


ONE = _levels(None)
SIZES = _levels(4, 16, 512, 2**13, 2**15, 2**17)
# LightBench's `parameter_scale` gives three difficulties a scale, the rest the default.
SCALES = _levels(1e3, 1e1, 1e3, 1e5, 1e3, 1e3)
LARGE: dict[str, Any] = dict(attempts=16)
NORMAL = normal()

TASKS = {
    "beale": Task(point(-7, -4), beale, loss_at_most(1e-8), ONE),
    "rosenbrock": Task(point(-7, -4), rosenbrock, loss_at_most(1e-9), ONE),
    "rastrigin": Task(point(-2.2, -2.2), rastrigin, loss_at_most(1e-2), ONE),
    "saddle_point": Task(
        point(1.2, 1.9), saddle, loss_at_most(0.1), _levels(1, 2, 4, 8, 16, 32)
    ),
    "plateau_navigation": Task(
        point(1.5, 1.5), plateau, loss_at_most(1e-4), _levels(1, 4, 8, 12, 16, 20)
    ),
    "discontinuous_gradient": Task(normal(1024), kink, error_below(1e-4), ONE),
    "constrained_optimization": Task(
        point(*[0.0] * 16),
        penalty,
        all_near(1, 1e-3),
        _levels(1e1, 1e2, 1e4, 1e6, 1e8, 1e10),
        group=32,
    ),
    "quadratic_varying_scale": Task(
        NORMAL, varying_scale, error_below(1e-7), SIZES, **LARGE
    ),
    "quadratic_varying_target": Task(
        NORMAL, varying_target, error_below(1e-8, from_ramp), SIZES, **LARGE
    ),
    "scale_invariant": Task(
        lambda key, decades: {
            "x": log_scales(512, decades) * jax.random.normal(key, (512,))
        },
        logarithm,
        loss_at_most(1e-3),
        _levels(1, 2, 3, 4, 5, 6),
    ),
    "layer_wise_scale": Task(
        lambda key, scale: three_layers(key, (1, 1, 1)),
        weighted_layers,
        loss_at_most(1e-4),
        # LightBench says `size` at "hard", where the default scale stays.
        _levels(2, 1e1, 1e3, 1e3, 1e7, 1e9),
    ),
    "parameter_scale": Task(
        lambda key, scale: three_layers(key, (scale, 1, 1 / scale)),
        equal_layers,
        loss_at_most(1e-4),
        SCALES,
    ),
    "momentum_utilization": Task(
        normal(1024),
        oscillating,
        loss_at_most(1e-6),
        _levels(0.004, 0.02, 0.1, 0.5, 1, 2),
    ),
    "adversarial_gradient": Task(
        normal(1024), adversarial, error_below(1e-3), _levels(1000, 100, 10, 7, 4, 2)
    ),
    "dynamic_landscape": Task(
        normal(2**14),
        moving_target,
        loss_at_most(1e-2),
        _levels(1000, 100, 20, 10, 6, 4),
        **LARGE,
    ),
    "batch_size_scaling": Task(
        normal(1024),
        noise_of_any_batch,
        error_below(1e-8),
        _levels(2**16, 2**13, 2**10, 2**7, 2**4, 2),
    ),
    "gradient_noise_scale": Task(
        normal(4096), fading_noise, error_below(1e-3), _levels(32, 16, 8, 4, 2, 1)
    ),
    "sparse_gradient": Task(
        normal(2**16),
        sparse,
        loss_at_most(1e-4),
        _levels(0.5, 2**-3, 2**-6, 2**-8, 2**-11, 2**-14),
        **LARGE,
    ),
    "minimax": Task(
        lambda key, size: {"x": jax.random.normal(key, (2 * size,))},
        minimax,
        error_below(1e-3),
        SIZES,
    ),
    "wide_linear": Task(
        lambda key, size: {"x": jax.random.normal(key, (size, size))},
        cumulative_sum,
        # The sum, where the difference is small: LightBench asks for that.
        error_below(1e-3, lambda x: x + jnp.triu(jnp.ones_like(x))),
        _levels(4, 32, 512, 2**11, 2**13, 2**14),
    ),
    "xor_sequence": recurrent(Pairs(LSTM), 1e-2, 2, 4, 6),
    "xor_sequence_rnn": recurrent(Pairs(RNN), 1e-2, 2, 4, 6),
    "xor_digit": recurrent(Parity(LSTM), 1e-3, 4, 8),
    "xor_digit_rnn": recurrent(Parity(RNN), 1e-3, 4, 8),
    "xor_spot": recurrent(Parity(LSTM, marks=True), 1e-2, 4, 8),
    "xor_spot_rnn": recurrent(Parity(RNN, marks=True), 1e-2, 4, 8),
}
