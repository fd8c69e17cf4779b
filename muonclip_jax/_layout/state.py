"""State that is sharded as the params are, from the start and after every step."""

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike

from .._mesh_axes import sharded_like
from .._parameters.paths import is_masked, Path
from .layout import cut_axes, Layout
from .shardings import but_along, is_sharded_as, PlacedLeaf


class StatePart(NamedTuple):
    """A part of the state of one leaf: an array of its shape but for some sizes."""

    path: Path  # of the leaf
    dtype: DTypeLike | None = None  # the leaf's if None
    sizes: Mapping[int, int] = {}  # by axis; along these it is not sharded


def zeros_like(params: Any, layout: Layout, dtype: DTypeLike | None) -> Any:
    """Returns a tree of zeros like the params."""
    parts = [StatePart(leaf.path, dtype) for leaf in layout.leaves]
    return layout.tree.unflatten(zero_parts(params, layout, parts))


def zeros_by_path(params: Any, layout: Layout, parts: Mapping[str, Any]) -> Any:
    """Returns zeros in place of trees of parts, by the paths of leaves."""
    # Ordered, so that zeros are made in the order of leaves: JAX sorts a dict's keys.
    return state_by_path(layout, zero_parts(params, layout, OrderedDict(parts)))


def state_by_path(layout: Layout, state: Mapping[str, Any]) -> Any:
    """Returns state that is not like the params, by their paths.

    Without params it is one number. `optax.tree.map_params` makes a state of no params
    to find where a state has copies of them; a number there says that this is none.
    """
    return dict(state) if layout.leaves else jnp.zeros(())


def zero_parts(params: Any, layout: Layout, tree: Any) -> Any:
    """Returns zeros in place of the parts in a tree, sharded as their leaves are.

    Under `jit` nothing else says so to the compiler: zeros depend on no parameter.
    """
    parts, treedef = jax.tree.flatten(tree, lambda x: isinstance(x, StatePart))
    mesh, leaves = layout.on_mesh(layout.of(params))
    leaf_at = {leaf.path: leaf for leaf in leaves}
    pairs = [(leaf_at[part.path], part) for part in parts]
    results = [
        leaf.array if is_masked(leaf.array) else _zeros_like(leaf.array, part)
        for leaf, part in pairs
    ]
    return treedef.unflatten(results if mesh is None else _put(results, pairs, mesh))


def _put(
    results: list[Any], pairs: Sequence[tuple[PlacedLeaf, StatePart]], mesh: Any
) -> list[Any]:
    """Shards zeros as the leaves of which they are parts."""
    # `zeros_like` shards eager zeros as the leaf, so that only parts of another shape,
    # and traced zeros, are moved.
    moved = {}
    for i, (leaf, part) in enumerate(pairs):
        if leaf.spec is not None:
            spec = but_along(part.sizes, leaf.spec)
            if not is_sharded_as(results[i], mesh, spec):
                moved[i] = spec, results[i].shape, results[i].dtype
    if moved:
        sharded = _zeros(mesh, tuple(moved.values()))
        is_here = isinstance(mesh, Mesh) and not isinstance(sharded[0], Tracer)
        for (i, (spec, *_)), x in zip(moved.items(), sharded, strict=True):
            # Specs of a program's results lack axes of one device, which params have.
            if is_here and any(mesh.shape[name] == 1 for name in cut_axes(spec)):
                x = jax.device_put(x, NamedSharding(mesh, spec))
            results[i] = x
    if AxisType.Auto in mesh.axis_types:
        # Programs replicate arrays without entries, so a step would move them.
        put = jax.jit(jnp.asarray)
        results = [x if is_masked(x) or x.size else put(x) for x in results]
    traced = [i for i, (leaf, _) in enumerate(pairs) if isinstance(leaf.array, Tracer)]
    for i in traced:
        # A tracer shows no automatic axes.
        leaf, part = pairs[i]
        if leaf.given is None:
            axes, x = tuple(part.sizes), leaf.array
            like = jnp.sum(x, axes, keepdims=True) if axes else x
            results[i] = sharded_like(results[i], like)
    # A tracer's mesh does not name its devices, but a param does, unless nothing reads
    # it and jit drops it.
    kept = [pairs[i][0].array for i in traced]
    return jax.lax.optimization_barrier((results, kept))[0] if kept else results


def counts_replicated(state: Any, mesh: Any) -> Any:
    """Puts a state's numbers, such as counts of steps, on the mesh of the params."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else replicated(x, mesh), state)


def first_state(state: Any, layout: Layout) -> Any:
    """Puts a first state of counts and rows on the mesh of the params."""
    state = replicated(state, layout.mesh)
    arrays = [x.array for x in layout.leaves if isinstance(x.array, Tracer)]
    # As above: without a param that is read, a program of explicit axes would leave the
    # state on one device.
    if layout.mesh is None or not arrays:
        return state
    return jax.lax.optimization_barrier((state, arrays[0]))[0]


def replicated(state: Any, mesh: Any) -> Any:
    """Puts a state's counts and rows, whole, on all devices of the params' mesh.

    A step returns counts so. Made on one device they would change their sharding in the
    first step: `jit` would compile twice, and a step compiled ahead of time would
    refuse the state that it returned. Rows of statistics the compiler would shard as
    the heads are.
    """
    if mesh is None:
        return state
    # Rows of statistics are some numbers for each head: to replicate them costs
    # nothing, and masks and metrics read them on every device.
    is_left_open = AxisType.Auto in mesh.axis_types

    def put(x: jax.Array) -> jax.Array:
        # Explicit axes are in types, whose specs name every dimension.
        whole = PartitionSpec(*[None] * (0 if is_left_open else jnp.ndim(x)))
        if isinstance(x, Tracer):
            sharding = NamedSharding(mesh, whole)
            if is_left_open:
                return jax.lax.with_sharding_constraint(x, sharding)
            return jax.sharding.reshard(x, sharding)
        if not isinstance(mesh, Mesh) or is_sharded_as(x, mesh, whole):
            return x
        return jax.device_put(x, NamedSharding(mesh, whole))

    return jax.tree.map(put, state)


def _zeros_like(x: Any, part: StatePart) -> jax.Array:
    is_here = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    is_alone = is_here and isinstance(x.sharding, SingleDeviceSharding)
    if part.sizes:
        shape = [part.sizes.get(i, size) for i, size in enumerate(x.shape)]
        device = x.sharding if is_alone and x.committed else None
        return jnp.zeros(shape, part.dtype or x.dtype, device=device)
    # Where a mesh is set, a program runs on all devices.
    if is_alone and jax.sharding.get_abstract_mesh().empty:
        return _on_its_device(x, part.dtype)
    return jnp.zeros_like(x, part.dtype)


# One compiled call in place of the several of `jnp.zeros_like`, for which a model of
# 10,000 leaves waits for seconds. `keep_unused` keeps the argument, and so its device.
@functools.partial(jax.jit, static_argnums=1, keep_unused=True)
def _on_its_device(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return jnp.zeros_like(x, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(mesh: Any, arrays: tuple[tuple[PartitionSpec, Any, Any], ...]) -> list[Any]:
    blocks = [
        (NamedSharding(mesh, spec).shard_shape(shape), dtype)
        for spec, shape, dtype in arrays
    ]
    # Unlike constraints, this works under automatic and explicit axes.
    return jax.shard_map(
        lambda: [jnp.zeros(*block) for block in blocks],
        mesh=mesh,
        in_specs=(),
        out_specs=[spec for spec, *_ in arrays],
        check_vma=False,
    )()
