"""Attention layers as QK-Clip sees them, and those that it cannot act on."""

from collections.abc import Callable, Sequence
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

#: What to say where names do not tell.
READ_IT = "model=mc.read_model(loss, params, *batch)"


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
        modules = ", ".join(repr(paths.show_module(paths.split(x))) for x in strays)
        found = dict.fromkeys(name for each in strays.values() for name in each)
        raise ValueError(
            f"QK-Clip cannot act on {modules}: query and key are normalized after the "
            f"projection ({', '.join(found)}), so scaling their weights leaves the "
            f"logits as they are. With {READ_IT} it scales the gains of the norms, if "
            "the logits are linear in them; else use mc.muon without QK-Clip"
        )
