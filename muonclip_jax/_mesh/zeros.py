"""State that lies on a mesh as the parameters do, from the start."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .placement import lies, Placement


def lay_zeros(
    zeros: Sequence[Any], params: Sequence[Any], placement: Placement | None
) -> list[Any]:
    """Zeros of the same shapes and dtypes that lie as `placement` says `params` do.

    Under `jit` nothing else tells the compiler where they are to lie: zeros depend on
    no parameter.
    """
    results = list(zeros)
    if placement is None:
        return results
    moved = [
        i
        for i, (x, spec) in enumerate(zip(zeros, placement.specs, strict=True))
        if spec is not None and not lies(x, placement.mesh, spec)
    ]
    if moved:
        specs = tuple(placement.specs[i] for i in moved)
        arrays = tuple((zeros[i].shape, zeros[i].dtype) for i in moved)
        for i, x in zip(moved, _zeros(placement.mesh, specs, arrays), strict=True):
            results[i] = x
    # A tracer's mesh does not name its devices, but an argument that is kept does.
    kept = [x for x in params if isinstance(x, Tracer)]
    return jax.lax.optimization_barrier((results, kept))[0] if kept else results


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
