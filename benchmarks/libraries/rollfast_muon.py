"""rollfast.muon, whose interface is optax's."""

# pyright: reportMissingImports=false

import rollfast

from .optax_like import OfOptaxMuon


class Optimizer(OfOptaxMuon):
    package = "rollfast"

    def __init__(self, params, leaves, decay):
        super().__init__(params, leaves, decay, rollfast)
