"""torch.optim.Muon, with torch.optim.AdamW for the rest."""

# pyright: reportMissingImports=false

import torch

from .torch_like import OfTorch


class Optimizer(OfTorch):
    package = "torch"

    def __init__(self, params, leaves, decay):
        super().__init__(params, leaves)
        matrices, others = self.of_kind(True), self.of_kind(False)
        adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=decay)
        muon = torch.optim.Muon(
            matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        self._optimizers = (muon, adamw)
