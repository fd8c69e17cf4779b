"""What the libraries of torch optimizers share."""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from . import Arrays, Leaf


class OfTorch:
    """Two optimizers: one of the matrices, which torch has as (outputs, inputs)."""

    def __init__(self, params: Arrays, leaves: Mapping[str, Leaf]):
        self._leaves = leaves
        self._tensors = {
            path: torch.nn.Parameter(self._tensor(path, x))
            for path, x in params.items()
        }
        self._optimizers: Sequence[torch.optim.Optimizer] = ()

    def of_kind(self, is_matrix: bool) -> list[torch.nn.Parameter]:
        return [
            self._tensors[path]
            for path, leaf in self._leaves.items()
            if leaf.is_matrix == is_matrix
        ]

    def step(self, gradients: Arrays, rate: float) -> Arrays:
        for path, tensor in self._tensors.items():
            tensor.grad = self._tensor(path, gradients[path])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return {
            path: (x.T if self._leaves[path].is_matrix else x).detach().numpy()
            for path, x in self._tensors.items()
        }

    def state_bytes(self) -> int:
        return sum(
            x.numel() * x.element_size()
            for optimizer in self._optimizers
            for of_param in optimizer.state.values()
            for x in _tensors(of_param)
        )

    def _tensor(self, path: str, x: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(x))
        return tensor.T.contiguous() if self._leaves[path].is_matrix else tensor


def _tensors(state) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, Mapping):
        state = list(state.values())
    found = state if isinstance(state, list | tuple) else []
    return [tensor for one in found for tensor in _tensors(one)]
