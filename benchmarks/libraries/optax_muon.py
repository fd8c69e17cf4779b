"""optax.contrib.muon"""

import optax
from optax.contrib import muon, MuonDimensionNumbers

from .optax_like import axes_of, OfOptax


class Optimizer(OfOptax):
    package = "optax"

    def __init__(self, params, leaves, decay):
        numbers = axes_of(leaves, MuonDimensionNumbers(0, 1))

        def make(rate) -> optax.GradientTransformation:
            return muon(
                rate,
                weight_decay=decay,
                adam_weight_decay=decay,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=numbers,
            )

        super().__init__(params, make)
