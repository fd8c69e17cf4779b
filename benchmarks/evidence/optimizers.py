"""The optimizers that are compared, of the package's public API."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc

from .adapters import is_numbers, only_b
from .candidates import CANDIDATES, decay_share
from .run import Run


RISE = 300  # the steps in which beta rises, if it does


class Hyperparameters(NamedTuple):
    """What one step takes as arguments of the compiled program."""

    learning_rate: Any
    adam_learning_rate: Any
    weight_decay: Any
    threshold: Any
    beta: Any = None  # if it changes


def hyperparameters(run: Run) -> list[Hyperparameters]:
    """Returns the hyperparameters of every step."""
    beta = rising_beta(run)
    return [
        Hyperparameters(
            np.float32(run.learning_rate * factor),
            np.float32(run.adam_learning_rate * factor),
            np.float32(run.weight_decay * decay_share(run, factor)),
            np.float32(run.threshold),
            None if beta is None else beta[i],
        )
        for i, factor in enumerate(schedule(run))
    ]


def rising_beta(run: Run) -> np.ndarray | None:
    """Of every step, in a straight line and then as it is."""
    if run.beta_from is None:
        return None
    share = np.minimum(1, np.arange(run.steps, dtype=np.float32) / RISE)
    return (1 - share) * run.beta_from + share * run.beta


def schedule(run: Run) -> np.ndarray:
    """Linear warm-up, then what `run.schedule` names; in (0, 1]."""
    step, warmup = np.arange(1, run.steps + 1), int(run.warm_up * run.steps)
    warmup = max(1, warmup) if run.warm_up else 0
    left = (run.steps + 1 - step) / (run.steps + 1 - warmup)
    shapes = {
        "constant": np.ones(run.steps),
        "cosine": (1 - np.cos(np.pi * left)) / 2,
        "linear": left,
    }
    return np.where(step < warmup, step / max(1, warmup), shapes[run.schedule])


def make_optimizer(
    run: Run, at: Hyperparameters
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer without QK-Clip, for which see `clip`."""
    if run.optimizer == "adamw":
        b1 = 0.9 if run.beta is None else run.beta
        b2 = 0.95 if run.b2 is None else run.b2
        adamw = optax.adamw(at.learning_rate, b1, b2, weight_decay=at.weight_decay)
        return optax.with_extra_args_support(adamw)
    beta = 0.95 if run.beta is None else run.beta
    # Heads are as `matrices` says, not as by default.
    others: dict[str, Any] = {"per_head": False, **_in_one_value(dict(run.muon))}
    return CANDIDATES[run.candidate](
        learning_rate=at.learning_rate,
        weight_decay=at.weight_decay,
        adam_learning_rate=at.adam_learning_rate,
        beta=beta if at.beta is None else at.beta,
        dimension_numbers=MATRICES[run.matrices],
        **others,
    )


def _in_one_value(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of Newton-Schulz, which records of runs have one by one."""
    names = dict(
        ns_coeffs="coeffs", ns_steps="steps", preconditioning="preconditioning"
    )
    own = {names[x]: value for x, value in options.items() if x in names}
    rest = {x: value for x, value in options.items() if x not in names}
    return rest | ({"orthogonalizer": mc.NewtonSchulz(**own)} if own else {})


def clip(run: Run, params: Any, stats: Any, at: Hyperparameters) -> Any:
    """QK-Clip after the step, if the run clips."""
    if not run.clips:
        return params
    return mc.clip_qk(params, stats, at.threshold)


def _experts(numbers: MuonDimensionNumbers | None, params: Any) -> Any:
    """`numbers` are those of all experts; other leaves have the default."""

    def leaf(path, default):
        return numbers if "experts" in jax.tree_util.keystr(path) else default

    default = mc.flax_dimension_numbers(params)
    return jax.tree_util.tree_map_with_path(leaf, default, is_leaf=is_numbers)


SIDE_BY_SIDE = MuonDimensionNumbers((-2,), (-3, -1))
MATRICES = {
    "default": None,
    "per_head": functools.partial(mc.flax_dimension_numbers, per_head=True),
    # The experts of a layer side by side.
    "one_expert_matrix": functools.partial(_experts, SIDE_BY_SIDE),
    "adam_experts": functools.partial(_experts, None),
    "lora_b": only_b,
}
