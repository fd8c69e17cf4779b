"""Per-head statistics, found in whatever Flax hands back."""

from typing import Any

import jax
import jax.numpy as jnp

from . import _paths


#: The name of the leaf that holds a layer's largest logits.
STATISTIC = "max_logits"


def read_attention_stats(attention_stats: Any) -> dict[_paths.Path, jax.Array]:
    """Finds the `max_logits` leaves; several entries of a plain sow are maximised."""
    tree = _paths.flatten(attention_stats)
    stats: dict[_paths.Path, jax.Array] = {}
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        module = _module_of(path)
        if module is None or _paths.is_masked(leaf):
            continue
        leaf = jax.lax.stop_gradient(jnp.asarray(leaf, jnp.float32))
        if not leaf.ndim:
            raise ValueError(
                f"the statistics '{_paths.show(path)}' are a scalar; expected an "
                "array with one maximum per head, shape (*stack, heads)"
            )
        stats[module] = jnp.maximum(stats[module], leaf) if module in stats else leaf
    return stats


def _module_of(path: _paths.Path) -> _paths.Path | None:
    """The module of `<module>/max_logits`, or of an entry of a tuple stored there."""
    while path and path[-1].isdigit():
        path = path[:-1]
    return path[:-1] if path[-1:] == (STATISTIC,) else None
