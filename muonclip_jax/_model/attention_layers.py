"""Attention layers as QK-Clip sees them, and those that it cannot act on."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .._parameters import names, paths
from .head_leaf import HeadLeaf


class AttentionLayer(NamedTuple):
    """One attention layer: its statistic, and the leaves that QK-Clip scales by it.

    The statistic of the layer at `path` is the leaf `<path>/max_logits` of shape
    `(*stack, heads)`; every leaf named here has the axes of `stack` in front.

    **Arguments:**

    - `path`: of the module, from the root of the params.
    - `query`, `key`: leaves that share the scaling, `gamma**alpha` and
        `gamma**(1-alpha)`. A key with fewer heads, shared by several query heads, is
        left alone and `query` is scaled by the whole `gamma`.
    - `rotary_query`: leaves whose partner is a key that all heads share and that stays
        as it is, such as the rotary part of multi-head latent attention: the whole
        `gamma` scales them for every `alpha`. A query whose key no parameter scales, or
        such a key, is one, too; the layer then has neither `query` nor `key`.
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
        path = paths.split(leaf.path.removeprefix("/"))
        return path if leaf.path.startswith("/") else paths.split(self.path) + path


#: The fields of an `AttentionLayer` that hold leaves.
ROLES = ("query", "rotary_query", "key")

#: Layers, or a function that finds them in the params.
Attention = Sequence[AttentionLayer] | Callable[[Any], Sequence[AttentionLayer]]

#: What presets return.
Finder = Callable[[Any], list[AttentionLayer]]


def show_layer(layer: AttentionLayer) -> str:
    """Writes the path of a layer."""
    return paths.show_module(paths.split(layer.path))


def checked(
    layers: list[AttentionLayer], leaf_at: paths.LeafAt
) -> list[AttentionLayer]:
    """The layers, if each names a query, a key and leaves that are there and its own.

    **Raises:** `ValueError`, naming layers and leaves, if not, and for attention that
    QK-Clip cannot act on.
    """
    for layer in layers:
        is_one_sided = layer.rotary_query and not (layer.query or layer.key)
        for role in ("query", "key") if not is_one_sided else ():
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
    # Scaled for two layers, entries would get the product of both scales, and neither
    # layer would end at its threshold. One layer may name a leaf twice: a fused kernel
    # is query and key, in different parts; and layers may have parts of one leaf.
    owners: dict[paths.Path, list[tuple[int, HeadLeaf]]] = {}
    for i, layer in enumerate(layers):
        for leaf in layer.leaves:
            path = layer.path_of(leaf)
            for other, known in owners.setdefault(path, []):
                if other != i and not leaf.is_apart_from(known):
                    first, second = show_layer(layers[other]), show_layer(layer)
                    raise ValueError(
                        f"attention layers '{first}' and '{second}' both name "
                        f"'{paths.show(path)}'; a leaf is scaled by one layer"
                    )
            owners[path].append((i, leaf))
    _check_not_normalized(layers, leaf_at)
    return layers


def with_low_rank(
    layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt
) -> list[AttentionLayer]:
    """Adds the factors of LoRA that give outputs: `W + A B` scales as `W` and `B` do.

    **Raises:** `ValueError` for leaves of projections of which it is not known what
    they do.
    """
    # LoRA (arXiv:2106.09685): of A and B, it is B that has the heads, as the kernel.
    named: set[paths.Path] = set()
    kernels: dict[paths.Path, dict[tuple[int, int], HeadLeaf]] = {}
    for i, layer in enumerate(layers):
        depth = len(paths.split(layer.path))
        for n, role in enumerate(ROLES):
            # A kernel and its bias are in one module, and the kernel is the first.
            for leaf in getattr(layer, role)[::-1]:
                path = layer.path_of(leaf)
                named.add(path)
                # The layer itself is no projection: value and output are there, too.
                # Nor is a norm, whose gain all heads share.
                if len(path) > depth + 1 and leaf.axis is not None:
                    kernels.setdefault(path[:-1], {})[i, n] = leaf
    unnamed: list[tuple[int, int, paths.Path, HeadLeaf]] = []
    for path in leaf_at:
        if path in named:
            continue
        starts = [path[:n] for n in range(1, len(path))]
        modules = [start for start in starts if start in kernels]
        # Linen's WeightNorm keeps `WeightNorm_0/query/kernel/scale` next to `query`:
        # the path of the kernel, after one more module somewhere on the way.
        for start in starts if not modules else ():
            if start[-1] in names.KERNELS:
                without = [start[:i] + start[i + 1 :] for i in range(len(start) - 2)]
                modules += [kernel[:-1] for kernel in without if kernel in named]
        of_module = kernels.get(modules[0], {}) if modules else {}
        unnamed += [(i, n, path, leaf) for (i, n), leaf in of_module.items()]
    found, strays = list(layers), {}
    for i, n, path, leaf in sorted(unnamed, key=lambda entry: entry[:2]):
        partner, is_first = names.low_rank_partner(path) or ((), False)
        pair = (path, partner) if is_first else (partner, path)
        own = layers[i].path_of(leaf)
        if partner not in leaf_at or not _is_low_rank(leaf, own, pair, leaf_at):
            strays.setdefault(i, []).append(path)
        elif not is_first:
            below = path[len(paths.split(layers[i].path)) :]
            leaves = (*getattr(found[i], ROLES[n]), leaf._replace(path="/".join(below)))
            found[i] = found[i]._replace(**{ROLES[n]: leaves})
    if strays:
        # A gain, a mask or an adapter under another name may undo the scaling or need
        # the same, and the logits would tell nobody.
        first = min(strays)
        raise ValueError(
            f"QK-Clip cannot act on '{show_layer(layers[first])}': it does not know "
            f"what {paths.show_all(dict.fromkeys(strays[first]))} do to the logits, so "
            "scaling the kernels may not be enough. It knows kernel, bias, and LoRA as "
            "lora_a (..., rank) and lora_b (rank, outputs...) where a kernel has its "
            "outputs last. Name all leaves that scale query and key by mc.HeadLeaf in "
            "an mc.AttentionLayer, or use mc.muon without QK-Clip"
        )
    return found


def _is_low_rank(
    leaf: HeadLeaf,
    own: paths.Path,
    pair: tuple[paths.Path, paths.Path],
    leaf_at: paths.LeafAt,
) -> bool:
    """Checks that two factors make a kernel like the one that they are next to.

    **Raises:** `ValueError` where a mask hides one of them.
    """
    kernel, first, second = (leaf_at[path] for path in (own, *pair))
    # A mask may hide a layer, but only whole: QK-Clip then leaves all of it alone.
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
    # B is described as its kernel is, with the rank where the kernel has its inputs:
    # the first axis of a layer.
    shape, rank = tuple(kernel.shape), len(kernel.shape)
    at = rank + leaf.stack_of(rank).axis(-leaf.ndim, rank)
    expected = (*shape[:at], *first.shape[-1:], *shape[at + 1 :])
    # Where the kernel has its outputs first, so has its B, and that axis is the heads'.
    sizes = leaf.ndim + max(len(leaf.split) - 1, 0)
    outputs_last = leaf.split_axis == -1 and min(leaf.head_axes) > -sizes
    return outputs_last and tuple(second.shape) == expected


def _check_not_normalized(
    layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt
) -> None:
    """Raises for norms next to the projections of a layer that are not its leaves."""
    norms: dict[paths.Path, dict[str, str]] = {}
    for path in leaf_at:
        for depth, name in enumerate(path):
            if part := names.normalized_part(name):
                norms.setdefault(path[:depth], {})[name] = part
    strays: dict[str, list[str]] = {}
    for layer in layers if norms else ():
        leaves = [layer.path_of(leaf) for leaf in layer.leaves]
        if all(paths.is_masked(leaf_at[path]) for path in leaves):
            continue
        own = {path[:n] for path in leaves for n in range(len(path) + 1)}
        depth = len(paths.split(layer.path))
        found = set()
        for module in {path[:n] for path in leaves for n in range(depth, len(path))}:
            here = norms.get(module, {})
            # `q_norm` may be either kind. It is the latent's where a layer is known to
            # be latent attention, or has the norm of the latent key and value.
            is_latent = layer.rotary_query or "latent key and value" in here.values()
            of_qk = {"query or key", *(() if is_latent else ("query, latent or not",))}
            found |= {x for x in here if here[x] in of_qk and (*module, x) not in own}
        strays |= {layer.path: sorted(found)} if found else {}
    if strays:
        # Silent otherwise: the statistics would stay where they are, and step after
        # step the kernels would shrink.
        modules = ", ".join(map(repr, strays))
        found = dict.fromkeys(name for each in strays.values() for name in each)
        raise ValueError(
            f"QK-Clip cannot act on {modules}: query and key are normalised after the "
            f"projection ({', '.join(found)}), so scaling their weights leaves the "
            "logits as they are. Use mc.muon without QK-Clip, or clip the gain of the "
            "norms instead, unless it is stored as a difference from one, as in Gemma: "
            f"attention=mc.normalised_attention({_arguments_for(found)})"
        )


def _arguments_for(norms: Iterable[str]) -> str:
    """The arguments of the preset, where one norm is the query's and one the key's."""
    named = {
        role: [x for x in norms if re.search(f"(^|[^a-z]){role[0]}", x.lower())]
        for role in ("query", "key")
    }
    if any(len(found) != 1 for found in named.values()):
        return ""
    return ", ".join(f'{role}="{found[0]}"' for role, found in named.items())
