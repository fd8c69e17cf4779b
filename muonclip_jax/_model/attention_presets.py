"""Attention layers of other layouts, found by the names of their leaves.

Each preset is a function of its sizes that returns what `attention=` takes: a function
from params to layers, which raises where it finds none or QK-Clip cannot act on them.
`stack_axes` is that of `flax_attention_layers`.
"""

from collections.abc import Sequence

from .._options import whole_number
from .._parameters.paths import show_module
from .._parameters.stacks import IN_FRONT, StackAxes
from .attention_layers import AttentionLayer
from .head_leaf import HeadLeaf
from .modules_with import check_flat, Finder, finder, Module, projection


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
    query nope takes `gamma**alpha`, key nope `gamma**(1-alpha)`, query rope the whole
    `gamma`; the shared rotary key and the value stay.

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
    nope, rope = (-1, slice(0, nope_head_dim)), (-1, slice(nope_head_dim, None))

    def layer(module: Module) -> AttentionLayer:
        held = [leaf for leaf in query if module.has(leaf)]
        if not held:
            raise ValueError(
                f"'{show_module(module.path)}' has '{key_value}' but no query among "
                f"{list(query)}"
            )
        return AttentionLayer(
            str(module),
            query=(HeadLeaf(held[0], 3, part=nope),),
            key=(HeadLeaf(key_value, 3, part=nope),),
            rotary_query=(HeadLeaf(held[0], 3, part=rope),),
        )

    return finder(key_value, layer, stack_axes)


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
    - `heads_first`: whether each head has its query, key and value side by side, as in
        Bloom and GPT-NeoX (`name="query_key_value"`), and not all queries come first.
        Shapes do not show it.
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

    def layer(module: Module) -> AttentionLayer:
        check_flat(module, name, 3 * head_dim)

        def third(i: int) -> tuple[HeadLeaf, ...]:
            part = thirds, slice(i, i + 1)
            return projection(name, module, axis=heads, split=fused, part=part)

        return AttentionLayer(str(module), third(0), third(1))

    return finder(f"{name}/kernel", layer, stack_axes)


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

    def layer(module: Module) -> AttentionLayer:
        check_flat(module, query, head_dim)
        return AttentionLayer(
            str(module),
            projection(query, module, split=flat),
            projection(key, module, split=flat),
        )

    return finder(f"{query}/kernel", layer, stack_axes)
