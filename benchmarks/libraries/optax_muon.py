"""optax.contrib.muon"""

import optax.contrib

from .optax_like import OfOptaxMuon


class Optimizer(OfOptaxMuon):
    package = "optax"

    def __init__(self, params, leaves, decay):
        super().__init__(params, leaves, decay, optax.contrib)
