"""Candidates of the field: steps that the package does not have, judged by a run.

Each has the arguments of `mc.muon`, of which it changes one thing.
"""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc

from .iterations import as_long, even, exact, high_pass, in_blocks, now_and_then
from .run import Run


Optimizer = Callable[..., optax.GradientTransformationExtraArgs]


def samuon_lite(gain: float, **arguments: Any) -> optax.GradientTransformationExtraArgs:
    """Muon whose step along the momentum's first singular direction is held back."""

    def step(direction: dict[str, Any]) -> optax.GradientTransformation:
        muon = mc.scale_by_muon(**direction)
        return hold_back_first(muon, gain, direction["dimension_numbers"])

    return _with_adamw(step, **arguments)


def hold_back_first(
    muon: optax.GradientTransformationExtraArgs, gain: float, dimension_numbers: Any
) -> optax.GradientTransformationExtraArgs:
    """`gain` times the update, but once along the momentum's first direction.

    SAMuon-lite (arXiv:2608.25990): `g O - (g - 1) (u' O v) u v'`.
    """

    def one(update: jax.Array, momentum: jax.Array) -> jax.Array:
        u, v = first_direction(momentum)
        return gain * update - (gain - 1) * (u @ update @ v) * jnp.outer(u, v)

    def update_fn(updates, state: Any, params=None, **extra_args):
        updates, state = muon.update(updates, state, params, **extra_args)
        numbers = dimension_numbers(params)
        return each_matrix(one, numbers, updates, state.mu), state

    return optax.GradientTransformationExtraArgs(muon.init, update_fn)


def first_direction(momentum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First singular vectors after one power iteration, from the longest row on.

    Every start will do that is not orthogonal to them; this one needs no random key.
    """
    longest = momentum[jnp.argmax(jnp.linalg.norm(momentum, axis=1))]
    u = _unit(momentum @ longest)
    return u, _unit(u @ momentum)


def sinkhorn(**arguments: Any) -> optax.GradientTransformationExtraArgs:
    """Muon with a step for embedding and head whose rows and columns are even.

    Algorithm 1 of DeepSeek V4.1: Nesterov's momentum, balanced, and as large in each
    entry as Adam's step.
    """
    learning_rate = arguments["adam_learning_rate"]
    decay = arguments["weight_decay"]

    def balanced(axis: int) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(arguments["beta"], nesterov=True),
            optax.stateless_with_tree_map(lambda u, _: even_rows(jnp.asarray(u), axis)),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    # Words are along the first axis of an embedding, and along the last of a head.
    steps: dict[Hashable, optax.GradientTransformation] = {
        "rest": mc.muon(**arguments),
        "embedding": balanced(0),
        "head": balanced(-1),
    }

    def labels(params: Any) -> Any:
        label = mc.param_labels(params)
        return jax.tree.map(lambda one: one if one in steps else "rest", label)

    return optax.partition(steps, labels)


BALANCINGS = 11  # an odd number: rows come last
INACTIVE = 1e-3  # of the mean row's length
ADAM_RMS = 0.18  # of an entry


def even_rows(momentum: jax.Array, axis: int) -> jax.Array:
    """Rows along the axis, and columns, made even by turns; short rows stand still."""
    x = jnp.moveaxis(momentum, axis, 0)
    length = jnp.linalg.norm(x, axis=1, keepdims=True)
    x = jnp.where(length > INACTIVE * length.mean(), x, 0)
    for i in range(BALANCINGS):
        x = _unit(x, axis=1 - i % 2)
    return jnp.moveaxis(ADAM_RMS * math.sqrt(x.shape[1]) * x, 0, axis)


def hyperball(**arguments: Any) -> optax.GradientTransformationExtraArgs:
    """Muon on spheres: every matrix keeps its Frobenius norm, and does not decay."""

    def step(direction: dict[str, Any]) -> optax.GradientTransformation:
        rate, numbers = arguments["learning_rate"], direction["dimension_numbers"]
        return optax.chain(mc.scale_by_muon(**direction), on_spheres(rate, numbers))

    return _with_adamw(step, **arguments, has_rate=True)


def on_spheres(
    learning_rate: Any, dimension_numbers: Any
) -> optax.GradientTransformation:
    """A step of `learning_rate` times the matrix's norm, and back to that norm.

    arXiv:2606.16899: `W' = R norm(W - lr R norm(u))`, where `R` is the norm of `W`.
    """

    def one(update: jax.Array, matrix: jax.Array) -> jax.Array:
        radius = jnp.linalg.norm(matrix)
        moved = matrix - learning_rate * radius * _unit(update, axis=None)
        return radius * _unit(moved, axis=None) - matrix

    def update(updates, params):
        return each_matrix(one, dimension_numbers(params), updates, params)

    return optax.stateless(update)


def periodic(
    every: int, between: Callable[[jax.Array], jax.Array], **arguments: Any
) -> optax.GradientTransformationExtraArgs:
    """Muon that orthogonalizes whole matrices in one of so many steps.

    MuonBP (arXiv:2510.16981) does so on a mesh, with the blocks of its chips between.
    """
    return _with_adamw(functools.partial(now_and_then, every, between), **arguments)


def decay_share(run: Run, rate_share: float) -> float:
    """What the weight decay of a step is multiplied with, in addition to its rate.

    The rate over its peak (arXiv:2607.23777, as arXiv:2506.02285 before it), so that
    decay goes as the square of the schedule.
    """
    return rate_share if run.candidate == "squared decay" else 1.0


def _with_adamw(
    step: Callable[[dict[str, Any]], optax.GradientTransformation],
    *,
    learning_rate: Any,
    weight_decay: Any,
    adam_learning_rate: Any,
    has_rate: bool = False,
    **direction: Any,
) -> optax.GradientTransformationExtraArgs:
    """A step for matrices, with decay and rate unless it has its own, and AdamW."""
    matrices = step(direction)
    if not has_rate:
        decay = optax.add_decayed_weights(weight_decay)
        rate = optax.scale_by_learning_rate(learning_rate)
        matrices = optax.chain(matrices, decay, rate)
    adamw = optax.adamw(adam_learning_rate, 0.9, 0.95, weight_decay=weight_decay)

    def labels(params: Any) -> Any:
        mask = mc.matrix_mask(params)
        return jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adamw", mask)

    return optax.partition({"muon": matrices, "adamw": adamw}, labels)


def each_matrix(f: Callable[..., jax.Array], numbers: Any, *trees: Any) -> Any:
    """`f` of every matrix, `(fan_in, fan_out)`, of leaves that all hold matrices."""

    def is_numbers(x: Any) -> bool:
        return isinstance(x, MuonDimensionNumbers)

    # By leaves, since a mask is no leaf of updates and none of numbers.
    of_leaves = filter(is_numbers, jax.tree.leaves(numbers, is_leaf=is_numbers))
    leaves = zip(of_leaves, *map(jax.tree.leaves, trees), strict=True)
    results = [_of_leaf(f, numbers, *arrays) for numbers, *arrays in leaves]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), results)


def _of_leaf(
    f: Callable[..., jax.Array], numbers: MuonDimensionNumbers, *arrays: jax.Array
) -> jax.Array:
    shape = arrays[0].shape
    sides = [np.atleast_1d(axes) % len(shape) for axes in numbers]
    others = np.setdiff1d(np.arange(len(shape)), np.concatenate(sides))
    order = np.concatenate([others, *sides])
    counts = [math.prod(shape[i] for i in side) for side in sides]
    stacks = [x.transpose(order).reshape(-1, *counts) for x in arrays]
    result = jax.vmap(f)(*stacks).reshape([shape[i] for i in order])
    return result.transpose(np.argsort(order))


def _unit(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Divided by its norm; zeros stay zeros."""
    length = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    return x / jnp.where(length > 0, length, 1)


GAINS = {f"SAMuon-lite {gain}": gain for gain in (1.25, 1.5, 2.0)}
# How often, and what is done in between.
PERIODIC = {
    "every second step": (2, as_long),
    "every fourth step": (4, as_long),
    "every fourth step, blocks between": (4, in_blocks),
}
# Other orthogonalizers are arguments of the package's.
ORTHOGONALIZERS = {
    "exact": exact,
    "Gram in bfloat16": mc.NewtonSchulz(method="gram", dtype="bfloat16"),
    "Muon+": even,
    "high-pass": high_pass,
}
CANDIDATES: dict[str, Optimizer] = {
    "": mc.muon,
    **{name: functools.partial(samuon_lite, gain) for name, gain in GAINS.items()},
    **{name: functools.partial(periodic, *of) for name, of in PERIODIC.items()},
    **{
        name: functools.partial(mc.muon, orthogonalizer=own)
        for name, own in ORTHOGONALIZERS.items()
    },
    "sinkhorn": sinkhorn,
    "hyperball": hyperball,
    "squared decay": mc.muon,  # what differs is `decay_share`
}
