"""State that lies on a mesh as the parameters do, from the start."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from .._parameters.paths import is_masked
from .placement import lies, Placement


#: Other sizes than a leaf's, by axis.
Sizes = Mapping[int, int]


def zeros_like_params(
    params: Sequence[Any],
    placement: Placement | None,
    dtypes: Sequence[DTypeLike | None],
    sizes: Sequence[Sizes] | None = None,
) -> list[Any]:
    """Zeros of the params' shapes that lie as `placement` says the params do.

    Axes that `sizes` names have another size, and are not cut. Under `jit` nothing else
    tells the compiler where they are to lie: zeros depend on no parameter.
    """
    sizes = sizes or [{}] * len(params)
    results = [
        x if is_masked(x) else _zeros_like(x, dtype, of_axes)
        for x, dtype, of_axes in zip(params, dtypes, sizes, strict=True)
    ]
    if placement is None:
        return results
    specs = [_whole_along(*pair) for pair in zip(placement.specs, sizes, strict=True)]
    moved = [
        i
        for i, (x, spec) in enumerate(zip(results, specs, strict=True))
        if spec is not None and not lies(x, placement.mesh, spec)
    ]
    if moved:
        arrays = tuple((results[i].shape, results[i].dtype) for i in moved)
        laid = _zeros(placement.mesh, tuple(specs[i] for i in moved), arrays)
        for i, x in zip(moved, laid, strict=True):
            results[i] = x
    # A tracer's mesh does not name its devices. A param does, but jit drops one that
    # nothing reads.
    kept = [x for x in params if isinstance(x, Tracer)]
    return jax.lax.optimization_barrier((results, kept))[0] if kept else results


def _whole_along(spec: PartitionSpec | None, axes: Sizes) -> PartitionSpec | None:
    if spec is None:
        return None
    return PartitionSpec(*(None if i in axes else x for i, x in enumerate(spec)))


def _zeros_like(x: Any, dtype: DTypeLike | None, sizes: Sizes) -> jax.Array:
    is_here = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    is_alone = is_here and isinstance(x.sharding, SingleDeviceSharding)
    if sizes:
        shape = [sizes.get(i, size) for i, size in enumerate(x.shape)]
        device = x.sharding if is_alone and x.committed else None
        return jnp.zeros(shape, dtype, device=device)
    # A program is one of all devices where a mesh is set.
    if is_alone and jax.sharding.get_abstract_mesh().empty:
        return _on_its_device(x, dtype)
    return jnp.zeros_like(x, dtype)


# One call of a compiled program, where `jnp.zeros_like` makes several of operations:
# a model of 10,000 leaves waits for seconds.
@functools.partial(jax.jit, static_argnums=1, keep_unused=True)
def _on_its_device(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return jnp.zeros_like(x, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(mesh: Any, specs: tuple[PartitionSpec, ...], arrays: Any) -> list[jax.Array]:
    blocks = [
        (NamedSharding(mesh, spec).shard_shape(shape), dtype)
        for spec, (shape, dtype) in zip(specs, arrays, strict=True)
    ]
    # Unlike constraints this is the same under automatic and explicit axes.
    return jax.shard_map(
        lambda: [jnp.zeros(*block) for block in blocks],
        mesh=mesh,
        in_specs=(),
        out_specs=list(specs),
        check_vma=False,
    )()
