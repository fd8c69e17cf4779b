"""How far a head comes down: its threshold, its gamma, and the powers of gamma."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._model.bound_layer import BoundLayer
from .._model.shares import Share
from .._options import check_first, check_number, POSITIVE, SHARE
from .._parameters.paths import show_module


class ClipRule(NamedTuple):
    """The numbers that the user gives a clip; no other place knows them.

    An argument is a field, checked in `checked`; `threshold_of` and `powers` use it.
    """

    threshold: Any
    alpha: Any
    step: Any = None  # updates so far, at which schedules are evaluated

    @classmethod
    def checked(cls, threshold: Any, alpha: Any) -> ClipRule:
        """Returns the rule; `ValueError` for what is no threshold or no share."""
        return cls(
            _check_threshold("threshold", threshold),
            check_number("alpha", alpha, SHARE, "a schedule"),
        )

    @property
    def only_watches(self) -> bool:
        """Whether nothing is to be clipped; schedules and traced numbers may be any."""
        is_known = not (callable(self.threshold) or isinstance(self.threshold, Tracer))
        return is_known and bool(np.isinf(np.asarray(self.threshold)).all())

    def at(self, step: Any) -> ClipRule:
        return self._replace(step=step)

    def check_start(self, thresholds: jax.Array) -> None:
        """Raises where a schedule begins out of range."""
        check_first("threshold", thresholds, POSITIVE)
        check_first("alpha", self._now(self.alpha), SHARE)

    def threshold_of(self, layer: BoundLayer) -> jax.Array:
        """Returns the threshold of each head of a layer, in the layer's shape.

        A stack may have one number for each of its layers.
        """
        name, threshold = f"layer '{show_module(layer.path)}'", self.threshold
        if layer.threshold is not None:
            threshold = _check_threshold(f"threshold of {name}", layer.threshold)
        threshold = self._now(threshold)
        if not isinstance(threshold, jax.Array):
            # Infinity only watches; `jax_debug_infs` needs a finite number.
            threshold = np.minimum(threshold, np.finfo(np.float32).max)
        threshold = jnp.asarray(threshold, jnp.float32)
        stack = layer.shape[:-1]
        if threshold.shape not in ((), stack):
            raise ValueError(
                f"threshold of shape {threshold.shape} does not fit the {name}: "
                "expected one number"
                + (f", or one for each of its layers, {stack}" if stack else "")
            )
        return jnp.broadcast_to(threshold[..., None], layer.shape)

    def gamma(self, logits: jax.Array, thresholds: jax.Array) -> jax.Array:
        """Returns `tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere.

        A threshold of 0 or below, as of a schedule, clips nothing: no scale reaches it.
        """
        # An infinite S would make gamma 0 and the head dead for good; a NaN would
        # spread to all its weights. Both come from an overflow in the forward pass, not
        # from the size of the weights, so such heads are counted and not scaled.
        over = jnp.isfinite(logits) & (logits > thresholds) & (thresholds > 0)
        # Not tau / max(S, tau): on a device that multiplies by a reciprocal, tau / tau
        # may differ from 1, and only an exact 1 keeps the bits of a head under tau.
        return jnp.where(over, thresholds / jnp.where(over, logits, 1), 1)

    def powers(self, gamma: jax.Array) -> dict[Share, jax.Array]:
        """Returns gamma to the power of each share."""
        # A logit is bilinear in the weights of query and key, biases included. The
        # factors of query and key multiply to gamma, since their powers add up to 1 for
        # any alpha. S becomes gamma * S = tau.
        # A schedule outside [0, 1] would undo the clip, and NaN would destroy weights.
        alpha = self._now(self.alpha)
        alpha = jnp.where(alpha > 0, jnp.minimum(alpha, 1), 0)
        return {
            "alpha": gamma**alpha,
            "rest": gamma ** (1 - alpha),
            "half": jnp.sqrt(gamma),
            "whole": gamma,
        }

    def _now(self, value: Any) -> Any:
        """Returns a value, of a schedule the one at this step."""
        if callable(value) and self.step is None:
            raise ValueError(
                "clip_qk does not count steps, so it takes no schedule: pass the value "
                "of this step"
            )
        return value(self.step) if callable(value) else value


def _check_threshold(name: str, threshold: Any) -> Any:
    return check_number(name, threshold, POSITIVE, "an array", "a schedule")
