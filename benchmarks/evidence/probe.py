"""What a probe sees of the hidden matrices: their spectra and the sizes of steps."""

import math
from typing import Any

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc

from .optimizers import Hyperparameters, is_numbers


def geometry(before: Any, after: Any, at: Hyperparameters) -> dict[str, Any]:
    """Returns shape, SVD entropy and RMS of the step over its rate, by path.

    Both params are as around one step; weight decay is not part of the RMS.
    """
    numbers = mc.flax_dimension_numbers(before)
    return {
        path: _matrix(old, new, dims, at)
        for path, old, new, dims in _matrices(before, after, numbers)
    }


def svd_entropy(matrix: np.ndarray) -> float:
    """Entropy of the squared singular values, 1 if they are all alike (Moonlight)."""
    squares = np.linalg.svd(np.float64(matrix), compute_uv=False) ** 2
    shares = squares[squares > 0] / squares.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(squares)))


def _matrix(old, new, dims: MuonDimensionNumbers, at: Hyperparameters):
    rate, decay = float(at.learning_rate), float(at.weight_decay)
    step = (np.float64(new) - (1 - rate * decay) * np.float64(old)) / rate
    matrix = _matrix_of(new, dims)
    return {
        "shape": list(matrix.shape),
        "entropy": round(svd_entropy(matrix), 5),
        "update_rms": float(f"{np.sqrt(np.mean(step**2)):.5g}"),
    }


def _matrix_of(x: np.ndarray, dims: MuonDimensionNumbers) -> np.ndarray:
    inputs = np.atleast_1d(dims.reduction_axis) % x.ndim
    outputs = np.atleast_1d(dims.output_axis) % x.ndim
    rows = math.prod(x.shape[i] for i in inputs)
    return np.transpose(x, (*inputs, *outputs)).reshape(rows, -1)


def _matrices(before: Any, after: Any, numbers: Any):
    paths, dims = zip(
        *jax.tree.leaves_with_path(numbers, is_leaf=is_numbers), strict=True
    )
    leaves = (
        map(np.asarray, jax.tree.leaves(before)),
        map(np.asarray, jax.tree.leaves(after)),
    )
    for path, old, new, numbers in zip(paths, *leaves, dims, strict=True):
        if numbers is not None:
            yield (
                jax.tree_util.keystr(path, simple=True, separator="/"),
                old,
                new,
                numbers,
            )
