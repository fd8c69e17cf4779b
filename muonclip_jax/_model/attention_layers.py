"""Which leaves carry the heads of which attention layer."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._options import shown
from .._parameters import names, paths
from .._parameters.reading import Reading
from .._parameters.stacks import IN_FRONT, StackAxes
from .head_leaf import HeadLeaf
from .qk_norms import QKNorms


class AttentionLayer(NamedTuple):
    """One attention layer: its statistic, and the leaves that QK-Clip scales by it.

    The statistic of the layer at `path` is the leaf `<path>/max_logits` of shape
    `(*stack, heads)`; every leaf named here has the axes of `stack` in front.

    **Arguments:**

    - `path`: of the module, from the root of the params.
    - `query`, `key`: leaves that share the scaling, `gamma**alpha` and
        `gamma**(1-alpha)`. A key with fewer heads, shared by several query heads, is
        left alone and `query` takes the whole `gamma`.
    - `rotary_query`: leaves whose partner is a key that all heads share and that stays
        as it is, such as the rotary part of multi-head latent attention: they take the
        whole `gamma` for every `alpha`.
    - `threshold`: of this layer, where it is not that of [`qk_clip`][]: a number, an
        array with one for each layer of the stack, or a schedule.

    !!! example

        A layer with its own names and kernels of (heads, features, head_dim):

        >>> import muonclip_jax as mc
        >>> layer = mc.AttentionLayer(
        ...     path="decoder/attn",
        ...     query=(mc.HeadLeaf("wq", ndim=3, axis=-3), mc.HeadLeaf("bq", ndim=2)),
        ...     key=(mc.HeadLeaf("wk", ndim=3, axis=-3), mc.HeadLeaf("bk", ndim=2)),
        ... )
        >>> tx = mc.qk_clip(attention=[layer])
    """

    path: str
    query: tuple[HeadLeaf, ...]
    key: tuple[HeadLeaf, ...]
    rotary_query: tuple[HeadLeaf, ...] = ()
    threshold: Any = None

    @property
    def leaves(self) -> tuple[HeadLeaf, ...]:
        return self.query + self.rotary_query + self.key

    def path_of(self, leaf: HeadLeaf) -> paths.Path:
        """The path of one of its leaves from the root of the params."""
        return paths.split(self.path) + paths.split(leaf.path)


#: The fields of an `AttentionLayer` that hold leaves.
ROLES = ("query", "rotary_query", "key")

#: Layers, or a function that finds them in the params.
Attention = Sequence[AttentionLayer] | Callable[[Any], Sequence[AttentionLayer]]


#: What presets return.
Finder = Callable[[Any], list[AttentionLayer]]


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

    **Raises:** `ValueError`, naming the layers, where query and key are normalised
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
    tree = paths.flatten(params)
    return checked(_flax_layers(tree, stack_axes), tree.by_path())


def resolve_attention(
    attention: Attention | None, tree: paths.PathedTree
) -> list[AttentionLayer]:
    """Returns the layers, whichever way they were given, all leaves of which exist."""
    if attention is None:
        attention = _flax_layers(tree)
    if isinstance(attention, AttentionLayer):
        attention = [attention]
    found: Any = attention
    if callable(attention):
        # What a preset returns, and so the preset itself was handed over.
        if getattr(attention, "__annotations__", {}).get("return") == Finder:
            raise ValueError(f"{_WHAT_ATTENTION_IS}; got {shown(attention)}")
        found = attention(tree.whole())
    return checked(_as_layers(found), tree.by_path())


_WHAT_ATTENTION_IS = (
    "attention= must be a sequence of mc.AttentionLayer, or a function from params to "
    "one, such as a preset that is called: mc.named_attention()"
)


def _as_layers(found: Any) -> list[AttentionLayer]:
    """A list of layers whose roles are tuples of leaves; `ValueError` if it is none."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError(f"{_WHAT_ATTENTION_IS}; got {shown(found)}")
    for layer in found:
        if not isinstance(layer, AttentionLayer):
            raise ValueError(f"{_WHAT_ATTENTION_IS}; got a sequence with {layer!r}")
        for role in ROLES:
            leaves = getattr(layer, role)
            is_leaf = isinstance(leaves, HeadLeaf)
            is_tuple = isinstance(leaves, tuple) and not is_leaf
            if not is_tuple or not all(isinstance(x, HeadLeaf) for x in leaves):
                raise ValueError(
                    f"{role} of attention layer '{show_layer(layer)}' must be a tuple "
                    f"of mc.HeadLeaf, such as (mc.HeadLeaf('query/kernel', 3),); got "
                    f"{leaves!r}"
                )
    return list(found)


def checked(
    layers: list[AttentionLayer], leaf_at: paths.LeafAt
) -> list[AttentionLayer]:
    """The layers, if each names a query, a key and leaves that are there and its own.

    **Raises:** `ValueError`, naming layers and leaves, if not, and for attention that
    QK-Clip cannot act on.
    """
    for layer in layers:
        for role in ("query", "key"):
            if not getattr(layer, role):
                raise ValueError(
                    f"attention layer '{show_layer(layer)}' names no {role}"
                )
    named = [layer.path_of(leaf) for layer in layers for leaf in layer.leaves]
    absent = [path for path in named if path not in leaf_at]
    if absent:
        raise ValueError(
            f"attention= names {paths.show_all(absent)}, which the params lack"
        )
    _check_one_owner(layers)
    _check_not_normalised(layers, leaf_at)
    return layers


def as_found(
    layers: Sequence[AttentionLayer], reading: Reading
) -> list[AttentionLayer]:
    """Tells every leaf where its stack is, and adds the factors of LoRA.

    **Raises:** `ValueError` for projections of which other leaves are a part.
    """
    placed = [
        layer._replace(
            **{
                role: tuple(
                    x._replace(stack_axis=reading.stacks[layer.path_of(x)].start)
                    if layer.path_of(x) in reading.stacks
                    else x
                    for x in getattr(layer, role)
                )
                for role in ROLES
            }
        )
        for layer in layers
    ]
    beside = _beside_kernels(placed, reading.leaf_at)
    return [_with_factors(layer, beside, reading.leaf_at) for layer in placed]


def _beside_kernels(
    layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt
) -> dict[paths.Path, list[paths.Path]]:
    """What no layer names in the modules of projections, and what is about a kernel.

    Linen's WeightNorm keeps a `query/kernel/scale` in a module of its own.
    """
    depth_of = {
        layer.path_of(leaf): len(paths.split(layer.path)) + 1
        for layer in layers
        for leaf in layer.leaves
    }
    modules = {path[:-1] for path, depth in depth_of.items() if len(path) > depth}
    found: dict[paths.Path, list[paths.Path]] = {}
    for path in leaf_at:
        if path not in depth_of:
            starts = [path[:n] for n in range(1, len(path))]
            kernels = [
                start[:i] + start[i + 1 :]
                for start in starts
                if start[-1] in names.KERNELS
                for i in range(len(start) - 2)
            ]
            around = [start for start in starts if start in modules]
            around += [kernel[:-1] for kernel in kernels if kernel in depth_of]
            if around:
                found.setdefault(around[0], []).append(path)
    return found


def _with_factors(
    layer: AttentionLayer,
    beside: Mapping[paths.Path, Sequence[paths.Path]],
    leaf_at: paths.LeafAt,
) -> AttentionLayer:
    """With the factors of LoRA that give outputs: `W + A B` scales as `W` and `B` do.

    **Raises:** `ValueError` for leaves of which it is not known what they do.
    """
    depth, strays = len(paths.split(layer.path)), []
    whole = layer
    for role in ROLES:
        # The kernel comes first; its bias is in the same module.
        by_module = {layer.path_of(x)[:-1]: x for x in getattr(layer, role)[::-1]}
        for module, leaf in by_module.items():
            for path in beside.get(module, ()) if leaf.axis is not None else ():
                pair = _factors(path, leaf_at)
                if not pair or not _fit(leaf, layer.path_of(leaf), pair, leaf_at):
                    strays.append(path)
                elif path == pair[1]:
                    factor = leaf._replace(path="/".join(path[depth:]))
                    both = (*getattr(whole, role), factor)
                    whole = whole._replace(**{role: both})
    if strays:
        raise ValueError(
            f"QK-Clip cannot act on '{show_layer(layer)}': it does not know what "
            f"{paths.show_all(dict.fromkeys(strays))} do to the logits, so scaling the "
            "kernels may not be enough. It knows kernel, bias, and LoRA as lora_a "
            "(..., rank) and lora_b (rank, outputs...) where a kernel has its outputs "
            "last. Name all leaves that scale query and key by mc.HeadLeaf in an "
            "mc.AttentionLayer, or use mc.muon without QK-Clip"
        )
    return whole


def _factors(
    path: paths.Path, leaf_at: paths.LeafAt
) -> tuple[paths.Path, paths.Path] | None:
    """The two factors of LoRA of which a leaf is one, inputs first."""
    found = names.low_rank_partner(path)
    if found is None or found[0] not in leaf_at:
        return None
    partner, is_first = found
    return (path, partner) if is_first else (partner, path)


def _fit(
    leaf: HeadLeaf,
    own: paths.Path,
    pair: tuple[paths.Path, paths.Path],
    leaf_at: paths.LeafAt,
) -> bool:
    """Whether two factors make a kernel like the one that they are next to.

    **Raises:** `ValueError` where a mask hides one of them.
    """
    kernel, first, second = (leaf_at[path] for path in (own, *pair))
    hidden = [path for path in (own, *pair) if paths.is_masked(leaf_at[path])]
    if hidden:
        if len(hidden) < 3:
            raise ValueError(
                f"the mask hides {paths.show_all(hidden)}, but QK-Clip scales a kernel "
                f"and its LoRA factors, here {paths.show_all((own, *pair))}, together. "
                "Put it behind the partition, where all are in sight: optax.chain("
                "optax.partition(...), mc.qk_clip())"
            )
        return True
    shape, rank = tuple(kernel.shape), len(kernel.shape)
    sizes = leaf.ndim + max(len(leaf.split) - 1, 0)
    outputs_last = leaf.split_axis == -1 and min(leaf.head_axes) > -sizes
    at = rank + leaf.stack_of(rank).axis(-leaf.ndim, rank)
    expected = (*shape[:at], *first.shape[-1:], *shape[at + 1 :])
    return outputs_last and tuple(second.shape) == expected


def _check_one_owner(layers: Sequence[AttentionLayer]) -> None:
    owner: dict[paths.Path, int] = {}
    for i, layer in enumerate(layers):
        for path in map(layer.path_of, layer.leaves):
            other = owner.setdefault(path, i)
            if other != i:
                first, second = show_layer(layers[other]), show_layer(layer)
                raise ValueError(
                    f"attention layers '{first}' and '{second}' both name "
                    f"'{paths.show(path)}'; a leaf is scaled by one layer"
                )


def show_layer(layer: AttentionLayer) -> str:
    """Writes the path of a layer."""
    return paths.show_module(paths.split(layer.path))


def _check_not_normalised(
    layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt
) -> None:
    norms = QKNorms(leaf_at)
    strays: dict[str, list[str]] = {}
    for layer in layers:
        own = [layer.path_of(leaf) for leaf in layer.leaves]
        if all(paths.is_masked(leaf_at[path]) for path in own):
            continue
        latent = bool(layer.rotary_query)
        found = norms.beside(paths.split(layer.path), own, latent=latent)
        strays |= {layer.path: found} if found else {}
    if strays:
        modules = ", ".join(map(repr, strays))
        found = dict.fromkeys(name for names in strays.values() for name in names)
        raise ValueError(
            f"QK-Clip cannot act on {modules}: query and key are normalised after the "
            f"projection ({', '.join(found)}), so scaling their weights leaves the "
            "logits as they are. Use mc.muon without QK-Clip, or clip the gain of the "
            "norms instead, unless it is stored as a difference from one, as in Gemma: "
            f"attention=mc.normalised_attention({_named_norms(found)})"
        )


def _named_norms(found: Iterable[str]) -> str:
    """The arguments of the preset, where one norm is the query's and one the key's."""
    named = {
        role: [x for x in found if re.search(f"(^|[^a-z]){role[0]}", x.lower())]
        for role in ("query", "key")
    }
    if any(len(names) != 1 for names in named.values()):
        return ""
    return ", ".join(f'{role}="{names[0]}"' for role, names in named.items())


def _flax_layers(
    tree: paths.PathedTree, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    reading = Reading(tree, stack_axes)
    leaf_at = reading.leaf_at
    layers = [
        _flax_layer(module, reading)
        for module in modules_with(("query", "kernel"), leaf_at)
        if _is_attention(module, leaf_at)
    ]
    return as_found(layers, reading)


def modules_with(mark: paths.Path, leaf_at: paths.LeafAt) -> list[paths.Path]:
    """The modules that hold a path `mark`, or the part of it that is in sight."""
    modules = [
        path[:-n]
        for path in leaf_at
        for n in range(1, len(mark) + 1)
        if path[-n:] == mark[:n] and (n == len(mark) or path in leaf_at.hidden)
    ]
    return list(dict.fromkeys(modules))


def _is_attention(module: paths.Path, leaf_at: paths.LeafAt) -> bool:
    """Whether there is a key; a query hidden beside one in sight is no projection."""
    query, key = ((*module, name, "kernel") for name in ("query", "key"))
    if key not in leaf_at:
        return False
    return leaf_at.get(query) is not None or paths.is_masked(leaf_at[key])


def _flax_layer(module: paths.Path, reading: Reading) -> AttentionLayer:
    kernels = ((*module, name, "kernel") for name in ("query", "key"))
    is_plain = any(map(reading.shape, kernels))
    is_plain &= reading.has_heads(module) is False

    def leaves(projection: str) -> tuple[HeadLeaf, ...]:
        return tuple(
            # A plain kernel lacks the axis of heads, which QK-Clip refuses.
            HeadLeaf(
                f"{projection}/{name}",
                len(reading.shape(path)) + 1 if is_plain else ndim,
            )
            for name, ndim in (("kernel", 3), ("bias", 2))
            if (path := (*module, projection, name)) in reading.leaf_at
        )

    return AttentionLayer("/".join(module), leaves("query"), leaves("key"))
