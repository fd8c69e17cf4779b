"""The goal: AdamW, by optax."""

import optax

from .optax_like import OfOptax


class Optimizer(OfOptax):
    package = "optax"

    def __init__(self, params, leaves, decay):
        del leaves
        super().__init__(
            params, lambda rate: optax.adamw(rate, 0.9, 0.95, weight_decay=decay)
        )
