"""What JAX calls differently in the versions that are supported, 0.8 to 0.12."""

import inspect
from collections.abc import Hashable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import batching, mlir


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


def keep_sharding(x: jax.Array) -> jax.Array:
    """The same array, whose later use does not change how it is sharded itself.

    XLA's partitioner propagates shardings backwards, too, where one is left to it:
    momentum would be sharded as what is iterated, and state would move in the first
    step. JAX has no name for Shardy's barrier against that; its GSPMD has none.
    """
    return _keep_sharding.bind(x)


_keep_sharding = Primitive("keep_sharding")
_keep_sharding.def_impl(lambda x: x)
_keep_sharding.def_abstract_eval(lambda x: x)
batching.defvectorized(_keep_sharding)


def _lower_keep_sharding(context: Any, x: Any) -> list[Any]:
    if not jax.config.jax_use_shardy_partitioner:
        return [x]
    forward = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    return [sdy.PropagationBarrierOp(x, forward).result]


mlir.register_lowering(_keep_sharding, _lower_keep_sharding)
