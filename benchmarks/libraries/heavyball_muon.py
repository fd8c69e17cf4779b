"""heavyball.Muon, with heavyball.AdamW for the rest; it has no scale of AdamW's."""

# pyright: reportMissingImports=false

import heavyball

from .torch_like import OfTorch


# Compiling takes longer than the whole training on a CPU.
heavyball.utils.compile_mode = None


class Optimizer(OfTorch):
    package = "heavyball"

    def __init__(self, params, leaves, decay):
        super().__init__(params, leaves)
        matrices, others = self.of_kind(True), self.of_kind(False)
        adamw = heavyball.AdamW(others, betas=(0.9, 0.95), weight_decay=decay)
        muon = heavyball.Muon(matrices, betas=(0.95, 0.95), weight_decay=decay)
        self._optimizers = (muon, adamw)
