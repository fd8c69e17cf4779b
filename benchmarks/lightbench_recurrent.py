"""LightBench's recurrent networks: the exclusive or of bits along a sequence.

Cells, initial weights and the layer norm are PyTorch's, but that kernels are (in, out).
Losses are pure functions of parameters, a key and a length; a batch has 256 sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


Array = jax.Array
Params = dict[str, Any]
BATCH = 256


@dataclass(frozen=True)
class Cell:
    """What a layer keeps from step to step, and how many gates a step has."""

    gates: int
    step: Callable[[Any, Array], tuple[Any, Array]]
    states: int

    def init(self, key: Array, size: int) -> Params:
        bound, keys = size**-0.5, jax.random.split(key, 4)
        wide = self.gates * size
        shapes = {
            "input": (size, wide),
            "recurrent": (size, wide),
            "input_bias": (wide,),
            "recurrent_bias": (wide,),
        }
        return {
            name: jax.random.uniform(k, shape, minval=-bound, maxval=bound)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def run(self, params: Params, inputs: Array, state: Any = None) -> Any:
        """The last state and all outputs, of inputs (length, batch, size)."""
        if state is None:
            state = (jnp.zeros(inputs.shape[1:]),) * self.states

        def step(state, x):
            gates = x @ params["input"] + params["input_bias"]
            gates += state[0] @ params["recurrent"] + params["recurrent_bias"]
            return self.step(state, gates)

        return jax.lax.scan(step, state, inputs)


def _lstm(state: Any, gates: Array) -> tuple[Any, Array]:
    enter, stay, new, leave = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(stay) * state[1] + jax.nn.sigmoid(enter) * jnp.tanh(new)
    output = jax.nn.sigmoid(leave) * jnp.tanh(memory)
    return (output, memory), output


def _rnn(state: Any, gates: Array) -> tuple[Any, Array]:
    output = jnp.tanh(gates)
    return (output,), output


LSTM, RNN = Cell(4, _lstm, 2), Cell(1, _rnn, 1)


def read(params: Params, outputs: Array) -> Array:
    """A logit for every output: a layer norm, then a linear layer."""
    centered = outputs - outputs.mean(-1, keepdims=True)
    variance = jnp.mean(centered**2, -1, keepdims=True)
    normal = centered * jax.lax.rsqrt(variance + 1e-5)
    normal = normal * params["norm"]["scale"] + params["norm"]["bias"]
    return (normal @ params["head"]["kernel"] + params["head"]["bias"])[..., 0]


def entropy(logits: Array, targets: Array) -> Array:
    return jnp.mean(jax.nn.softplus(logits) - logits * targets)


def _init_reader(key: Array, size: int) -> Params:
    bound, keys = size**-0.5, jax.random.split(key)
    uniform = dict(minval=-bound, maxval=bound)
    return {
        "norm": {"scale": jnp.ones(size), "bias": jnp.zeros(size)},
        "head": {
            "kernel": jax.random.uniform(keys[0], (size, 1), **uniform),
            "bias": jax.random.uniform(keys[1], (1,), **uniform),
        },
    }


class Parity:
    """Whether the number of ones is odd, read off the last output.

    With marks, of the bits that are marked. In LightBench each sequence marks two
    places of all sequences, so that nearly every bit counts.
    """

    size = 64

    def __init__(self, cell: Cell, marks: bool = False):
        self._cell, self._marks = cell, marks

    def init(self, key: Array, length: int) -> Params:
        keys = jax.random.split(key, 3)
        symbols = 4 if self._marks else 2
        return {
            "embedding": jax.random.normal(keys[0], (symbols, self.size)),
            "encoder": self._cell.init(keys[1], self.size),
            **_init_reader(keys[2], self.size),
        }

    def draw(self, key: Array, length: int) -> tuple[Array, Array]:
        """Bits (length, batch), and for each place whether it is marked."""
        bits_key, marks_key = jax.random.split(key)
        bits = jax.random.bernoulli(bits_key, shape=(length, BATCH)).astype(int)
        if not self._marks:
            return bits, jnp.ones(length, int)
        places = jax.random.randint(marks_key, (2 * BATCH,), 0, length)
        return bits, jnp.zeros(length, int).at[places].set(1)

    def loss(self, params: Params, bits: Array, marks: Array) -> Array:
        inputs = params["embedding"][bits]
        if self._marks:
            inputs += params["embedding"][marks + 2][:, None]
        _, outputs = self._cell.run(params["encoder"], inputs)
        targets = jnp.sum(bits * marks[:, None], axis=0) % 2
        return entropy(read(params, outputs[-1]), targets)


class Pairs:
    """The exclusive or of two sequences, bit for bit: one is read after the other."""

    size = 16

    def __init__(self, cell: Cell):
        self._cell = cell

    def init(self, key: Array, length: int) -> Params:
        keys = jax.random.split(key, 5)
        return {
            "embedding0": jax.random.normal(keys[0], (2, self.size)),
            "embedding1": jax.random.normal(keys[1], (2, self.size)),
            "encoder": self._cell.init(keys[2], self.size),
            "decoder": self._cell.init(keys[3], self.size),
            **_init_reader(keys[4], self.size),
        }

    def draw(self, key: Array, length: int) -> tuple[Array, Array]:
        bits = jax.random.bernoulli(key, shape=(2, length, BATCH)).astype(int)
        return bits[0], bits[1]

    def loss(self, params: Params, first: Array, second: Array) -> Array:
        state, _ = self._cell.run(params["encoder"], params["embedding0"][first])
        inputs = params["embedding1"][second]
        _, outputs = self._cell.run(params["decoder"], inputs, state)
        return entropy(read(params, outputs), first ^ second)
