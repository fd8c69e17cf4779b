"""Leaves of several matrices side by side, and their matrices cut by hand."""

import math
from typing import NamedTuple

import numpy as np

import muonclip_jax as mc


class Case(NamedTuple):
    """A leaf, how it is cut as users write it, and the columns of each matrix."""

    shape: tuple[int, ...]
    axes: mc.MatrixAxes
    columns: list[list[int]]  # of the outputs, in the order of `output_axis`


def heads(start: int, stop: int, size: int) -> list[list[int]]:
    return [list(range(i, i + size)) for i in range(start, stop, size)]


def every(parts, groups: int) -> list[list[int]]:
    """The same part of all groups as one matrix."""
    starts, total = np.cumsum([0, *parts[:-1]]), sum(parts)
    return [
        [g * total + start + i for g in range(groups) for i in range(size)]
        for start, size in zip(starts, parts, strict=True)
    ]


A = mc.MatrixAxes
CASES = {
    "flat heads": Case((16, 48), A(0, 1, head_dim=6), heads(0, 48, 6)),
    "outputs first": Case((48, 16), A(1, 0, head_dim=6), heads(0, 48, 6)),
    "fused, value whole": Case(
        (16, 48),
        A(0, 1, parts=(16, 16, 16), head_dim=(4, 4, None)),
        [*heads(0, 32, 4), [*range(32, 48)]],
    ),
    "grouped queries": Case(
        (16, 64),
        A(0, 1, parts=(32, 16, 16), head_dim=(8, 8, None)),
        [*heads(0, 48, 8), [*range(48, 64)]],
    ),
    "fused, an axis each": Case(
        (16, 3, 4, 4),
        A(0, (1, 2, 3), parts=(16, 16, 16), head_dim=(4, None, None)),
        [*heads(0, 16, 4), [*range(16, 32)], [*range(32, 48)]],
    ),
    "heads of query, key and value": Case(
        (16, 48), A(0, 1, parts=(4, 4, 4), head_dim=4, groups=4), heads(0, 48, 4)
    ),
    "interleaved, whole": Case(
        (16, 48), A(0, 1, parts=(4, 4, 4), groups=4), every((4, 4, 4), 4)
    ),
    "interleaved, query in heads": Case(
        (16, 48),
        A(0, 1, parts=(4, 4, 4), head_dim=(4, None, None), groups=4),
        [heads(i, i + 4, 4)[0] for i in range(0, 48, 12)] + every((4, 4, 4), 4)[1:],
    ),
    "gate and up of layers": Case(
        (3, 8, 40), A(1, 2, parts=(20, 20)), heads(0, 40, 20)
    ),
    "six of a modulation": Case((16, 48), A(0, 1, parts=(8,) * 6), heads(0, 48, 8)),
    "groups of other sizes": Case(
        (16, 96),
        A(0, 1, parts=(4, 4, 8, 8) * 4),
        [
            [*range(g + a, g + b)]
            for g in range(0, 96, 24)
            for a, b in ((0, 4), (4, 8), (8, 16), (16, 24))
        ],
    ),
    "latent": Case(
        (16, 4, 7),
        A(0, (1, 2), parts=(4, 3) * 4),
        [[*range(g + a, g + b)] for g in range(0, 28, 7) for a, b in ((0, 4), (4, 7))],
    ),
    "heads of two sizes": Case(
        (16, 24),
        A(0, 1, parts=(9, 15), head_dim=(3, 5)),
        [*heads(0, 9, 3), *heads(9, 24, 5)],
    ),
}


def leaf_of(case: Case, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).normal(size=case.shape)
    return draw.astype(np.float32)


def by_hand(case: Case, leaf, function) -> np.ndarray:
    """What `function` makes of each matrix of a leaf, in float64, put in its place."""
    rank = len(case.shape)
    inputs, outputs = (
        [axis % rank for axis in np.atleast_1d(axes)]
        for axes in (case.axes.reduction_axis, case.axes.output_axis)
    )
    batch = [i for i in range(rank) if i not in inputs + outputs]
    order = batch + inputs + outputs
    moved = np.asarray(leaf, np.float64).transpose(order)
    sides = [math.prod(case.shape[i] for i in axes) for axes in (inputs, outputs)]
    matrices = moved.reshape(-1, *sides)
    assert sorted(i for each in case.columns for i in each) == list(range(sides[1]))
    results = np.empty_like(matrices)
    for matrix, result in zip(matrices, results, strict=True):
        for columns in case.columns:
            result[:, columns] = function(matrix[:, columns])
    return results.reshape(moved.shape).transpose(np.argsort(order))
