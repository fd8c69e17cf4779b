"""What JAX calls differently in the versions that are supported, 0.8 to 0.12."""

from typing import Any

import jax


def manual_axes(x: Any) -> frozenset[str]:
    """The axes that an array varies over, where `jax.shard_map` checks that."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma
