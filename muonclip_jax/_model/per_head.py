"""One matrix per attention head, read off the description of the attention layers."""

from collections.abc import Callable
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from .._options import flag
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers, resolve_verdicts
from .attention_layers import Attention
from .finder import resolve_attention
from .head_leaf import HeadLeaf


def per_head_dimension_numbers(
    attention: Attention | None = None,
    *,
    dimension_numbers: DimensionNumbers | None = None,
) -> Callable[[optax.Params], Any]:
    """Orthogonalizes every head of the described kernels by itself.

    As in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5 (arXiv:2602.15763). The
    description is the one for [`qk_clip`][], so it covers the leaves of query and key
    and what shares a leaf with them; `mc.flax_dimension_numbers` with
    `per_head=True` covers the value of stock Flax too.

    **Arguments:**

    - `attention`: as for [`qk_clip`][].
    - `dimension_numbers`: of all other leaves, as for [`muon`][].

    **Returns:** a function from params to a tree, for `dimension_numbers=`.

    **Raises:** `ValueError`, from that function, for kernels without a head axis of
    their own.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> params = {"mla": {
        ...     "wq_b": {"kernel": jnp.ones((6, 2, 4 + 2))},
        ...     "wkv_b": {"kernel": jnp.ones((8, 2, 4 + 3))},
        ... }}
        >>> find = mc.latent_attention(nope_head_dim=4)
        >>> per_head = mc.per_head_dimension_numbers(find)
        >>> print(  # doctest: +ELLIPSIS
        ...     mc.describe(params, dimension_numbers=per_head, attention=find)
        ... )
        path              shape      matrices   optimizer  why    attention
        mla/wkv_b/kernel  (8, 2, 7)  2 x 8 x 7  muon       given  key, 2 heads
        mla/wq_b/kernel   (6, 2, 6)  2 x 6 x 6  muon       given  query, 2 heads + ...
    """

    def find(params: optax.Params) -> Any:
        tree = paths.flatten(params)
        leaf_at = tree.by_path()
        described = {
            layer.path_of(leaf): leaf
            for layer in resolve_attention(attention, tree)
            for leaf in layer.leaves
        }
        resolved = resolve_verdicts(dimension_numbers, tree, described=described)
        numbers: dict[paths.Path, Any] = {
            path: verdict.numbers
            for path, verdict in zip(tree.paths, resolved, strict=True)
        }
        for path, leaf in described.items():
            # A bias goes to AdamW, whatever heads it has.
            if not paths.is_masked(leaf_at[path]) and numbers[path] is not None:
                numbers[path] = _per_head(leaf, path, len(leaf_at[path].shape))
        return tree.unflatten(numbers.values())

    return find


def muon_per_head(
    per_head: bool, attention: Attention | None, dimension_numbers: Any
) -> dict[str, Any]:
    """The arguments of Muon, whose heads `attention` describes where it is given."""
    if not flag("per_head", per_head) or attention is None:
        return dict(dimension_numbers=dimension_numbers, per_head=per_head)
    # Else `per_head` looks for the heads by the names of stock Flax.
    found = per_head_dimension_numbers(attention, dimension_numbers=dimension_numbers)
    return dict(dimension_numbers=found, per_head=False)


def _per_head(leaf: HeadLeaf, path: paths.Path, rank: int) -> MuonDimensionNumbers:
    """The two axes of a leaf besides those of the stack, the heads and the part."""
    axes = [axis for axis in range(-leaf.ndim, 0) if axis not in leaf.head_axes]
    # In Gemma, key and value are parts of one leaf, along an axis of its own.
    if len(axes) == 3 and len(leaf.parts) == 1 and {*leaf.parts} <= {*axes}:
        axes.remove(*leaf.parts)
    if leaf.split or leaf.axis is None or len(axes) != 2:
        raise ValueError(
            f"'{paths.show(path)}' has no axis of heads, so it cannot be cut into one "
            "matrix for each; leave its layer out of attention="
        )
    return MuonDimensionNumbers(*(leaf.stack_of(rank).axis(a, rank) for a in axes))
