"""rollfast.muon, whose interface is optax's."""

# pyright: reportMissingImports=false

import optax
import rollfast

from .optax_like import axes_of, OfOptax


class Optimizer(OfOptax):
    package = "rollfast"

    def __init__(self, params, leaves, decay):
        numbers = axes_of(leaves, rollfast.MuonDimensionNumbers(0, 1))

        def make(rate) -> optax.GradientTransformation:
            return rollfast.muon(
                rate,
                weight_decay=decay,
                adam_weight_decay=decay,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=numbers,
            )

        super().__init__(params, make)
