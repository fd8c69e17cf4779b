"""Which leaves of a parameter tree are matrices, and along which axes."""

from collections.abc import Callable
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from .._matrices.view import matrix_view, MatrixView
from . import paths
from .broadcast import broadcast
from .leaf_rules import Ambiguous, LeafRules, Verdict
from .module_stacks import ModuleStacks
from .spelled import spell
from .stack_axes import IN_FRONT, StackAxes


#: A tree of `MuonDimensionNumbers` (or `None`, for AdamW), a prefix of one, or a
#: function that makes one from the parameters.
DimensionNumbers = Any | Callable[[Any], Any]


def flax_dimension_numbers(
    params: optax.Params,
    *,
    per_head: bool = False,
    stack_axes: StackAxes = IN_FRONT,
) -> Any:
    """Says for every leaf which axes form its matrices, as stock Flax lays them out.

    Written as inputs -> outputs, a kernel of

    - `Dense` or `Linear` is `(*stack, in -> out)`,
    - attention's `query`, `key` or `value` is `(*stack, in -> heads, head_dim)`,
    - attention's `out` is `(*stack, heads, head_dim -> out)`,
    - `Conv` is `(*window, in -> out)`,
    - `DenseGeneral`, `LinearGeneral` or `Einsum` is split as its bias tells.

    Embeddings, the output head, norms, biases and all leaves of rank 0 and 1 are
    `None`, for AdamW. Under a name that Flax does not use, rank 2 is a matrix.

    Axes count from the end and the leading ones are a stack (scanned layers,
    experts): each matrix of it is orthogonalized by itself. The output head is a
    kernel named so (`head`, `lm_head`, `logits`, ...) or, if unnamed, the Dense beside
    the embedding that has the embedding's shape transposed.

    **Arguments:**

    - `params`: Linen variables or params, an NNX state, or any pytree of arrays or
        `jax.ShapeDtypeStruct`. Leaves that `optax.masked` hides are left hidden.
    - `per_head`: whether every head of a query, key or value projection is a matrix of
        its own, as in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5, and not one
        column block of a larger one. For `dimension_numbers`:
        `functools.partial(mc.flax_dimension_numbers, per_head=True)`. For layers that
        `attention=` describes see [`per_head_dimension_numbers`][].
    - `stack_axes`: the axis of the layers in the leaves of a module that `nn.scan` or
        `nnx.vmap` stacks, such as `{"decoder/layers": 1}` or, in the last axis, -1. A
        leaf there is what it is in one layer: a number or a vector holds no matrix.

    A kernel of rank 3 without a bias in sight, under a name that does not tell a
    convolution, is read as a stack of Dense kernels. So are `query`, `key` and `value`
    where the kernels and norms beside them, or their sizes, show no heads.

    **Returns:** a tree like `params` of `optax.contrib.MuonDimensionNumbers` or `None`.

    **Raises:** `ValueError`, with the paths, for leaves whose names and shape do not
    settle it: rank 3 or more under a name that Flax does not use, a kernel of rank 4
    or more that no bias or name explains, `DenseGeneral_0` without a bias, or `query`,
    `key` and `value` of which nothing tells whether they have heads; and for a
    `stack_axes` that a leaf lacks.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> params = {"attn": {"query": {"kernel": jnp.ones((16, 4, 8))}}}
        >>> mc.flax_dimension_numbers(params)["attn"]["query"]["kernel"]
        MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
    """
    tree = paths.flatten(params)
    return tree.unflatten(_flax_numbers(tree, per_head, stack_axes))


def matrix_mask(params: optax.Params) -> Any:
    """Returns a tree of bools: `True` for each leaf that Muon should update.

    The mask of [`flax_dimension_numbers`][], for `optax.masked`. Raises as it does.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.matrix_mask({"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}})
        {'up': {'bias': False, 'kernel': True}}
    """
    tree = paths.flatten(params)
    return tree.unflatten(numbers is not None for numbers in _flax_numbers(tree))


def resolve_dimension_numbers(
    dimension_numbers: DimensionNumbers | None, tree: paths.PathedTree
) -> list[MuonDimensionNumbers | None]:
    """Those of each leaf, whichever way they were given."""
    if dimension_numbers is None:
        return _flax_numbers(tree)
    if paths.is_function(dimension_numbers):
        dimension_numbers = dimension_numbers(tree.whole())
    return broadcast(
        dimension_numbers,
        tree,
        name="dimension_numbers",
        is_entry=lambda x: isinstance(x, MuonDimensionNumbers),
        expected="optax.contrib.MuonDimensionNumbers",
    )


def matrix_views(
    dimension_numbers: DimensionNumbers | None, tree: paths.PathedTree
) -> list[MatrixView | None]:
    """Returns a view per leaf, `None` for one that is hidden or holds no matrix."""
    numbers = resolve_dimension_numbers(dimension_numbers, tree)
    return [_view(*entry) for entry in zip(*tree[:2], numbers, strict=True)]


def _flax_numbers(
    tree: paths.PathedTree,
    per_head: bool = False,
    stack_axes: StackAxes = IN_FRONT,
) -> list[MuonDimensionNumbers | None]:
    return [v.numbers for v in verdicts(tree, per_head, stack_axes)]


def verdicts(
    tree: paths.PathedTree,
    per_head: bool = False,
    stack_axes: StackAxes = IN_FRONT,
) -> list[Verdict]:
    """What each leaf is found to be.

    **Raises:** `ValueError` that lists those of which nothing tells.
    """
    rules = _rules(tree, per_head, stack_axes)
    found, ambiguous = [], []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        try:
            hidden = paths.is_masked(leaf)
            found.append(Verdict(None, "hidden") if hidden else rules.verdict(path))
        except Ambiguous:
            ambiguous.append((path, tuple(leaf.shape)))
    if ambiguous:
        raise ValueError(_ambiguous_message(ambiguous))
    return found


def _rules(tree: paths.PathedTree, per_head: bool, stack_axes: StackAxes) -> LeafRules:
    leaf_at = tree.by_path()
    stacks = ModuleStacks(stack_axes, leaf_at)
    layers = {path: stacks.layer(path) for path in leaf_at}
    axes_of = {
        path: stacks.of(path).others(len(stacks.shape(path))) for path in leaf_at
    }
    return LeafRules(spell(layers, axes_of), per_head=per_head)


def _view(path, leaf, numbers: MuonDimensionNumbers | None) -> MatrixView | None:
    if numbers is None or paths.is_masked(numbers) or paths.is_masked(leaf):
        return None
    try:
        return matrix_view(tuple(leaf.shape), numbers)
    except ValueError as error:
        raise ValueError(
            f"dimension_numbers for '{paths.show(path)}' with shape "
            f"{tuple(leaf.shape)}: {error}"
        ) from None


def _ambiguous_message(leaves) -> str:
    listing = "".join(f"\n  {paths.show(path)} {shape}" for path, shape in leaves)
    return (
        f"cannot tell which axes of these leaves form matrices:{listing}\n"
        "Name them through dimension_numbers: a function of the parameters that "
        "returns a tree with optax.contrib.MuonDimensionNumbers(reduction_axis, "
        "output_axis) for a matrix (axes left out are a stack of matrices) and None "
        "for AdamW. mc.flax_dimension_numbers covers stock Flax layers."
    )
