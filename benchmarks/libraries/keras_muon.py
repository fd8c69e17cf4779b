"""keras.optimizers.Muon on JAX, in its functional form."""

# pyright: reportMissingImports=false

import os


os.environ.setdefault("KERAS_BACKEND", "jax")

from typing import Any

import jax
import keras
import numpy as np

from . import Arrays


class Optimizer:
    package = "keras"

    def __init__(self, params, leaves, decay):
        self._paths = list(params)
        variables = [
            keras.Variable(np.asarray(params[path]), name=path.replace("/", "_"))
            for path in self._paths
        ]
        others = [path.replace("/", "_") for path in params if not leaves[path][0]]
        muon = keras.optimizers.Muon(
            1.0,
            weight_decay=decay,
            adam_weight_decay=decay,
            adam_beta_2=0.95,
            exclude_layers=[f"{name}$" for name in others],
        )
        muon.build(variables)
        self._params: Any = [x.value for x in variables]
        self._state: Any = [x.value for x in muon.variables]
        rates = [i for i, x in enumerate(muon.variables) if "learning_rate" in x.path]
        (self._rate,) = rates

        def step(params: Any, state: Any, gradients: Any):
            return muon.stateless_apply(state, gradients, params)

        self._step = jax.jit(step)

    def step(self, gradients: Arrays, rate: float) -> Arrays:
        self._state[self._rate] = np.float32(rate)
        given = [gradients[path] for path in self._paths]
        params, state = jax.block_until_ready(
            self._step(self._params, self._state, given)
        )
        self._params, self._state = params, list(state)
        return dict(zip(self._paths, params, strict=True))

    def state_bytes(self) -> int:
        return sum(np.asarray(x).nbytes for x in self._state)
