"""Names that differ between the versions of JAX that are supported, 0.8 to 0.12."""

import inspect
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType


def manual_axes(x: Any) -> frozenset[str]:
    """The axes that an array varies over, where `jax.shard_map` checks that."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def is_checked(axes: tuple[Hashable, ...]) -> bool:
    """True if types tell what varies over axes: not in `pmap`, and not in `vmap`."""
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


def gather_everywhere(
    x: jax.Array, axes: tuple[Hashable, ...], **options: Any
) -> jax.Array:
    """`jax.lax.all_gather` whose result types, if checked, know to be the same."""
    lax: Any = jax.lax
    if not is_checked(axes):
        return lax.all_gather(x, axes, **options)
    if "to" in inspect.signature(lax.all_gather).parameters:
        return lax.all_gather(x, axes, to="invarying", **options)
    return lax.all_gather_invariant(x, axes, **options)


def keep_sharding(x: jax.Array) -> jax.Array:
    """The same array, whose later use does not change how it is sharded itself.

    XLA's partitioner propagates shardings backwards, too, where one is left to it:
    momentum would be sharded as what is iterated, and state would move in the first
    step. JAX has no name for Shardy's barrier against that; its GSPMD has none.
    """
    return _barrier.bind(x, passes="FORWARD")


def impose_no_sharding(x: jax.Array) -> jax.Array:
    """The same array, which does not change how later results are sharded.

    State that gradients are added to stays where it was. How gradients are sharded may
    well follow from it: they are reduced and scattered then, and not reduced.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(x, Tracer) and mesh.empty:
        mesh = jax.typeof(x).sharding.mesh
    # Only of automatic axes the compiler chooses, and outside of `shard_map`.
    kinds = set(mesh.axis_types) if isinstance(x, Tracer) else set()
    is_open = AxisType.Auto in kinds and AxisType.Manual not in kinds
    return _barrier.bind(x, passes="BACKWARD") if is_open else x


def sharded_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """The same array, which the compiler shards as another: only it knows how.

    It sees a choice between the two, which is never that of the other. How the choice
    is sharded must say nothing of the other, which may be state that is added to.
    """
    never = jax.lax.optimization_barrier(jnp.zeros((), bool))
    return jnp.where(never, keep_sharding(like.astype(x.dtype)), x)


_barrier = Primitive("sharding_barrier")
_barrier.def_impl(lambda x, passes: x)
_barrier.def_abstract_eval(lambda x, passes: x)
batching.defvectorized(_barrier)
ad.deflinear(_barrier, lambda cotangent, passes: [cotangent])

_DIRECTIONS = {"FORWARD": 1, "BACKWARD": 2}  # sdy.PropagationDirection


def _lower_barrier(context: Any, x: Any, passes: str) -> list[Any]:
    if not jax.config.jax_use_shardy_partitioner:
        return [x]
    kind = ir.IntegerType.get_signless(32)
    direction = ir.IntegerAttr.get(kind, _DIRECTIONS[passes])
    return [sdy.PropagationBarrierOp(x, direction).result]


mlir.register_lowering(_barrier, _lower_barrier)
