"""Libraries that have Muon: a module each, with the class `Optimizer` of a protocol.

To add one, write `libraries/NAME.py` with a class as below, and run

    python benchmarks/libraries.py NAME

in an environment that has it alongside this package. Nothing else has to change.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np


Arrays = Mapping[str, np.ndarray]  # by path; kernels are (inputs, outputs)


class Leaf(NamedTuple):
    """What a library may want to know of a parameter."""

    is_matrix: bool  # for Muon; the others are for AdamW
    head_dim: int | None = None  # of a query, key or value


class Optimizer(Protocol):
    """Muon as the library's manual calls it, AdamW for the rest.

    One learning rate for both, with the update scaled to AdamW's root mean square where
    the library can do that; `decay` times the rate; AdamW's betas are 0.9 and 0.95. The
    rest is the library's default.
    """

    package: str  # on PyPI

    def __init__(self, params: Arrays, leaves: Mapping[str, Leaf], decay: float): ...

    def step(self, gradients: Arrays, rate: float) -> Arrays:
        """The params after one step; ready, not in flight."""
        ...

    def state_bytes(self) -> int:
        """What is kept from step to step, without the params."""
        ...


Start = Callable[[Arrays, Mapping[str, Leaf], float], Optimizer]
