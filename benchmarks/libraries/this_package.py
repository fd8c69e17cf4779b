"""This package: `mc.muon` with its defaults."""

import muonclip_jax as mc

from .optax_like import OfOptax


class Optimizer(OfOptax):
    package = "muonclip_jax"

    def __init__(self, params, leaves, decay):
        numbers = {
            path: mc.MatrixAxes(0, 1, head_dim=leaf.head_dim)
            if leaf.is_matrix
            else None
            for path, leaf in leaves.items()
        }
        super().__init__(
            params,
            lambda rate: mc.muon(rate, weight_decay=decay, dimension_numbers=numbers),
        )
