"""optax.contrib.muon as on optax's main branch."""

import optax.contrib
from optax_main import as_on_main

from .optax_like import OfOptaxMuon


class Optimizer(OfOptaxMuon):
    package = "optax"

    def __init__(self, params, leaves, decay):
        super().__init__(params, leaves, decay, optax.contrib, as_on_main)
