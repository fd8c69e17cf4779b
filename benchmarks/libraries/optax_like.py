"""What the libraries whose Muon is an `optax.GradientTransformation` share."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from . import Arrays


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


def axes_of(leaves: Mapping[str, Any], axes: Any) -> dict[str, Any]:
    """Dimension numbers: `axes` for matrices, `None` for the rest."""
    return {path: axes if leaf.is_matrix else None for path, leaf in leaves.items()}
