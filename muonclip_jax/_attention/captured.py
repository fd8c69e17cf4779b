"""Statistics of a model that records none, from outputs of its projections."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._model.statistics import STATISTIC
from .._options import flag, function_or_none, whole_number
from .._parameters import names, paths
from .max_logits import max_logits


#: Query and key as projected to query and key as they enter the product.
Transform = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def captured_attention_stats(
    captured: Any,
    *,
    scale: float | None,
    is_causal: bool,
    head_dim: int | None = None,
    query: str | None = None,
    key: str | None = None,
    transform: Transform | None = None,
    stacked: bool = False,
    **options: Any,
) -> dict[str, Any]:
    r"""Attention statistics from the outputs of query and key projections.

    For models whose attention cannot use [`attention_fn`][]. Linen returns the outputs
    with `capture_intermediates=True, mutable=["intermediates"]`, NNX with
    `nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)`. Take the
    statistics in the same `jit`, which drops the outputs that nothing reads.

    What a model does between projection and product is in no output, so say it here:
    `scale` and `is_causal` have no default. What is left out makes the statistic wrong
    without an error: with rotary embeddings or norms, give `transform`.

    **Arguments:**

    - `captured`: a pytree with `<module>/<projection>/__call__`, each a tuple with an
        output for each call.
    - `scale`: of the logits; `None` is $1/\sqrt{\mathrm{head\_dim}}$. A model that
        scales its query after the projection wants that scale here, one that scales it
        inside the projection 1.
    - `is_causal`: whether a query sees no later key.
    - `head_dim`: for outputs `(batch..., length, heads * head_dim)`; by default they
        are `(batch..., length, heads, head_dim)`.
    - `query`, `key`: names of the two modules; by default the names in use (`query`,
        `q_proj`, `wq`, ...).
    - `transform`: what happens to `(query, key)` between projection and product, as
        `lambda q, k: (rotate(q), rotate(k))`, with an axis of heads.
    - `stacked`: whether outputs have layers in front, as those of a scanned module;
        without it they count as one more axis of the batch, and the layers as one.
    - `options`: `mask`, `bias`, `local_window_size` and segment ids, as for
        [`max_logits`][]; the same for every layer.

    **Returns:** nested dicts `{module: {"max_logits": (heads,) float32}}`, `(layers,
    heads)` if stacked; calls of a layer used twice combine by maximum.

    **Raises:** `ValueError` where no module holds both outputs, where one is called
    more often than the other or has more axes, and as [`max_logits`][] does.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> output = {"__call__": (jnp.ones((1, 3, 2 * 4)),)}
        >>> captured = {"attn": {"q_proj": output, "k_proj": output}}
        >>> mc.captured_attention_stats(
        ...     captured, scale=None, is_causal=True, head_dim=4
        ... )
        {'attn': {'max_logits': Array([2., 2.], dtype=float32)}}
    """
    stacked = flag("stacked", stacked)
    function_or_none("transform", transform)
    if head_dim is not None:
        head_dim = whole_number("head_dim", head_dim, 1)
    largest = functools.partial(max_logits, scale=scale, is_causal=is_causal, **options)

    def of_call(*outputs: jax.Array) -> jax.Array:
        query, key = (_with_heads(x, head_dim) for x in outputs)
        return largest(*(transform(query, key) if transform else (query, key)))

    of_layer = jax.vmap(of_call) if stacked else of_call
    stats: dict[str, Any] = {}
    for module, calls in _calls_by_layer(captured, query, key).items():
        # The mirror of the modules that `attention_fn` would have sown.
        entry = stats
        for name in module:
            entry = entry.setdefault(name, {})
        found = (of_layer(*call) for call in calls)
        entry[STATISTIC] = functools.reduce(jnp.maximum, found)
    return stats


def _calls_by_layer(
    captured: Any, query: str | None, key: str | None
) -> dict[paths.Path, list[tuple[jax.Array, jax.Array]]]:
    """The outputs of query and key in each call of each module that has both."""
    tree = paths.flatten(captured)
    outputs: dict[paths.Path, list[jax.Array]] = {}
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        # `<module>/__call__/<number of the call>`, in order.
        if path[-2:-1] == ("__call__",) and path[-1].isdigit():
            outputs.setdefault(path[:-2], []).append(leaf)
    layers: dict[paths.Path, dict[str, paths.Path]] = {}
    for path in filter(None, outputs):
        for role, given in (("query", query), ("key", key)):
            usual = given is None and names.projection(path[-1]) == role
            if not usual and path[-1] != given:
                continue
            if layers.setdefault(path[:-1], {}).setdefault(role, path) != path:
                both = paths.show_all([layers[path[:-1]][role], path])
                raise ValueError(f"{both} may both be the {role}: name one by {role}=")
            break
    pairs = [(module, x) for module, x in layers.items() if len(x) == 2]
    if not pairs:
        wanted = (
            f"{query or 'a query (q_proj, ...)'} and {key or 'a key (k_proj, ...)'}"
        )
        seen = paths.show_all(list(outputs)[:20]) or "none"
        raise ValueError(
            f"no module has outputs of both {wanted}. Outputs seen: {seen}. Run Linen "
            'with capture_intermediates=True and mutable=["intermediates"], or NNX '
            "under nnx.capture(model, nnx.Intermediate, "
            "method_outputs=nnx.Intermediate)"
        )
    return {module: _pairs(x["query"], x["key"], outputs) for module, x in pairs}


def _pairs(
    query: paths.Path, key: paths.Path, outputs: Mapping[paths.Path, list[jax.Array]]
) -> list[tuple[jax.Array, jax.Array]]:
    queries, keys = outputs[query], outputs[key]
    if len(queries) != len(keys):
        raise ValueError(
            f"'{paths.show(query)}' was called {len(queries)} times and "
            f"'{paths.show(key)}' {len(keys)} times, so that their outputs do not pair"
        )
    for q, k in zip(queries, keys, strict=True):
        # They would broadcast, and a key with its value would count as two keys.
        if jnp.ndim(q) != jnp.ndim(k):
            raise ValueError(
                f"the outputs of '{paths.show(query)}' {q.shape} and "
                f"'{paths.show(key)}' {k.shape} have different numbers of axes. If one "
                "of them holds more than a query or a key, as a projection of key and "
                "value does, cut it apart and use mc.max_logits"
            )
    return list(zip(queries, keys, strict=True))


def _with_heads(x: jax.Array, head_dim: int | None) -> jax.Array:
    if head_dim is None:
        return x
    if x.shape[-1] % head_dim:
        raise ValueError(
            f"an output {x.shape} does not divide into heads of head_dim={head_dim}"
        )
    return x.reshape(*x.shape[:-1], -1, head_dim)
