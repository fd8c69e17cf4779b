"""Attention layers for QK-Clip: described, read from the model, or found by name.

Names find the layers of stock Flax. A layer found by name has all leaves that scale its
logits. Anything that only looks like one raises an error that points to `read_model`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._options import shown
from .._parameters import names, paths
from .._parameters.fit import check_params
from .._parameters.layer_stacks import IN_FRONT, StackAxes
from .._parameters.leaf_rules import ByNames
from .._parameters.names import LATENT_KEY_NORM, LATENT_QUERY_NORM, QK_NORM
from .._parameters.paths import is_masked
from .head_leaf import HeadLeaf
from .owned_leaf import OwnedLeaf


#: A leaf written by hand, or found by a reading.
Leaf = HeadLeaf | OwnedLeaf


class AttentionLayer(NamedTuple):
    """An attention layer: its statistic, and the leaves that QK-Clip scales.

    The statistic of the layer at `path` is the leaf `<path>/max_logits` of shape
    `(*stack, heads)`: the largest logits of query and key. A leaf named here has the
    axes of `stack`, unless the layers of the stack share it. Leaves are
    [`HeadLeaf`][]s; a reading's leaves list the head of every entry.

    **Arguments:**

    - `path`: path of the module, from the root of the params.
    - `query`, `key`: leaves that share the scaling, `gamma**alpha` and
        `gamma**(1-alpha)`. If several query heads or several layers share the key,
        the key stays and `query` is scaled by the whole `gamma`; likewise for a shared
        query. A leaf that is both is scaled by `gamma**0.5`, for every `alpha`. If
        these rules leave nothing to scale in a layer, it is clipped together with the
        layers that share its leaves, by their smallest `gamma`.
    - `rotary_query`: leaves of a query whose key stays because all heads share it, such
        as the rotary part of multi-head latent attention. They are scaled by the whole
        `gamma` for every `alpha`. If no parameter scales the key (or the query), list
        the leaves of the other here, and leave `query` and `key` empty.
    - `threshold`: threshold of this layer, if it differs from the one of [`qk_clip`][]:
        a number, an array with a number per layer of the stack, or a schedule.

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
    query: tuple[Leaf, ...]
    key: tuple[Leaf, ...]
    rotary_query: tuple[Leaf, ...] = ()
    threshold: Any = None

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.query + self.rotary_query + self.key

    def path_of(self, leaf: Leaf) -> paths.Path:
        """Returns the path of a leaf from the root of the params."""
        path = paths.split(leaf.path.removeprefix("/"))
        return path if leaf.path.startswith("/") else paths.split(self.path) + path


#: The fields of an `AttentionLayer` that hold leaves.
ROLES = ("query", "rotary_query", "key")

#: Layers, or a function that finds them in the params.
Attention = Sequence[AttentionLayer] | Callable[[Any], Sequence[AttentionLayer]]


#: The advice in errors where names do not decide.
READ_IT = "model=mc.read_model(loss, params, *batch)"


def show_layer(layer: AttentionLayer) -> str:
    """Returns the path of a layer as text."""
    return paths.show_module(paths.split(layer.path))


def flax_attention_layers(
    params: Any, *, stack_axes: StackAxes = IN_FRONT
) -> list[AttentionLayer]:
    """Finds the attention layers of stock Flax: modules with `query` and `key`.

    Works on Linen and NNX params, including scanned layers. For all other attention use
    [`read_model`][].

    **Arguments:**

    - `params`: params of the model.
    - `stack_axes`: the axis along which `nn.scan` or `nnx.vmap` stacks the layers of a
        module, if it is not the first: such as `{"decoder/layers": 1}`, or -1 for the
        last axis. For `attention=` write
        `functools.partial(mc.flax_attention_layers, stack_axes=...)`.

    **Returns:** a list of [`AttentionLayer`][].

    **Raises:** `ValueError`, naming the layers, if query and key are normalized after
    their projection (`normalize_qk=True`), because scaling the weights then has no
    effect; and if projections have leaves besides kernel and bias, such as LoRA's.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))  # features, heads, head_dim
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> (layer,) = mc.flax_attention_layers(params)
        >>> layer.path, layer.query[0].path
        ('attn', 'query/kernel')
    """
    if getattr(params, "shape", None) == ():
        # A number has no layers, so nothing would be clipped, without an error.
        raise ValueError(
            "flax_attention_layers needs the params, got a number, such as the step: "
            "optax.inject_hyperparams calls every function as a schedule, unless it "
            'is given static_args=("attention",)'
        )
    check_params("flax_attention_layers(params)", params)
    return _by_names(ByNames(paths.flatten(params), stack_axes))


def _by_names(named: ByNames) -> list[AttentionLayer]:
    modules, leaf_at = {}, named.leaf_at
    for path in leaf_at:
        # A mask may hide a whole projection; only its name is then left. If the mask
        # shows the key, the hidden leaf need not be a projection.
        is_hidden = path[-1:] == ("query",) and path in leaf_at.hidden
        module = path[:-1] if is_hidden else path[:-2]
        # A query without a key is not attention: search models have one, too.
        key = (*module, "key", "kernel")
        is_query = is_hidden or path[-2:] == ("query", "kernel")
        if is_query and key in leaf_at and (not is_hidden or is_masked(leaf_at[key])):
            modules[module] = None
    layers = []
    for module in modules:
        leaves: dict[str, list[Leaf]] = {"query": [], "key": []}
        # A plain kernel lacks the axis of heads. Count one more axis, so that it does
        # not fit and QK-Clip refuses it. Otherwise its features would pass for layers.
        is_plain = named.lacks_heads((*module, "query", "kernel"))
        for role, members in leaves.items():
            for name, ndim in (("kernel", 3), ("bias", 2)):
                path = (*module, role, name)
                if path in leaf_at:
                    rank = len(getattr(leaf_at[path], "shape", ()))
                    # Per leaf, since a stack in the last axis begins at different axes
                    # of a kernel and its bias.
                    start = named.stacks[path].start if path in named.stacks else 0
                    ndim = rank + 1 if is_plain and rank else ndim
                    members.append(HeadLeaf(f"{role}/{name}", ndim, stack_axis=start))
        roles = {role: tuple(members) for role, members in leaves.items()}
        layers.append(AttentionLayer("/".join(module), **roles))
    _check_no_others(layers, leaf_at)
    _check_not_normalized(layers, leaf_at)
    return layers


def _check_no_others(layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt) -> None:
    """Raises if a projection has leaves besides its kernel and its bias."""
    by_leaf = {layer.path_of(leaf): layer for layer in layers for leaf in layer.leaves}
    by_module = {path[:-1]: layer for path, layer in by_leaf.items()}
    strays: dict[AttentionLayer, list[paths.Path]] = {}
    for path in leaf_at:
        touched = [by_module.get(path[:n]) for n in range(1, len(path))]
        # Linen's WeightNorm keeps `WeightNorm_0/query/kernel/scale` next to `query`:
        # the path of the kernel with one more module in it.
        n = path.index("kernel") + 1 if "kernel" in path[:-1] else 0
        touched += [by_leaf.get(path[:i] + path[i + 1 : n]) for i in range(n - 2)]
        for layer in touched if path not in by_leaf else ():
            strays.setdefault(layer, []).append(path) if layer else None
    for layer, others in strays.items():
        # A gain, a mask or an adapter may undo the scaling, or need the same scaling.
        # The logits would not show it.
        raise ValueError(
            f"QK-Clip cannot act on '{show_layer(layer)}' by names: they do not say "
            f"what {paths.show_all(others)} do to the logits, so scaling the kernels "
            f"may not be enough. Use {READ_IT}; or list all leaves that scale query "
            "and key as mc.HeadLeaf in an mc.AttentionLayer"
        )


def find_layers(
    attention: Attention | None, tree: paths.PathedTree
) -> list[AttentionLayer]:
    """Returns the layers as they are given, or those that names show.

    **Raises:** `ValueError` if `attention` is not a sequence of layers, if leaves are
    missing, if two layers have one path, or if QK-Clip cannot act on a layer.
    """
    if attention is None:
        named = ByNames(tree)
        layers = _by_names(named)
        _check_none_overlooked(named, layers)
        return layers
    # A single layer is a named tuple, and would pass for a sequence.
    given: Any = [attention] if isinstance(attention, AttentionLayer) else attention
    if callable(given):
        given = given(tree.rebuilt())
    wanted = (
        "attention= must be a sequence of mc.AttentionLayer, or a function from params "
        "to one"
    )
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{wanted}; got {shown(given)}")
    for layer in given:
        if not isinstance(layer, AttentionLayer):
            raise ValueError(f"{wanted}; got a sequence with {layer!r}")
        for role in ROLES:
            leaves = getattr(layer, role)
            # A bare leaf is a named tuple, too, of strings and numbers.
            is_tuple = isinstance(leaves, tuple) and not isinstance(leaves, HeadLeaf)
            if not is_tuple or not all(isinstance(x, Leaf) for x in leaves):
                raise ValueError(
                    f"{role} of attention layer '{show_layer(layer)}' must be a tuple "
                    f"of mc.HeadLeaf, such as (mc.HeadLeaf('query/kernel', 3),); got "
                    f"{leaves!r}"
                )
        lacks = [role for role in ("query", "key") if not getattr(layer, role)]
        if len(lacks) == 1 or (lacks and not layer.rotary_query):
            raise ValueError(
                f"attention layer '{show_layer(layer)}' names no {lacks[0]}"
            )
    layers, leaf_at = list(given), tree.by_path()
    leaf_paths = [layer.path_of(leaf) for layer in layers for leaf in layer.leaves]
    if absent := [path for path in leaf_paths if path not in leaf_at]:
        raise ValueError(
            f"attention= names {paths.show_all(absent)}, which the params lack"
        )
    modules = [show_layer(layer) for layer in layers]
    if twice := sorted({name for name in modules if modules.count(name) > 1}):
        raise ValueError(
            f"attention= has several layers at {', '.join(map(repr, twice))}; each "
            "needs its own path and statistic"
        )
    _check_not_normalized(layers, leaf_at)
    return layers


def _check_not_normalized(
    layers: Sequence[AttentionLayer], leaf_at: paths.LeafAt
) -> None:
    """Raises if a norm next to a layer's projections is not one of its leaves."""
    all_names = {name for path in leaf_at for name in path}
    letters = {name: re.sub(r"[^a-z]", "", name.lower()) for name in all_names}
    norms: dict[paths.Path, dict[str, str]] = {}
    for path in leaf_at:
        for depth, name in enumerate(path):
            if QK_NORM.fullmatch(x := letters[name]) or LATENT_KEY_NORM.fullmatch(x):
                norms.setdefault(path[:depth], {})[name] = x
    strays: dict[str, list[str]] = {}
    for layer in layers if norms else ():
        leaves = [layer.path_of(leaf) for leaf in layer.leaves]
        if all(is_masked(leaf_at[path]) for path in leaves):
            continue
        leaf_prefixes = {path[:n] for path in leaves for n in range(len(path) + 1)}
        depth = len(paths.split(layer.path))
        for module in {path[:n] for path in leaves for n in range(depth, len(path))}:
            nearby = norms.get(module, {})
            key_norms = {k for k, x in nearby.items() if LATENT_KEY_NORM.fullmatch(x)}
            # Norms of latents come before the up-projections, whose scaling works. A
            # `q_norm` is the latent query's if the layer is latent attention, or has
            # the norm of the latent key and value.
            is_latent = bool(layer.rotary_query or key_norms)
            strays[layer.path] = strays.get(layer.path, []) + [
                name
                for name, x in nearby.items()
                if name not in key_norms and (*module, name) not in leaf_prefixes
                if not (is_latent and LATENT_QUERY_NORM.fullmatch(x))
            ]
    if any(strays.values()):
        # Without this error the statistics would stay, and the kernels would shrink
        # at every step.
        modules = [paths.show_module(paths.split(x)) for x in strays if strays[x]]
        norm_names = sorted({name for each in strays.values() for name in each})
        raise ValueError(
            f"QK-Clip cannot act on {', '.join(map(repr, modules))}: query and key are "
            f"normalized after the projection ({', '.join(norm_names)}), so scaling "
            f"their weights leaves the logits as they are. With {READ_IT} QK-Clip "
            "scales the gains of the norms, if the logits are linear in them; "
            "otherwise use mc.muon"
        )


def _check_none_overlooked(named: ByNames, layers: Sequence[AttentionLayer]) -> None:
    """Raises if names show attention that the search for Flax's names missed."""
    # Without this error the model would train, and no head would ever be clipped.
    layer_paths = {paths.split(layer.path) for layer in layers}
    overlooked = []
    for path, tree_path in named.tree_path_of.items():
        # Search models have a query, too. With a key next to it, it is attention.
        is_query = path[-2:] == ("query", "kernel")
        is_query &= (*path[:-2], "key", "kernel") in named.tree_path_of
        # Gemma in DeepMind's library and its ports: one einsum for key and value, or
        # for all three.
        is_query |= "".join(path[-2:-1]) in ("q_einsum", "qkv_einsum")
        # If a partition of trainable leaves leaves out the frozen kernel, the query
        # consists of its LoRA factors only.
        is_query |= names.is_low_rank(path) and any(
            names.projection(name) == "query" for name in path[-3:-1]
        )
        is_known = any(path[:n] in layer_paths for n in (len(path) - 2, len(path) - 3))
        is_known |= tree_path[-2:] == ("query", "kernel")
        if is_query and not (is_known or is_masked(named.leaf_at[tree_path])):
            overlooked.append(tree_path)
    if overlooked:
        raise ValueError(
            "by names QK-Clip finds only modules called query and key, as in stock "
            f"Flax, and would not clip {paths.show_all(overlooked, at_most=3)}. "
            f"Use {READ_IT}, or describe this attention with mc.AttentionLayer. To "
            "leave it unclipped, pass attention=mc.flax_attention_layers"
        )
