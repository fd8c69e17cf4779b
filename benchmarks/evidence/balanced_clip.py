"""QK-Clip for grouped queries the other way: a shared key takes its part too."""

from typing import Any

import jax
import jax.numpy as jnp


def balanced_clip(params: Any, stats: Any, threshold: jax.Array) -> Any:
    """Scales a key by the root of its queries' least gamma, and these by the rest.

    The package leaves a key alone that several queries share. Here the head with the
    least gamma shrinks by the root alone and its neighbors grow to make up for their
    key, so that the logits of every head come to gamma times what they were, as there.

    - `params`: kernels `<layer>/query` and `<layer>/key`, `(width, heads, features)`;
    - `stats`: `<layer>/max_logits`, `(heads,)`.
    """
    largest = {_layer(path): leaf for path, leaf in jax.tree.leaves_with_path(stats)}
    keys = {
        _layer(path): leaf.shape[-2]
        for path, leaf in jax.tree.leaves_with_path(params)
        if _role(path) == "key"
    }

    def leaf(path, x: jax.Array) -> jax.Array:
        if _role(path) not in ("query", "key"):
            return x
        layer = _layer(path)
        by_query, by_key = scales(largest[layer], keys[layer], threshold)
        return x * (by_query if _role(path) == "query" else by_key)[:, None]

    return jax.tree.map_with_path(leaf, params)


def scales(
    largest: jax.Array, keys: int, threshold: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Factors of queries and keys from the largest logits of the queries."""
    gamma = jnp.where(largest > threshold, threshold / largest, 1.0)
    groups = gamma.reshape(keys, -1)
    by_key = jnp.sqrt(groups.min(axis=1))
    return (groups / by_key[:, None]).ravel(), by_key


def _names(path) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _layer(path) -> str:
    names = _names(path)
    return "/".join(names[: names.index("attention") + 1])


def _role(path) -> str:
    names = _names(path)
    return names[names.index("attention") + 1] if "attention" in names else ""
