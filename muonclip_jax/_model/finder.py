"""One finder of attention: from a reading of the params to its layers.

A `Preset` says which modules hold attention and which of their leaves are its query and
its key. All else is the same for every preset: where stacks are, the factors of LoRA,
and what QK-Clip cannot act on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .._options import shown, whole_number
from .._parameters import names, paths
from .._parameters.reading import Reading
from .._parameters.stacks import IN_FRONT, StackAxes
from .attention_layers import (
    Attention,
    AttentionLayer,
    checked,
    Finder,
    ROLES,
    show_layer,
    with_low_rank,
)
from .head_leaf import HeadLeaf


# How many names of leaves an error lists.
_SHOWN = 12


class Module(NamedTuple):
    """A module that holds attention, in the reading of all the params."""

    path: paths.Path
    reading: Reading

    def at(self, name: str) -> paths.Path:
        """The path of a leaf of the module, which need not be there."""
        return (*self.path, *paths.split(name))

    def has(self, name: str) -> bool:
        return self.at(name) in self.reading.leaf_at


#: The leaves of one role in a module.
Leaves = Callable[[Module], tuple[HeadLeaf, ...]]


class Preset(NamedTuple):
    """One way to write attention: its modules, and the leaves of each role in one."""

    modules: Callable[[Reading], Iterable[paths.Path]]
    query: Leaves
    key: Leaves
    rotary_query: Leaves = lambda module: ()


def find_layers(
    tree: paths.PathedTree, *presets: Preset, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    """The attention layers of all modules of these presets, checked."""
    reading, layers = Reading(tree, stack_axes), []
    for preset in presets:
        for path in preset.modules(reading):
            module, roles = Module(path, reading), {}
            for role in ROLES:
                leaves = getattr(preset, role)(module)
                at = [reading.stacks.get(module.at(leaf.path)) for leaf in leaves]
                # Each by itself: a stack in the last axis begins elsewhere in a bias
                # than in its kernel. A mask may hide a leaf, and where its stack is.
                roles[role] = tuple(
                    leaf._replace(stack_axis=stack.start) if stack else leaf
                    for leaf, stack in zip(leaves, at, strict=True)
                )
            layers.append(AttentionLayer("/".join(path), **roles))
    return checked(with_low_rank(layers, reading.leaf_at), reading.leaf_at)


def finder(*presets: Preset, stack_axes: StackAxes, marker: str = "") -> Finder:
    """Makes a function from params to layers of it, which raises where there are none.

    `marker` is the leaf that the user may name otherwise.
    """

    def find(params: Any) -> list[AttentionLayer]:
        tree = paths.flatten(params)
        layers = find_layers(tree, *presets, stack_axes=stack_axes)
        # A mask may hide them all, and there may be no params at all.
        if layers or not tree.paths or any(map(paths.is_masked, tree.leaves)):
            return layers
        if not marker:
            raise ValueError(
                "no attention layer found: no module has a query and a key under a "
                "name in use (query, q, q_proj, query_proj, wq, q_einsum, ...); "
                "describe it by mc.AttentionLayer with mc.HeadLeaf"
            )
        depth = len(paths.split(marker))
        seen = list(dict.fromkeys("/".join(path[-depth:]) for path in tree.paths))
        more = ", ..." if len(seen) > _SHOWN else ""
        raise ValueError(
            f"no attention layer found: no leaf is named '{marker}'. The params have "
            f"{', '.join(map(repr, seen[:_SHOWN]))}{more}; name theirs in the "
            "arguments of the preset, or leave attention= out for Flax's own attention"
        )

    return find


def holding(*markers: str) -> Callable[[Reading], list[paths.Path]]:
    """Looks for modules that hold a leaf of one of these names.

    A mask may hide a module as one, which leaves the beginning of the name in sight.
    """

    def modules(reading: Reading) -> list[paths.Path]:
        leaf_at = reading.leaf_at
        found = [
            path[:-n]
            for marker in map(paths.split, markers)
            for path in leaf_at
            for n in range(1, len(marker) + 1)
            if path[-n:] == marker[:n] and (n == len(marker) or path in leaf_at.hidden)
        ]
        return list(dict.fromkeys(found))

    return modules


def _flax_modules(reading: Reading) -> list[paths.Path]:
    """Modules with a query and a key; a query alone is no attention."""
    leaf_at, found = reading.leaf_at, []
    for module in holding("query/kernel")(reading):
        query, key = ((*module, name, "kernel") for name in ("query", "key"))
        # Hidden as one module next to a key in sight, it need not be a projection: what
        # is below it shows nowhere.
        is_seen = leaf_at.get(query) is not None
        if key in leaf_at and (is_seen or paths.is_masked(leaf_at[key])):
            found.append(module)
    return found


def _flax_leaves(role: str, module: Module) -> tuple[HeadLeaf, ...]:
    reading = module.reading
    kernels = (module.at(f"{name}/kernel") for name in ("query", "key"))
    # A plain kernel lacks the axis of heads. Counted as if it had one, it does not fit,
    # and QK-Clip refuses it; else its features would be taken for a stack of layers.
    is_plain = any(map(reading.shape, kernels))
    is_plain &= reading.has_heads(module.path) is False
    found = []
    for name, ndim in ((f"{role}/kernel", 3), (f"{role}/bias", 2)):
        if module.has(name):
            rank = len(reading.shape(module.at(name)))
            found.append(HeadLeaf(name, rank + 1 if is_plain else ndim))
    return tuple(found)


# `nn.MultiHeadDotProductAttention` of Linen, `nnx.MultiHeadAttention`, and what has
# kernels of `(features, heads, head_dim)` under the same names.
_FLAX = Preset(
    _flax_modules,
    query=partial(_flax_leaves, "query"),
    key=partial(_flax_leaves, "key"),
)


def flax_attention_layers(
    params: Any, *, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    """Finds the attention layers of stock Flax: modules with `query` and `key`.

    Works on Linen and NNX params, scanned layers included.

    **Arguments:**

    - `params`: of the model.
    - `stack_axes`: the axis of the layers in the leaves of a module that `nn.scan` or
        `nnx.vmap` stacks elsewhere than in front, such as `{"decoder/layers": 1}` or,
        in the last axis, -1. For `attention=`:
        `functools.partial(mc.flax_attention_layers, stack_axes=...)`.

    **Returns:** a list of [`AttentionLayer`][].

    **Raises:** `ValueError`, naming the layers, where query and key are normalized
    after their projection (`normalize_qk=True`): scaling the weights does nothing
    there. So too for projections with leaves besides kernel, bias and the factors of
    LoRA.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))  # features, heads, head_dim
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> (layer,) = mc.flax_attention_layers(params)
        >>> layer.path, layer.query[0].path
        ('attn', 'query/kernel')
    """
    return find_layers(paths.flatten(params), _FLAX, stack_axes=stack_axes)


def resolve_attention(
    attention: Attention | None, tree: paths.PathedTree
) -> list[AttentionLayer]:
    """Returns the layers, whichever way they were given, all leaves of which exist.

    **Raises:** `ValueError` for what is no sequence of layers, and as `checked` does.
    """
    if attention is None:
        return find_layers(tree, _FLAX)
    # A layer by itself is a sequence, too: a named tuple.
    found: Any = [attention] if isinstance(attention, AttentionLayer) else attention
    # A preset that was not called, `mc.named_attention`, is a function as well, but one
    # to a finder. Called with the params, it would complain of its own first argument.
    is_maker = getattr(found, "__annotations__", {}).get("return") == Finder
    if callable(found) and not is_maker:
        found = found(tree.whole())
    wanted = (
        "attention= must be a sequence of mc.AttentionLayer, or a function from params "
        "to one, such as a preset that is called: mc.named_attention()"
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


def named_attention(
    head_dim: int | None = None, *, stack_axes: StackAxes = IN_FRONT
) -> Finder:
    """Query and key of Flax, HuggingFace, bonsai, tunix, Gemma, Haiku, Equinox, Haliax.

    Projections are known by their names (`query`, `q_proj`, `wq`, `q_einsum` and the
    like), layouts by their shapes: with an axis of heads or without, features first or
    last, layers stacked in front or after the first axis.

    **Arguments:**

    - `head_dim`: size of a head; needed where kernels have no axis of heads.
    - `stack_axes`: as for [`flax_attention_layers`][], where the leaves do not show it.

    The statistics of a layer stand at the module that holds the projections.

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from the function returned, where it finds no layer, where
    `head_dim` is needed and for query and key that are normalized.

    !!! example

        An Equinox attention, `(heads * head_dim, features)`:

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> weight = {"weight": jnp.ones((4, 3))}
        >>> params = {"attention": {"query_proj": weight, "key_proj": weight}}
        >>> stats = {"attention": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> find = mc.named_attention(head_dim=2)
        >>> after = mc.clip_qk(params, stats, attention=find)["attention"]
        >>> after["query_proj"]["weight"][:, 0]
        Array([1. , 1. , 0.5, 0.5], dtype=float32)
    """
    if head_dim is not None:
        whole_number("head_dim", head_dim, 1)
    projections = Preset(
        partial(_modules_with, ("query",)),
        query=partial(_projection, "query", head_dim),
        key=partial(_projection, "key", head_dim),
    )
    return finder(projections, _EINSUMS, stack_axes=stack_axes)


def _modules_with(queries: Collection[str], reading: Reading) -> list[paths.Path]:
    """Modules with one of these queries, in Flax's words."""
    return [
        path[:-2]
        for path in reading.own
        if path[-1:] == ("kernel",) and "".join(path[-2:-1]) in queries
        # A model for search has a query, too. A key next to it makes it attention.
        if path[-2] != "query" or (*path[:-2], "key", "kernel") in reading.own
    ]


def _projection(
    role: str, head_dim: int | None, module: Module
) -> tuple[HeadLeaf, ...]:
    """The kernel of a projection in whichever layout its shape shows, and its bias."""
    reading, depth = module.reading, len(module.path)
    own = reading.own[module.at(f"{role}/kernel")]
    leaf, path = reading.leaves[own], "/".join(own[depth:])
    rank = len(leaf.axes)
    if not leaf.shape:  # hidden
        return (HeadLeaf(path, 3),)
    has_heads = rank > 2 and reading.has_heads(module.path)
    if has_heads is None:
        raise ValueError(
            f"'{paths.show(own)}' {leaf.shape} may have heads or be a stack of "
            "plain kernels; describe it by mc.AttentionLayer with mc.HeadLeaf"
        )
    # The reading turns axes so that inputs come first, and keeps where each is in the
    # leaf, stacks included. In one layer, only their order counts.
    order = sorted(leaf.axes)
    at = [order.index(axis) - rank for axis in leaf.axes]
    if has_heads:
        # (features, heads, head_dim), or groups of heads, as in penzai and Levanter.
        heads = at[1:-1]
        kernel = HeadLeaf(path, rank, axis=tuple(heads) if heads[1:] else heads[0])
    elif head_dim is None:
        raise ValueError(
            f"'{paths.show(own)}' has no axis of heads: give "
            "mc.named_attention(head_dim=...)"
        )
    else:
        # A head is head_dim consecutive outputs in all of them, features first or last.
        out = at[-1]
        split = (-1, head_dim)
        kernel = HeadLeaf(path, min(rank, 2), out - 1, split, split_axis=out)

    bias = reading.own.get(module.at(f"{role}/bias"))
    # tunix keeps `q_bias` next to `q_proj`, all others a bias in the projection.
    for other, in_params in reading.own.items() if bias is None else ():
        if other[:-1] == module.path:
            *stem, last = names.words(other[-1]) or ("",)
            if last == "bias" and names.projection("".join(stem)) == role:
                bias = bias or in_params
    shape = reading.layer(bias) if bias else ()
    if not bias or not shape:
        return (kernel,)
    path = "/".join(bias[depth:])
    if len(shape) > 1:
        axis = tuple(range(-len(shape), -1))
        return kernel, HeadLeaf(path, len(shape), axis=axis if axis[1:] else -2)
    # A flat bias may be next to a kernel with heads: their number is the kernel's.
    heads = kernel.heads(reading.layer(own)) or 1
    return kernel, HeadLeaf(path, 1, split=(heads, -1))


def _einsum(
    kernels: Sequence[tuple[str, int | None]], module: Module
) -> tuple[HeadLeaf, ...]:
    """The first of these kernels, or one part of it: `(part, heads, features, dim)`."""
    for name, part in kernels:
        if own := module.reading.own.get(module.at(f"{name}/kernel")):
            path = "/".join(own[len(module.path) :])
            if part is None:
                return (HeadLeaf(path, 3, axis=-3),)
            where = (-4, slice(part, part + 1))
            return (HeadLeaf(path, 4, axis=-3, part=where),)
    return ()


# Gemma's, in DeepMind's library and its ports: one einsum for key and value, or for all
# three where every head has a key of its own.
_EINSUMS = Preset(
    partial(_modules_with, ("q_einsum", "qkv_einsum")),
    query=partial(_einsum, (("q_einsum", None), ("qkv_einsum", 0))),
    key=partial(_einsum, (("kv_einsum", 0), ("qkv_einsum", 1))),
)


def check_none_overlooked(
    tree: paths.PathedTree, layers: Sequence[AttentionLayer]
) -> None:
    """Raises for attention that only its names show, where Flax's are looked for."""
    # Silent otherwise: a model in which nothing is found trains like any other, and no
    # head is ever clipped.
    reading = Reading(tree)
    leaf_at, known = reading.leaf_at, {paths.split(layer.path) for layer in layers}
    overlooked = [
        query
        for name in ("query", "q_einsum", "qkv_einsum")
        for module in _modules_with((name,), reading)
        if (query := reading.own[*module, name, "kernel"])[-2:] != ("query", "kernel")
        if module not in known and not paths.is_masked(leaf_at[query])
    ]
    if overlooked:
        raise ValueError(
            "QK-Clip finds modules that are called query and key, as in Flax, and "
            f"would not clip {paths.show_all(overlooked, at_most=3)}. Describe this "
            "attention: attention=mc.named_attention(), with head_dim=... if the "
            "kernels have no axis of heads. To leave it unclipped, pass "
            "attention=mc.flax_attention_layers"
        )
    # With a frozen kernel out of the params, as in a partition of trainable leaves, its
    # factors are all that is left of the query.
    alone = [
        path
        for path in leaf_at
        if names.low_rank_partner(path)
        and any(
            names.projection(path[n]) == "query" and path[:n] not in known
            for n in range(max(0, len(path) - 3), len(path) - 1)
        )
    ]
    if alone:
        raise ValueError(
            f"QK-Clip would not clip {paths.show_all(alone, at_most=3)}: it scales a "
            "kernel and its LoRA factors together, and needs both in the params. Put "
            "mc.qk_clip after optax.partition, where all are in sight, or use "
            "mc.muon. To leave it unclipped, pass attention=mc.flax_attention_layers"
        )
