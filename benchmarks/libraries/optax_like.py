"""What the libraries whose Muon is an `optax.GradientTransformation` share."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from . import Arrays, Leaf


class OfOptax:
    """A transformation that is made for each step, inside `jit`, with its rate."""

    def __init__(
        self,
        params: Arrays,
        make: Callable[[Any], optax.GradientTransformation],
    ):
        self._params: Any = dict(params)
        self._state = jax.jit(make(0.0).init)(self._params)

        def step(params: Any, state: Any, gradients: Any, rate: jax.Array):
            updates, state = make(rate).update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=1)

    def step(self, gradients: Arrays, rate: float) -> Arrays:
        after = self._step(self._params, self._state, dict(gradients), rate)
        self._params, self._state = jax.block_until_ready(after)
        return self._params

    def state_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self._state))


class OfOptaxMuon(OfOptax):
    """The `muon` of a module that has `optax.contrib`'s, with the same arguments."""

    def __init__(
        self,
        params: Arrays,
        leaves: Mapping[str, Leaf],
        decay: float,
        module: Any,
        change: Callable[..., Any] = lambda tx: tx,
    ):
        matrix = module.MuonDimensionNumbers(0, 1)
        numbers = {
            path: matrix if leaf.is_matrix else None for path, leaf in leaves.items()
        }

        def make(rate: Any) -> optax.GradientTransformation:
            tx = module.muon(
                rate,
                weight_decay=decay,
                adam_weight_decay=decay,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=numbers,
            )
            return change(tx)

        super().__init__(params, make)
