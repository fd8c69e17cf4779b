"""The attention of stock Flax, found by its names, and what names cannot tell.

Exact or an error: a layer that is found has all leaves that scale its logits, and
attention that only looks like one names the reading of the model.
"""

from collections.abc import Sequence
from typing import Any

from .._options import shown
from .._parameters import names, paths
from .._parameters.by_names import ByNames
from .._parameters.stacks import IN_FRONT, Stack, StackAxes
from .attention_layers import (
    Attention,
    AttentionLayer,
    checked,
    READ_IT,
    ROLES,
    show_layer,
)
from .head_leaf import HeadLeaf


_NONE = Stack(0, 0)


def flax_attention_layers(
    params: Any, *, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    """Finds the attention layers of stock Flax: modules with `query` and `key`.

    Works on Linen and NNX params, scanned layers included. All other attention:
    [`read_model`][].

    **Arguments:**

    - `params`: of the model.
    - `stack_axes`: the axis of the layers in the leaves of a module that `nn.scan` or
        `nnx.vmap` stacks elsewhere than in front, such as `{"decoder/layers": 1}` or,
        in the last axis, -1. For `attention=`:
        `functools.partial(mc.flax_attention_layers, stack_axes=...)`.

    **Returns:** a list of [`AttentionLayer`][].

    **Raises:** `ValueError`, naming the layers, where query and key are normalized
    after their projection (`normalize_qk=True`): scaling the weights does nothing
    there. So too for projections with leaves besides kernel and bias, such as LoRA's.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))  # features, heads, head_dim
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> (layer,) = mc.flax_attention_layers(params)
        >>> layer.path, layer.query[0].path
        ('attn', 'query/kernel')
    """
    return _find(paths.flatten(params), stack_axes)


def _find(
    tree: paths.PathedTree, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    """`nn.MultiHeadDotProductAttention` of Linen, `nnx.MultiHeadAttention`.

    Modules with `query` and `key`, each a kernel of `(features, heads, head_dim)` and
    maybe a bias `(heads, head_dim)`.
    """
    reading, layers = ByNames(tree, stack_axes), []
    leaf_at = reading.leaf_at
    for module in _modules_with_query_and_key(leaf_at):
        # A plain kernel lacks the axis of heads. Counted as if it had one, it does not
        # fit, and QK-Clip refuses it; else its features would be taken for layers.
        is_plain = reading.has_heads((*module, "query", "kernel")) is False
        roles: dict[str, tuple[HeadLeaf, ...]] = {}
        for role in ("query", "key"):
            leaves = []
            for name, ndim in ((f"{role}/kernel", 3), (f"{role}/bias", 2)):
                path = (*module, *paths.split(name))
                if path not in leaf_at:
                    continue
                shape, stack = reading._shape.get(path, ()), reading.stacks.get(path, _NONE)
                # Each leaf's own: a stack in the last axis begins elsewhere in a bias
                # than in its kernel. A mask may hide a leaf, and where its stack is.
                ndim = len(shape) + 1 if is_plain and shape else ndim
                leaves.append(HeadLeaf(name, ndim, stack_axis=stack.start))
            roles[role] = tuple(leaves)
        layers.append(AttentionLayer("/".join(module), **roles))
    _check_no_others(layers, leaf_at)
    return checked(layers, leaf_at)


def _modules_with_query_and_key(leaf_at: paths.LeafAt) -> list[paths.Path]:
    """A query alone is no attention.

    A mask may hide a projection or the whole module as one, which leaves the beginning
    of the name in sight.
    """
    found: dict[paths.Path, None] = {}
    for path in leaf_at:
        if path[-2:] == ("query", "kernel"):
            module = path[:-2]
        elif path[-1:] == ("query",) and path in leaf_at.hidden:
            module = path[:-1]
        else:
            continue
        query, key = ((*module, name, "kernel") for name in ("query", "key"))
        # Hidden as one module next to a key in sight, it need not be a projection: what
        # is below it shows nowhere.
        is_seen = leaf_at.get(query) is not None
        if key in leaf_at and (is_seen or paths.is_masked(leaf_at[key])):
            found[module] = None
    return list(found)


def _check_no_others(layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt) -> None:
    """Raises for leaves of a projection besides its kernel and its bias."""
    owner = {layer.path_of(leaf): layer for layer in layers for leaf in layer.leaves}
    module_of = {path[:-1]: layer for path, layer in owner.items()}
    strays: dict[AttentionLayer, list[paths.Path]] = {}
    for path in leaf_at:
        starts = [path[:n] for n in range(1, len(path))]
        # Linen's WeightNorm keeps `WeightNorm_0/query/kernel/scale` next to `query`:
        # the path of the kernel, after one more module somewhere on the way.
        of_kernel = (
            start[:i] + start[i + 1 :]
            for start in starts
            if start[-1] == "kernel"
            for i in range(len(start) - 2)
        )
        found = [module_of[x] for x in starts if x in module_of]
        found += [owner[x] for x in of_kernel if x in owner]
        if path not in owner and found:
            strays.setdefault(found[0], []).append(path)
    for layer, others in strays.items():
        # A gain, a mask or an adapter may undo the scaling or need the same, and the
        # logits would tell nobody.
        raise ValueError(
            f"QK-Clip cannot act on '{show_layer(layer)}' by names: they do not tell "
            f"what {paths.show_all(others)} do to the logits, so scaling the kernels "
            f"may not be enough. Use {READ_IT}; or name all leaves that scale query "
            "and key by mc.HeadLeaf in an mc.AttentionLayer"
        )


def resolve_attention(
    attention: Attention | None, tree: paths.PathedTree
) -> list[AttentionLayer]:
    """Returns the layers, whichever way they were given, all leaves of which exist.

    **Raises:** `ValueError` for what is no sequence of layers, and as `checked` does.
    """
    if attention is None:
        return _find(tree)
    # A layer by itself is a sequence, too: a named tuple.
    found: Any = [attention] if isinstance(attention, AttentionLayer) else attention
    if callable(found):
        found = found(tree.whole())
    wanted = (
        "attention= must be a sequence of mc.AttentionLayer, or a function from params "
        "to one"
    )
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError(f"{wanted}; got {shown(found)}")
    for layer in found:
        if not isinstance(layer, AttentionLayer):
            raise ValueError(f"{wanted}; got a sequence with {layer!r}")
        for role in ROLES:
            leaves = getattr(layer, role)
            # A leaf that is not in a tuple is one of strings and numbers itself.
            is_tuple = isinstance(leaves, tuple) and not isinstance(leaves, HeadLeaf)
            if not is_tuple or not all(isinstance(x, HeadLeaf) for x in leaves):
                raise ValueError(
                    f"{role} of attention layer '{show_layer(layer)}' must be a tuple "
                    f"of mc.HeadLeaf, such as (mc.HeadLeaf('query/kernel', 3),); got "
                    f"{leaves!r}"
                )
    return checked(list(found), tree.by_path())


def check_none_overlooked(
    tree: paths.PathedTree, layers: Sequence[AttentionLayer]
) -> None:
    """Raises for attention that its names show, where Flax's are looked for."""
    # Silent otherwise: a model in which nothing is found trains like any other, and no
    # head is ever clipped.
    reading = ByNames(tree)
    known = {paths.split(layer.path) for layer in layers}
    overlooked = []
    for path, own in reading.own.items():
        # A model for search has a query, too. A key next to it makes it attention.
        is_query = path[-2:] == ("query", "kernel")
        is_query &= (*path[:-2], "key", "kernel") in reading.own
        # Gemma's, in DeepMind's library and its ports: one einsum for key and value, or
        # for all three.
        is_query |= "".join(path[-2:-1]) in ("q_einsum", "qkv_einsum")
        # With a frozen kernel out of the params, as in a partition of trainable leaves,
        # the factors of LoRA are all that is left of the query.
        is_query |= names.is_low_rank(path) and any(
            names.projection(name) == "query" for name in path[-3:-1]
        )
        is_known = any(path[:n] in known for n in (len(path) - 2, len(path) - 3))
        is_hidden = paths.is_masked(reading.leaf_at[own])
        if is_query and own[-2:] != ("query", "kernel") and not is_known | is_hidden:
            overlooked.append(own)
    if overlooked:
        raise ValueError(
            "by names QK-Clip finds the modules that are called query and key, as in "
            f"stock Flax, and would not clip {paths.show_all(overlooked, at_most=3)}. "
            f"Use {READ_IT}, or describe this attention by mc.AttentionLayer. To leave "
            "it unclipped, pass attention=mc.flax_attention_layers"
        )
