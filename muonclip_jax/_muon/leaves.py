"""A tree of leaves as a trace reads it, once: paths, matrices, shardings."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import optax

from .._layout.layout import (
    axis_names,
    Layout,
    over_replicas,
    OverReplicas,
    read_layout,
)
from .._layout.shardings import PlacedLeaf, Shardings
from .._layout.state import counts_replicated
from .._model.knowledge import Knowledge
from .._options import check_state
from .._parameters import paths
from .._parameters.dimension_numbers import FROZEN, views_of
from .._parameters.fit import check_fit
from .._parameters.question import BEFORE_THE_MASK


def read_leaves(
    tree: Any,
    knowledge: Knowledge,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
) -> Layout:
    """Returns the layout of a tree, with the matrices of its leaves."""
    layout = read_layout(tree, shardings, axis_name)
    verdicts = knowledge.verdicts(layout.whole)
    views = views_of(verdicts, layout.whole)
    entries = zip(layout.leaves, views, verdicts, strict=True)
    leaves = (leaf._replace(view=v, verdict=verdict) for leaf, v, verdict in entries)
    return layout._replace(leaves=tuple(leaves))


def optimizer_of(leaf: PlacedLeaf) -> str:
    """Returns the group of [`muon`][] that updates a leaf."""
    if leaf.view:
        return "muon"
    return FROZEN if leaf.verdict and leaf.verdict.label == FROZEN else "adamw"


def for_leaves(
    name: str,
    build: Callable[[Layout], optax.GradientTransformationExtraArgs],
    state_type: type,
    knowledge: Knowledge,
    *,
    shardings: Shardings | None,
    axis_name: Hashable | None,
) -> OverReplicas:
    """Returns the transformation `name`, which `build` makes for the leaves of a tree.

    Axes, masks and shardings are read off the whole tree, here, before a mask or
    `optax.partition` hides leaves: biases show which axes of a general kernel are
    inputs. `init` and `update` both read it, so a restored state needs no `init`. The
    state is a `state_type`.
    """
    axis_names(axis_name)  # raises at construction for a wrong one
    read = functools.partial(
        read_leaves, knowledge=knowledge, shardings=shardings, axis_name=axis_name
    )

    def init_fn(params: optax.Params) -> optax.OptState:
        layout = read(params)
        mesh = layout.mesh  # first, since it raises for shardings that do not agree
        return counts_replicated(build(layout).init(params), mesh)

    def update_fn(updates, state, params=None, **extra_args):
        check_state(name, isinstance(state, state_type))
        # Before the layout: a reading would take wrong gradients for other params.
        check_fit(updates, params)
        layout = read(updates)
        gradients = layout.averaged(updates, extra_args.get("attention_stats"))
        tx = build(layout)
        # optax's Adam mixes dtypes, so strict promotion would refuse it.
        with jax.numpy_dtype_promotion("standard"):
            try:
                results, after = tx.update(gradients, state, params, **extra_args)
            except Exception:
                _check_made_so(name, state, tx, updates)
                raise
        shapes = [[np.shape(x) for x in jax.tree.leaves(s)] for s in (state, after)]
        if shapes[0] != shapes[1]:  # such as a matrix that is now several heads
            _check_made_so(name, state, tx, updates)
        # `optax.scale_by_adam` returns updates of bfloat16 gradients in its mu_dtype.
        return jax.tree.map(lambda u, g: u.astype(g.dtype), results, gradients), after

    return over_replicas(init_fn, update_fn, axis_name)


def _check_made_so(
    name: str, state: Any, tx: optax.GradientTransformation, like: Any
) -> None:
    """Raises for a state of other settings, after a step has failed.

    To trace `init` before every eager update would take long.
    """
    try:
        expected = jax.eval_shape(tx.init, like)
    except Exception:  # another mistake, which is reported as it came
        return
    held, needed = (
        {
            f"{jax.tree_util.keystr(path)} {np.shape(leaf)}"
            for path, leaf in jax.tree.leaves_with_path(x)
        }
        for x in (state, expected)
    )
    if held != needed or jax.tree.structure(state) != jax.tree.structure(expected):
        lacks, has = (", ".join(sorted(x)[:3]) for x in (needed - held, held - needed))
        differ = [f"it lacks {lacks}"] * bool(lacks) + [f"it has {has}"] * bool(has)
        raise ValueError(
            f"the state was made by a {name} with other settings"
            f"{': ' if differ else ''}{' and '.join(differ)}. Other leaves may have "
            "used Muon, a number may have been a schedule, or an option such as "
            "neuron_b2 or mu_dtype='int8' may be new. Use the settings that it was "
            "made with, or call init again. A state of optax's Muon can be carried "
            "over: the manual's page on optax has the code"
        )


def check_matrices_only(layout: Layout, name: str) -> None:
    """Raises for leaves in sight that hold no matrix."""
    in_sight = [leaf for leaf in layout.leaves if not paths.is_masked(leaf.array)]
    if strays := [leaf.path for leaf in in_sight if leaf.view is None]:
        # The mask needs the arguments of this transformation.
        sources = {leaf.verdict and leaf.verdict.source for leaf in layout.leaves}
        by = ["model=reading"] * bool(sources & {"read", "unread"})
        by += ["dimension_numbers=n"] * ("given" in sources)
        by = ", ".join(by)
        mask = f"functools.partial(mc.matrix_mask, {by})" if by else "mc.matrix_mask"
        remedy = f"Wrap it as optax.masked(mc.{name}({by}), {mask})"
        if not by and len(in_sight) < len(layout.leaves):
            remedy = f"The mask may hide biases: write mc.{name}({BEFORE_THE_MASK})"
        raise ValueError(
            f"{name} got leaves that hold no matrix: {paths.show_all(strays)}. "
            f"{remedy}, use mc.muon, or name their axes in dimension_numbers"
        )


def check_directed(layout: Layout) -> None:
    """Raises for matrices whose input side is not known."""
    if strays := [x.path for x in layout.leaves if x.view and not x.view.is_directed]:
        raise ValueError(
            "the mask hides the biases that show which axes are the inputs of "
            f"{paths.show_all(strays, at_most=3)}, and this consistent_rms depends on "
            f"them. Give {BEFORE_THE_MASK}, made from all params"
        )
