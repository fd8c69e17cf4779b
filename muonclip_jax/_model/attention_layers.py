"""Which leaves carry the heads of which attention layer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import paths
from .flax_names import FlaxTree
from .head_leaf import HeadLeaf


class AttentionLayer(NamedTuple):
    """One attention layer: a statistic and the leaves that answer to it.

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

# Children that normalise query or key after the projection, in Flax and by custom.
_QK_NORMS = (
    *("query_ln", "key_ln", "query_norm", "key_norm"),
    *("q_norm", "k_norm", "q_ln", "k_ln", "norm_q", "norm_k"),
)


def flax_attention_layers(
    params: Any, *, stack_axes: paths.StackAxes = paths.IN_FRONT
) -> list[AttentionLayer]:
    """Finds the attention layers of stock Flax: modules with `query` and `key`.

    Works on Linen and NNX params, scanned layers included.

    **Arguments:**

    - `params`: of the model.
    - `stack_axes`: the axis of the layers in the leaves of a module that `nn.scan` or
        `nnx.vmap` stacks elsewhere than in front, such as `{"decoder/layers": 1}`. For
        `attention=`: `functools.partial(mc.flax_attention_layers, stack_axes=...)`.

    **Raises:** `ValueError`, naming the layers, where query and key are normalised
    after their projection (`normalize_qk=True`): scaling the weights does nothing
    there.
    """
    return _flax_layers(paths.flatten(params), stack_axes)


def resolve_attention(
    attention: Attention | None, tree: paths.PathedTree
) -> list[AttentionLayer]:
    """Returns the layers, whichever way they were given, all leaves of which exist."""
    if attention is None:
        return _flax_layers(tree)
    if isinstance(attention, AttentionLayer):
        attention = [attention]
    layers = list(attention(tree.whole()) if callable(attention) else attention)
    for layer in layers:
        for role in ("query", "key"):
            if not getattr(layer, role):
                raise ValueError(f"attention layer '{layer.path}' names no {role}")
    known = set(tree.paths)
    named = [layer.path_of(leaf) for layer in layers for leaf in layer.leaves]
    absent = [path for path in named if path not in known]
    if absent:
        raise ValueError(
            f"attention= names {paths.show_all(absent)}, which the params lack"
        )
    return layers


def with_stack_axes(
    layers: Sequence[AttentionLayer],
    tree: paths.PathedTree,
    stack_axes: paths.StackAxes,
) -> list[AttentionLayer]:
    """Tells every leaf of the layers where its stack lies."""
    paths.check_stack_axes(tree, stack_axes)

    def told(layer: AttentionLayer, leaves: tuple[HeadLeaf, ...]):
        axis = paths.stack_axis_of(paths.split(layer.path), stack_axes)
        return tuple(leaf._replace(stack_axis=axis) for leaf in leaves)

    return [
        layer._replace(**{role: told(layer, getattr(layer, role)) for role in ROLES})
        for layer in layers
    ]


def _flax_layers(
    tree: paths.PathedTree, stack_axes: paths.StackAxes = paths.IN_FRONT
) -> list[AttentionLayer]:
    names = FlaxTree(tree)
    modules = names.attention_modules()
    normalised = [
        m for m in modules if any(names.has_module((*m, n)) for n in _QK_NORMS)
    ]
    if normalised:
        raise ValueError(
            f"QK-Clip cannot act on {paths.show_all(normalised)}: query and key are "
            "normalised after the projection (normalize_qk), so scaling their weights "
            "leaves the logits as they are. Use mc.muon without QK-Clip, or clip the "
            "gain of the norms instead, attention=mc.normalised_attention()"
        )
    layers = [_flax_layer(names, module) for module in modules]
    return with_stack_axes(layers, tree, stack_axes)


def _flax_layer(names: FlaxTree, module: paths.Path) -> AttentionLayer:
    def leaves(projection: str) -> tuple[HeadLeaf, ...]:
        return tuple(
            HeadLeaf(f"{projection}/{name}", ndim)
            for name, ndim in (("kernel", 3), ("bias", 2))
            if names.has_leaf((*module, projection, name))
        )

    return AttentionLayer("/".join(module), leaves("query"), leaves("key"))
