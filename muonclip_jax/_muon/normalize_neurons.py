"""NorMuon: the neurons of an orthogonalized update take steps of like size."""

from __future__ import annotations  # help() shows aliases by name

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._calls import explained
from .._layout.layout import check_gradients, cut_axes, gather, Layout, own_block
from .._layout.shardings import but_along, PlacedLeaf, Shardings
from .._layout.state import state_by_path, StatePart, zeros_by_path
from .._matrices.pieces import divide, pieces_of
from .._matrices.stacks import MatrixLeaf, MatrixView
from .._mesh_axes import (
    explicit_spec,
    impose_no_sharding,
    keep_sharding,
    on_automatic_axes,
)
from .._model.knowledge import knowledge_of
from .._model.model_reading import ModelReading
from .._options import check_number, check_state, NOT_NEGATIVE, SHARE
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers
from .._parameters.fit import check_fit
from .leaves import check_matrices_only, read_leaves


class NormalizeNeuronsState(NamedTuple):
    """State of [`normalize_neurons`][]: a mean square for each neuron.

    - `v`: float32, a dict by the path of the leaf; the leaf's shape, but 1 along the
        shorter axis of its matrices, the inputs of square ones.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.normalize_neurons().init({"w": jnp.ones((2, 3))}).v
        {'w': Array([[0., 0., 0.]], dtype=float32)}
    """

    # By path: in Flax's boxes, metadata would describe the axes of the param.
    v: dict[str, jax.Array]


@explained
def normalize_neurons(
    b2: float | jax.Array = 0.95,
    *,
    eps: float | jax.Array = 1e-10,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    per_head: bool | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each neuron of an update by its root mean square over time.

    $$v_t = b_2 v_{t-1} + (1 - b_2)\,\mathrm{mean}(o^2), \qquad
      o' = \frac{o}{\sqrt{\max(v_t, \epsilon)}}, \qquad
      u = o' \frac{\lVert o \rVert_F}{\lVert o' \rVert_F}$$

    The mean is over the shorter axis, so that there is one $v$ for each entry of the
    longer one: along the shorter axis orthogonalization has already equalized the
    norms. A square matrix has one $v$ for each output: a few steps of Newton-Schulz
    leave its norms uneven. Every matrix keeps its Frobenius norm, so the learning rate
    need not change. Put it after [`scale_by_muon`][], with the same axes.
    On a mesh only vectors are exchanged.

    **Arguments:**

    - `b2`: decay of the mean square.
    - `eps`: the least mean square.
    - `model`: as for [`scale_by_muon`][].
    - `dimension_numbers`: as for [`scale_by_muon`][].
    - `per_head`: as for [`scale_by_muon`][].
    - `shardings`: as for [`scale_by_muon`][], needed only inside `jax.shard_map`.

    **Returns:** an `optax.GradientTransformationExtraArgs`. Updates keep their dtype;
    the state `v` is float32, a vector for each matrix.

    **Raises:** `ValueError` for a `b2` outside [0, 1]; at `init` as
    [`scale_by_muon`][] does, naming the paths.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> tx = mc.normalize_neurons()
        >>> update = {"w": jnp.array([[3.0, 0.0, 4.0], [0.0, 5.0, 0.0]])}
        >>> tx.update(update, tx.init(update))[0]["w"].round(2)
        Array([[4.08, 0.  , 4.08],
               [0.  , 4.08, 0.  ]], dtype=float32)

    ??? cite "References"

        Li et al., "NorMuon", arXiv:2510.05491, Algorithm 1, which always has one $v$
        for each output; modded-nanogpt and nanochat use the longer axis, and of square
        matrices the outputs.
    """
    check_number("b2", b2, SHARE)
    check_number("eps", eps, NOT_NEGATIVE)
    knowledge = knowledge_of(model, None, dimension_numbers, per_head)

    # Not by `for_leaves`, which lets the state keep a sharding other than that of the
    # gradients: updates are scaled where they are, and stay sharded as they are.
    def read(tree: Any) -> Layout:
        layout = read_leaves(tree, knowledge, shardings)
        check_matrices_only(layout, "normalize_neurons")
        return layout

    def init_fn(params: optax.Params) -> optax.OptState:
        return neuron_normalization(read(params), b2, eps).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        check_state("normalize_neurons", isinstance(state, NormalizeNeuronsState))
        check_fit(updates, params)
        layout = read(updates)
        check_gradients(layout.leaves)
        tx = neuron_normalization(layout, b2, eps)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def neuron_normalization(
    layout: Layout, b2: float | jax.Array, eps: float | jax.Array = 1e-10
) -> optax.GradientTransformationExtraArgs:
    """Normalizes the leaves that have a view; others pass through."""

    def init_fn(params: optax.Params) -> NormalizeNeuronsState:
        parts = {
            name: StatePart(leaf.path, jnp.float32, sizes)
            for leaf in layout.leaves
            for name, sizes in _state_of(leaf).items()
        }
        return NormalizeNeuronsState(zeros_by_path(params, layout, parts))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        results, after = [], {}
        for leaf in layout.of(updates):
            x = leaf.array
            if names := list(_state_of(leaf)):
                assert leaf.view is not None
                check_state("normalize_neurons", {*names} <= {*state.v})
                matrices = MatrixLeaf(x, leaf.view, leaf.cut)
                v = [state.v[name] for name in names]
                x, *v = _normalize_leaf(matrices, v, b2, eps)
                after |= zip(names, v, strict=True)
            results.append(x)
        v = state_by_path(layout, after)
        return layout.tree.unflatten(results), NormalizeNeuronsState(v)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _state_of(leaf: PlacedLeaf) -> dict[str, dict[int, int]]:
    """Returns a leaf's state by name: the sizes that differ from the leaf's."""
    path, view = paths.show(leaf.path), leaf.view
    if view is None or not math.prod(view.shape):
        return {}
    sizes_by_name = {}
    for j, part in enumerate(pieces_of(view)):
        piece = part.view
        short = _short_axes(piece)
        if view.division is None:
            return {path: dict.fromkeys(short, 1)}
        # Outputs of a piece are one axis of its state, and not sharded.
        kept = [1 if i in short else n for i, n in enumerate(piece.shape)]
        outer = set(range(len(view.shape))) - {*view.output}
        pairs = zip(kept, part.leaf_axes, strict=True)
        count = math.prod(n for n, leaf_axis in pairs if leaf_axis not in outer)
        sizes = dict.fromkeys(view.output, 1) | {view.output[0]: count}
        is_of_outputs = short == piece.reduction
        sizes_by_name[f"{path}/{j}"] = sizes | dict.fromkeys(
            view.reduction if is_of_outputs else (), 1
        )
    return sizes_by_name


# Compiled, so that an eager update shards its state as a program does.
@jax.jit
def _normalize_leaf(
    leaf: MatrixLeaf, state: list[jax.Array], b2: Any, eps: Any
) -> list[jax.Array]:
    """Returns the update of a leaf, normalized, and its state."""
    view = leaf.view
    if view.division is None:
        return [*_normalize(leaf, state[0], b2, eps)]
    # Pieces are cut out of whole outputs.
    others = but_along(view.output, leaf.spec)
    of_outputs = but_along({*range(len(view.shape))} - {*view.output}, leaf.spec)

    def normalize(o: jax.Array, *state: jax.Array) -> list[jax.Array]:
        pieces, unite = divide([MatrixLeaf(gather(o, of_outputs), view, others)])
        after, results = [], []
        for piece, v in zip(pieces, state, strict=True):
            short = _short_axes(piece.view)
            shape = [1 if i in short else n for i, n in enumerate(piece.array.shape)]
            x, new = _normalize(piece, v.reshape(shape), b2, eps)
            after.append(new.reshape(v.shape))
            results.append(x)
        (whole,) = unite(results)
        return [own_block(whole, of_outputs), *after]

    specs = [explicit_spec(x) for x in (leaf.array, *state)]
    return on_automatic_axes(normalize, leaf.array, *state, results=specs)


def _short_axes(view: MatrixView) -> tuple[int, ...]:
    """Returns the axes to take the mean over."""
    return view.reduction if view.fan_in <= view.fan_out else view.output


def _normalize(
    leaf: MatrixLeaf, v: jax.Array, b2: Any, eps: Any
) -> tuple[jax.Array, jax.Array]:
    o, view, cut = leaf.array, leaf.view, leaf.spec
    short = _short_axes(view)
    long = view.output if short == view.reduction else view.reduction
    wide = o.astype(np.promote_types(o.dtype, jnp.float32))
    mean = jnp.mean(jnp.square(jnp.abs(wide)), short, keepdims=True)
    # Blocks have one size, so the mean of means is the mean. Over no axes, where
    # nothing is cut, a collective is no operation.
    mean = jax.lax.pmean(mean, cut_axes(cut, short))
    b2 = jnp.asarray(b2, v.dtype)
    # The state stays sharded as it is; a piece's is whole along its outputs.
    v = b2 * v + (1 - b2) * impose_no_sharding(mean.astype(v.dtype))
    divisor = keep_sharding(jnp.maximum(v, jnp.asarray(eps, v.dtype)))
    divisor = divisor.astype(mean.dtype)
    # |o|^2 is the sum of `mean` over the long side, times the size of the short one;
    # |o'|^2 is the same of `mean / v`. The norms need no pass over the matrix.
    sums = [jnp.sum(x, long, keepdims=True) for x in (mean, mean / divisor)]
    before, after = jax.lax.psum(sums, cut_axes(cut, long))
    is_zero = before == 0  # where a quotient has no derivative
    kept = jnp.where(is_zero, 1, before) / jnp.where(is_zero, 1, after)
    return (wide * jnp.sqrt(kept) * jax.lax.rsqrt(divisor)).astype(o.dtype), v
