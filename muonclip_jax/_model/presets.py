"""Presets for attention in other layouts, found by the names of their leaves.

Each is a function of its sizes that returns one for `attention=`: from params to
layers, which raises where it finds none or QK-Clip cannot act on them. `stack_axes` is
that of `flax_attention_layers`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._options import whole_number
from .._parameters import paths
from .._parameters.reading import is_turned_by_bias
from .._parameters.stacks import IN_FRONT, StackAxes
from .attention_layers import Finder
from .finder import finder, holding, Module, Preset
from .head_leaf import HeadLeaf


# The names of a norm's gain and shift, below it: Flax; PyTorch, Equinox; Haiku; Keras.
# Some models keep the gain as an array by the norm's own name.
_GAINS = ("scale", "weight", "w", "gamma", "gain", "")
_SHIFTS = ("bias", "b", "offset", "beta")


def latent_attention(
    nope_head_dim: int,
    *,
    query: Sequence[str] = ("wq_b/kernel", "query/kernel"),
    key_value: str = "wkv_b/kernel",
    stack_axes: StackAxes = IN_FRONT,
) -> Finder:
    """Multi-head latent attention, as in DeepSeek-V3 and Kimi K2.

    The query's up-projection `(rank or features, heads, nope + rope)` and the
    key-value up-projection `(rank, heads, nope + value)` are cut at `nope_head_dim`:
    `gamma**alpha` scales query nope, `gamma**(1-alpha)` key nope, the whole `gamma`
    query rope; the shared rotary key and the value stay.

    **Arguments:**

    - `nope_head_dim`: dimensions of a head without rotary embedding.
    - `query`: leaves that may hold the query, the first that a layer has; MaxText's
        names, with and without query LoRA.
    - `key_value`: the leaf that marks a layer.
    - `stack_axes`: as for [`flax_attention_layers`][].

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from that function, where no module holds `key_value`, and
    where one that does holds no query.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> params = {"mla": {
        ...     "wq_b": {"kernel": jnp.ones((6, 2, 4 + 2))},
        ...     "wkv_b": {"kernel": jnp.ones((8, 2, 4 + 3))},
        ... }}
        >>> stats = {"mla": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> find = mc.latent_attention(nope_head_dim=4)
        >>> after = mc.clip_qk(params, stats, attention=find)["mla"]
        >>> after["wq_b"]["kernel"][0, 1]
        Array([0.5 , 0.5 , 0.5 , 0.5 , 0.25, 0.25], dtype=float32)
        >>> after["wkv_b"]["kernel"][0, 1]
        Array([0.5, 0.5, 0.5, 0.5, 1. , 1. , 1. ], dtype=float32)

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1;
        DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, for the layer.
    """
    whole_number("nope_head_dim", nope_head_dim, 1)

    def part_of_query(part: tuple[int, slice], module: Module) -> tuple[HeadLeaf, ...]:
        held = [leaf for leaf in query if module.has(leaf)]
        if not held:
            raise ValueError(
                f"'{paths.show_module(module.path)}' has '{key_value}' but no query "
                f"among {list(query)}"
            )
        return (HeadLeaf(held[0], 3, part=part),)

    # The two parts of a query are in one leaf. The first meets the key of its own head,
    # and they share gamma; the second meets the rotary key that all heads share.
    nope, rope = (-1, slice(0, nope_head_dim)), (-1, slice(nope_head_dim, None))
    layers = Preset(
        holding(key_value),
        query=partial(part_of_query, nope),
        key=lambda module: (HeadLeaf(key_value, 3, part=nope),),
        rotary_query=partial(part_of_query, rope),
    )
    return finder(layers, stack_axes=stack_axes, marker=key_value)


def fused_attention(
    head_dim: int,
    *,
    name: str = "c_attn",
    heads_first: bool = False,
    stack_axes: StackAxes = IN_FRONT,
) -> Finder:
    """One Dense for query, key and value, `(features, 3 * heads * head_dim)`, as GPT-2.

    **Arguments:**

    - `head_dim`: size of a head.
    - `name`: of the Dense; its bias is scaled too where there is one.
    - `heads_first`: whether each head has its query, key and value next to each other,
        as in Bloom and GPT-NeoX (`name="query_key_value"`), and not all queries come
        first. Shapes do not show it.
    - `stack_axes`: as for [`flax_attention_layers`][].

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from that function, where no module holds such a Dense,
    and where its kernel has an axis of heads of its own.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> params = {"h0": {"c_attn": {"kernel": jnp.ones((4, 3 * 2 * 2))}}}
        >>> stats = {"h0": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> find = mc.fused_attention(head_dim=2)
        >>> after = mc.clip_qk(params, stats, attention=find)["h0"]["c_attn"]
        >>> print(after["kernel"][0])
        [1.  1.  0.5 0.5 1.  1.  0.5 0.5 1.  1.  1.  1. ]
    """
    whole_number("head_dim", head_dim, 1)
    fused = (-1, 3, head_dim) if heads_first else (3, -1, head_dim)
    heads, thirds = (-3, -2) if heads_first else (-2, -3)
    third = partial(_dense, name, 3 * head_dim, axis=heads, split=fused)
    layers = Preset(
        holding(f"{name}/kernel"),
        query=partial(third, part=(thirds, slice(0, 1))),
        key=partial(third, part=(thirds, slice(1, 2))),
    )
    return finder(layers, stack_axes=stack_axes, marker=f"{name}/kernel")


def flat_attention(
    head_dim: int,
    *,
    query: str = "query",
    key: str = "key",
    stack_axes: StackAxes = IN_FRONT,
) -> Finder:
    """Dense kernels without a head axis, `(features, heads * head_dim)`.

    Head counts of query and key are read off the shapes, so that grouped queries need
    no mention.

    **Arguments:**

    - `head_dim`: size of a head.
    - `query`, `key`: names of the two projections, `"q_proj"` and `"k_proj"` for many
        models.
    - `stack_axes`: as for [`flax_attention_layers`][].

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from that function, where no module holds the query, and
    where a kernel has an axis of heads of its own.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = {"kernel": jnp.ones((4, 2 * 2))}
        >>> params = {"attn": {"q_proj": kernel, "k_proj": kernel}}
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> find = mc.flat_attention(head_dim=2, query="q_proj", key="k_proj")
        >>> mc.clip_qk(params, stats, attention=find)["attn"]["q_proj"]["kernel"][0]
        Array([1. , 1. , 0.5, 0.5], dtype=float32)
    """
    flat = (-1, whole_number("head_dim", head_dim, 1))
    layers = Preset(
        holding(f"{query}/kernel"),
        query=partial(_dense, query, head_dim, split=flat),
        # Where the query has no axis of heads, its key has none.
        key=partial(_dense, key, None, split=flat),
    )
    return finder(layers, stack_axes=stack_axes, marker=f"{query}/kernel")


def normalised_attention(
    *,
    query: str = "query_ln",
    key: str = "key_ln",
    stack_axes: StackAxes = IN_FRONT,
) -> Finder:
    """Query and key that are normalized after their projection (`normalize_qk=True`).

    Scaling the projections does nothing there; scaling the gains of the norms does, and
    exactly, rotary embeddings included. The heads of a layer share the gains and are
    clipped together, by the largest of their logits. Gains that are stored as the
    difference from one, as in Gemma, do not scale so.

    **Arguments:**

    - `query`, `key`: names of the two norms; their gain is clipped (`scale`, `weight`,
        `w`, ..., or the norm itself where it is an array), and their bias if they have
        one.
    - `stack_axes`: as for [`flax_attention_layers`][].

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from the function returned, where it finds no layer, and
    where arrays are at hand and a gain is zero throughout, so that it can only be a
    difference from one.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> norm = {"scale": jnp.ones(2)}
        >>> params = {"attn": {"query_ln": norm, "key_ln": norm}}
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> after = mc.clip_qk(params, stats, attention=mc.normalised_attention())
        >>> after["attn"]["query_ln"]["scale"]
        Array([0.5, 0.5], dtype=float32)
    """
    markers = [f"{query}/{gain}".rstrip("/") for gain in _GAINS]
    layers = Preset(holding(*markers), partial(_norm, query), partial(_norm, key))
    return finder(layers, stack_axes=stack_axes, marker=markers[0])


def _norm(name: str, module: Module) -> tuple[HeadLeaf, ...]:
    """The gain of a norm, and its shift if it has one: a logit is of their sum."""
    below = ([f"{name}/{x}".rstrip("/") for x in ends] for ends in (_GAINS, _SHIFTS))
    gain, shift = ([x for x in leaves if module.has(x)][:1] for leaves in below)
    # Gemma's gain is 1 + the leaf, which starts at zero: scaled, it is as before. Of a
    # trained one, nothing shows.
    if gain and _is_zero(module.reading.leaf_at[module.at(gain[0])]):
        raise ValueError(
            f"the gain '{paths.show(module.at(gain[0]))}' is zero throughout, so it "
            "must be stored as a difference from one, as in Gemma. Scaling it does not "
            "scale the logits, so QK-Clip cannot act there; use mc.muon"
        )
    return tuple(HeadLeaf(leaf, 1, axis=None) for leaf in (*gain, *shift))


def _is_zero(leaf: Any) -> bool:
    """Checks that an array that is at hand has no entry but zero."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
        return False
    # The part of an array on other hosts is not at hand.
    here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    # As NumPy's: `np.any` calls `leaf.any()`, which JAX traces where `init` is traced.
    return here and leaf.size > 0 and not np.any(np.asarray(leaf))


def _dense(
    name: str, head: int | None, module: Module, **where: Any
) -> tuple[HeadLeaf, ...]:
    """The kernel of a Dense, and its bias if it has one.

    **Raises:** `ValueError` for a kernel with an axis of heads, unless `head` is None;
    one head by itself is `head` wide.
    """
    at, bias_at = module.at(f"{name}/kernel"), module.at(f"{name}/bias")
    kernel, bias = module.reading.layer(at), module.reading.layer(bias_at)
    if head is not None and len(kernel) > 2:
        # Or is it a stack of plain kernels? A bias tells, and so do the other
        # projections. A single head, and no fewer layers than features: hardly a stack.
        is_single = kernel[-1] <= head and kernel[0] >= kernel[-2]
        is_stack = bias == kernel[:-2] + kernel[-1:]
        if not bias:
            has_heads = len(kernel) == 3 and module.reading.has_heads(module.path)
            is_stack = not (has_heads or is_single)
        if not is_stack:
            raise ValueError(
                f"'{paths.show(at)}' of shape {kernel} has an axis of heads of its "
                "own; expected is (*stack, features, heads * head_dim). Kernels that "
                "Flax names need no preset, but mc.flax_attention_layers; describe "
                "others by mc.AttentionLayer with mc.HeadLeaf"
            )
    leaf = HeadLeaf(f"{name}/kernel", 2, **where)
    # HuggingFace's GPT-2 keeps kernels as (out, in), which their bias tells. All that
    # `where` counts from the end then has the inputs after it.
    if len(kernel) == 2 and is_turned_by_bias(kernel, bias):
        part = next(((axis - 1, of) for axis, of in leaf.parts.items()), None)
        axis = leaf.axis - 1 if isinstance(leaf.axis, int) else leaf.axis
        leaf = leaf._replace(axis=axis, part=part, split_axis=-2)
    if not module.has(f"{name}/bias"):
        return (leaf,)
    return leaf, HeadLeaf(f"{name}/bias", 1, **where)
