"""Attention under the names in use, in whichever layout its shapes show."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .._options import whole_number
from .._parameters import names, paths
from .._parameters.reading import Reading
from .._parameters.stacks import IN_FRONT, StackAxes
from .attention_layers import as_found, AttentionLayer, checked
from .head_leaf import HeadLeaf
from .modules_with import Finder


def named_attention(
    head_dim: int | None = None, *, stack_axes: StackAxes = IN_FRONT
) -> Finder:
    """Query and key of Flax, HuggingFace, bonsai, tunix, Gemma, Haiku, Equinox, Haliax.

    Projections are known by their names (`query`, `q_proj`, `wq`, `q_einsum` and the
    like), layouts by their shapes: with an axis of heads or without, features first or
    last, layers stacked in front or behind the first axis.

    **Arguments:**

    - `head_dim`: size of a head; needed where kernels have no axis of heads.
    - `stack_axes`: as for [`flax_attention_layers`][], where the leaves do not show it.

    The statistics of a layer stand at the module that holds the projections.

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from the function returned, where it finds no layer, where
    `head_dim` is needed and for query and key that are normalised.

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

    def find(params: Any) -> list[AttentionLayer]:
        reading = Reading(paths.flatten(params), stack_axes)
        leaf_at, leaves = reading.leaf_at, _Leaves(reading, head_dim)
        layers = [leaves.layer(module) for module in leaves.modules()]
        layers += [leaves.einsum_layer(module) for module in leaves.einsum_modules()]
        if not layers and leaf_at and not leaf_at.hidden:
            raise ValueError(
                "no attention layer found: no module has a query and a key under a "
                "name in use (query, q, q_proj, query_proj, wq, q_einsum, ...); "
                "describe it by mc.AttentionLayer with mc.HeadLeaf"
            )
        return checked(as_found(layers, reading), leaf_at)

    return find


def check_none_overlooked(
    tree: paths.PathedTree, layers: Sequence[AttentionLayer]
) -> None:
    """Raises for attention that only its names show, where Flax's are looked for."""
    reading = Reading(tree)
    leaf_at, found = reading.leaf_at, _Leaves(reading, head_dim=None)
    known = {paths.split(layer.path) for layer in layers}
    overlooked = [
        query
        for module, query in found.queries().items()
        if query[-2:] != ("query", "kernel")
        and module not in known
        and not paths.is_masked(leaf_at[query])
    ]
    if overlooked:
        raise ValueError(
            "QK-Clip finds modules that are called query and key, as in Flax, and "
            f"would not clip {paths.show_all(overlooked, at_most=3)}. Describe this "
            "attention: attention=mc.named_attention(), with head_dim=... if the "
            "kernels have no axis of heads. To leave it unclipped, pass "
            "attention=mc.flax_attention_layers"
        )

    alone = [path for path in leaf_at if _is_query_factor(path, known)]
    if alone:
        raise ValueError(
            f"QK-Clip would not clip {paths.show_all(alone, at_most=3)}: it scales a "
            "kernel and its LoRA factors together, and needs both in the params. Put "
            "mc.qk_clip behind optax.partition, where all are in sight, or use "
            "mc.muon. To leave it unclipped, pass attention=mc.flax_attention_layers"
        )


def _is_query_factor(path: paths.Path, known: Collection[paths.Path]) -> bool:
    """Whether a leaf is a factor of LoRA for the query of a layer that is not known."""
    return names.low_rank_partner(path) is not None and any(
        names.projection(path[n]) == "query" and path[:n] not in known
        for n in range(max(0, len(path) - 3), len(path) - 1)
    )


class _Leaves:
    """The leaves of a model by what Flax would call them."""

    def __init__(self, reading: Reading, head_dim: int | None):
        self._own = {leaf.path: own for own, leaf in reading.leaves.items()}
        self._reading, self._head_dim = reading, head_dim

    def modules(self) -> list[paths.Path]:
        return [
            path[:-2]
            for path in self._own
            if path[-2:] == ("query", "kernel")
            and (*path[:-2], "key", "kernel") in self._own
        ]

    def einsum_modules(self) -> list[paths.Path]:
        return [
            path[:-2]
            for path in self._own
            if path[-2:] in (("q_einsum", "kernel"), ("qkv_einsum", "kernel"))
        ]

    def queries(self) -> dict[paths.Path, paths.Path]:
        """The leaf that holds the query of each module."""
        modules = [*self.modules(), *self.einsum_modules()]
        return {
            module: self._own[*module, name, "kernel"]
            for name in ("query", "q_einsum", "qkv_einsum")
            for module in modules
            if (*module, name, "kernel") in self._own
        }

    def layer(self, module: paths.Path) -> AttentionLayer:
        roles = (self._projection(module, role) for role in ("query", "key"))
        return AttentionLayer("/".join(module), *roles)

    def einsum_layer(self, module: paths.Path) -> AttentionLayer:
        """Gemma's: `(heads, features, head_dim)`, keys and values in front."""

        def leaf(name: str, part: int | None) -> tuple[HeadLeaf, ...]:
            own = self._own.get((*module, name, "kernel"))
            where = None if part is None else (-4, slice(part, part + 1))
            path = "/".join(own[len(module) :]) if own else ""
            ndim = 3 if part is None else 4
            return (HeadLeaf(path, ndim, axis=-3, part=where),) if own else ()

        query = leaf("q_einsum", None) or leaf("qkv_einsum", 0)
        key = leaf("kv_einsum", 0) or leaf("qkv_einsum", 1)
        return AttentionLayer("/".join(module), query, key)

    def _projection(self, module: paths.Path, role: str) -> tuple[HeadLeaf, ...]:
        own = self._own[*module, role, "kernel"]
        leaf = self._reading.leaves[own]
        if not leaf.shape:  # hidden
            return (HeadLeaf("/".join(own[len(module) :]), 3),)
        has_heads = len(leaf.shape) > 2 and self._reading.has_heads(module)
        if len(leaf.shape) > 2 and has_heads is None:
            raise ValueError(
                f"'{paths.show(own)}' {leaf.shape} may have heads or be a stack of "
                "plain kernels; describe it by mc.AttentionLayer with mc.HeadLeaf"
            )
        outputs = leaf.axes[1:] if has_heads else leaf.axes[-1:]
        kernel = self._head_leaf(module, own, outputs, leaf.axes)
        return (kernel, *self._bias(module, role, kernel))

    def _head_leaf(
        self,
        module: paths.Path,
        own: paths.Path,
        outputs: tuple[int, ...],
        axes: tuple[int, ...],
    ) -> HeadLeaf:
        """The leaf with these output axes, `(heads..., head_dim)` or one for both."""
        path, in_layer = "/".join(own[len(module) :]), sorted(axes)
        at = [in_layer.index(axis) - len(in_layer) for axis in outputs]
        if len(at) > 1:
            heads = tuple(at[:-1]) if len(at) > 2 else at[0]
            return HeadLeaf(path, len(axes), axis=heads)
        if self._head_dim is None:
            raise ValueError(
                f"'{paths.show(own)}' has no axis of heads: give "
                "mc.named_attention(head_dim=...)"
            )
        return HeadLeaf(
            path,
            min(len(axes), 2),
            axis=at[0] - 1,
            split=(-1, self._head_dim),
            split_axis=at[0],
        )

    def _bias(
        self, module: paths.Path, role: str, kernel: HeadLeaf
    ) -> tuple[HeadLeaf, ...]:
        own = self._own.get((*module, role, "bias")) or self._bias_beside(module, role)
        shape = self._reading.layer(own) if own else ()
        if not own or not shape:
            return ()
        kernel_shape = self._reading.layer(self._own[*module, role, "kernel"])
        heads = kernel.heads(kernel_shape) or 1
        path = "/".join(own[len(module) :])
        if len(shape) > 1:
            axis = tuple(range(-len(shape), -1))
            return (HeadLeaf(path, len(shape), axis=axis if len(axis) > 1 else -2),)
        return (HeadLeaf(path, 1, split=(heads, -1)),)

    def _bias_beside(self, module: paths.Path, role: str) -> paths.Path | None:
        """As tunix has it: `q_bias` beside `q_proj`."""
        beside = _children(self._own, module)
        for name in beside:
            own = names.words(name)
            if own[-1:] == ("bias",) and names.projection("".join(own[:-1])) == role:
                return self._own[*module, name]
        return None


def _children(own: Iterable[paths.Path], module: paths.Path) -> list[str]:
    return [path[-1] for path in own if path[:-1] == module]
