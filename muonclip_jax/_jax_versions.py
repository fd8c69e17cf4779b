"""What JAX calls differently in the versions that are supported, 0.8 to 0.12."""

import inspect
from collections.abc import Hashable
from typing import Any

import jax


def manual_axes(x: Any) -> frozenset[str]:
    """The axes that an array varies over, where `jax.shard_map` checks that."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def is_checked(axes: tuple[Hashable, ...]) -> bool:
    """Whether types tell what varies over axes: not in `pmap`, and not in `vmap`."""
    return bool(manual_axes(jax.lax.axis_index(axes)))


def varying(x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """The same array, taken to vary over axes, which `jax.shard_map` checks."""
    missing = tuple(axis for axis in axes if axis not in manual_axes(x))
    if not missing:
        return x
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)


def gather_everywhere(x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """`jax.lax.all_gather` whose result types, if checked, know to be the same."""
    lax: Any = jax.lax
    if not is_checked(axes):
        return lax.all_gather(x, axes)
    if "to" in inspect.signature(lax.all_gather).parameters:
        return lax.all_gather(x, axes, to="invarying")
    return lax.all_gather_invariant(x, axes)
