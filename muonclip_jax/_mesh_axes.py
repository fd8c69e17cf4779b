"""The axes of a mesh, as functions of arrays see them, for JAX 0.8 to 0.12.

An axis of a mesh is of one of three kinds around a function, and each needs something:

- manual (`jax.shard_map`, `jax.pmap`): where types are checked, they have to know which
  arrays vary along it;
- explicit: every array has its sharding in its type, and a result without an obvious
  one, such as that of a product along a sharded side, is an error. So the axes are made
  automatic around such a function, or its arrays are gathered before it;
- automatic: XLA propagates shardings forwards and backwards, and state would be sharded
  as what is made of it.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import get_axis_env
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def manual_axes(x: Any) -> frozenset[str]:
    """The axes that an array varies over, where `jax.shard_map` checks that."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def is_batched_by_mesh() -> bool:
    """True inside of a `jax.vmap` with `spmd_axis_name`."""
    return bool(get_axis_env().spmd_axis_names)


def is_checked(axes: tuple[Hashable, ...]) -> bool:
    """True if types say what varies over axes: not in `pmap`, and not in `vmap`."""
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


def explicit_spec(x: Any) -> PartitionSpec:
    """The spec of an array by explicit axes; None along all others."""
    return jax.typeof(x).sharding.spec


def on_automatic_axes(
    function: Callable[..., Any], *arguments: Any, results: Any
) -> Any:
    """`function(*arguments)`, sharded inside by XLA; `results` are its specs."""
    # Some arguments may have no mesh: a traced scale, positions made by an arange.
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*arguments)
    # Specs alone would be looked up in the mesh that is set, and none need be.
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    automatic = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=placed
    )
    return automatic(*arguments)


def on_whole_leaves(function: Callable[[Any], list], leaves: Any) -> list:
    """`function(leaves)` of whole leaves, by every device; results sharded as those."""
    arrays = jax.tree.leaves(leaves)
    if not any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
        return function(leaves)
    specs = [explicit_spec(x) for x in arrays]
    # Where no mesh is set, zeros that derivatives of slices are made of are on none,
    # and meet arrays that have one in their type. Where one is set, the axes cannot be
    # made automatic: JAX 0.8 has no derivative of that.
    if jax.sharding.get_abstract_mesh().empty:
        return on_automatic_axes(function, leaves, results=specs)
    whole = jax.tree.map(lambda x: resharded(x, PartitionSpec()), leaves)
    return jax.tree.map(resharded, function(whole), specs)


def on_whole_matrices(
    function: Callable[[Any, jax.Array], jax.Array], argument: Any, x: jax.Array
) -> jax.Array:
    """`function(argument, x)` for `(..., m, n)`; devices keep the stacks they have.

    Matrices of a stack need nothing of each other, so only their own axes are gathered.
    """
    spec, mesh = explicit_spec(x), jax.typeof(x).sharding.mesh
    *stack, _, _ = [*spec, *[None] * (x.ndim - len(spec))]
    cuts = PartitionSpec(*stack)
    # In shard_map a device works on its part of the stack. On automatic axes XLA would
    # gather it where a loop over batches slices the axis of the stack.
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in stack if axes]
    if named:
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(), cuts),
            out_specs=cuts,
            axis_names={name for names in named for name in names},
            check_vma=False,  # not every kernel inside says what its results vary over
        )
    elif jax.sharding.get_abstract_mesh().empty:  # as in `on_whole_leaves`
        function = functools.partial(on_automatic_axes, function, results=cuts)
    return resharded(function(argument, resharded(x, cuts)), spec)


def resharded(
    x: jax.Array, spec: PartitionSpec, like: jax.Array | None = None
) -> jax.Array:
    """An array as explicit axes cut it by `spec`, on its own mesh or that of `like`."""
    sharding = jax.typeof(x).sharding
    # Without explicit axes there may be no mesh at all to name.
    if not any(sharding.spec) and not any(spec):
        return x
    mesh = sharding.mesh if like is None else jax.typeof(like).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def keep_sharding(x: jax.Array) -> jax.Array:
    """The same array, whose later use does not change how it is sharded itself.

    XLA's partitioner propagates shardings backwards, too, where one is left to it:
    momentum would be sharded as what is iterated, and state would move in the first
    step. JAX has no name for Shardy's barrier against that; its GSPMD has none.
    """
    return _barrier.bind(x, passes=_FORWARD)


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
    return _barrier.bind(x, passes=_BACKWARD) if is_open else x


def sharded_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the same array, sharded like another one whose sharding only XLA knows.

    A `where` whose predicate is always False, which XLA does not know: the result is
    sharded like `like`. It must not change how `like` is sharded, which may be state.
    """
    never = jax.lax.optimization_barrier(jnp.zeros((), bool))
    return jnp.where(never, keep_sharding(like.astype(x.dtype)), x)


_FORWARD, _BACKWARD = 1, 2  # sdy.PropagationDirection
_barrier = Primitive("sharding_barrier")
_barrier.def_impl(lambda x, passes: x)
_barrier.def_abstract_eval(lambda x, passes: x)
batching.defvectorized(_barrier)
# As the identity that it is: its transpose is one, too, and directs nothing.
ad.deflinear(_barrier, lambda cotangent, passes: [cotangent])


def _lower_barrier(context: Any, x: Any, passes: int) -> list[Any]:
    if not jax.config.jax_use_shardy_partitioner:
        return [x]
    kind = ir.IntegerType.get_signless(32)
    return [sdy.PropagationBarrierOp(x, ir.IntegerAttr.get(kind, passes)).result]


mlir.register_lowering(_barrier, _lower_barrier)
