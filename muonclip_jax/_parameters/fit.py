"""Whether params are params, and gradients, or updates, are theirs."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._calls import is_reading
from .._options import shown
from . import paths


def check_params(call: str, params: Any) -> None:
    """Raises for a reading or a state in place of params, naming the right `call`."""
    if is_reading(params):
        got = "a reading (its table is print(reading), and it is given as model=)"
    elif any(map(_is_state, jax.tree.leaves(params, is_leaf=_is_state))):
        got = "the state of an optimizer"
    elif params is None or isinstance(params, str) or inspect.isroutine(params):
        got = shown(params)
    else:
        return
    name = call.partition("(")[0]
    raise ValueError(f"{name} needs the params, got {got}: call {call}")


def _is_state(node: Any) -> bool:
    # All states of optax and of this package are named tuples, and no params are.
    package = type(node).__module__.partition(".")[0]
    is_of_optimizer = package in ("optax", __name__.partition(".")[0])
    return is_of_optimizer and hasattr(node, "_fields") and not paths.is_masked(node)


def check_fit(updates: Any, params: Any, kind: str = "gradient") -> None:
    """Raises, naming the paths, where updates and params are different leaves.

    They differ in structure or shape, or updates are complex and params are not.
    """
    if params is None:
        return
    mine, treedef = jax.tree.flatten(updates, is_leaf=paths.is_masked)
    try:
        theirs = treedef.flatten_up_to(params)
    except (TypeError, ValueError):
        raise ValueError(_how_they_differ(updates, params, kind)) from None
    # One number, such as the loss, fits to a whole module for `flatten_up_to`.
    others = [x for x in theirs if not (paths.is_array(x) or paths.is_masked(x))]
    if not jax.tree_util.all_leaves(others):
        raise ValueError(_how_they_differ(updates, params, kind))
    for i, (update, param) in enumerate(zip(mine, theirs, strict=True)):
        if paths.is_masked(update) or paths.is_masked(param):
            continue
        if np.shape(update) != np.shape(param):
            wrong = f"shape {np.shape(update)}, but in the params it is"
            right = str(np.shape(param))
        elif jnp.iscomplexobj(update) and not jnp.iscomplexobj(param):
            wrong = f"dtype {update.dtype}, but its parameter is real:"
            right = f"{param.dtype}. Take the gradient of a real loss"
        else:
            continue
        path = paths.show(paths.flatten(updates).paths[i])
        raise ValueError(f"the {kind} of '{path}' has {wrong} {right}")


def _how_they_differ(updates: Any, params: Any, kind: str) -> str:
    message = f"{kind}s and params have different structures: "
    is_pair = isinstance(updates, tuple) and len(updates) == 2
    if is_pair and jax.tree.structure(updates[1]) == jax.tree.structure(params):
        return f"{message}got (value, gradients), as jax.value_and_grad returns them"
    mine, theirs = paths.flatten(updates), paths.flatten(params)
    my_paths, their_paths = {*mine.paths}, {*theirs.paths}
    lacks = {f"{kind}s": their_paths - my_paths, "params": my_paths - their_paths}
    which = [f"the {x} lack {paths.show_all(sorted(y))}" for x, y in lacks.items() if y]
    message += "; ".join(which) or _other_containers(updates, params, kind)
    others = [x for x in theirs.leaves if not paths.is_masked(x)]
    if not all(map(paths.is_array, others)):
        message += (
            ". Give an Equinox model as eqx.filter(model, eqx.is_inexact_array), like "
            "its gradients"
        )
    return message


def _other_containers(updates: Any, params: Any, kind: str) -> str:
    """Names the first leaf whose keys differ: the package's own paths are alike."""
    keys = ([*jax.tree_util.tree_leaves_with_path(x)] for x in (updates, params))
    for (mine, _), (theirs, _) in zip(*keys, strict=False):
        if mine != theirs:
            mine, theirs = map(jax.tree_util.keystr, (mine, theirs))
            return f"what is {mine} in the {kind}s is {theirs} in the params"
    kinds = " and ".join(type(x).__name__ for x in (updates, params))
    return f"their containers differ, in {kinds}"
