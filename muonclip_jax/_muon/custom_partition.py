"""Orthogonalization on a mesh, of leaves of which only the compiler knows how they lie.

With automatic axes a program is traced without that. JAX's custom partitioning calls
back when it is known.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    custom_partitioning,
    SdyShardingRule,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._matrices.view import MatrixView
from .._mesh.by_constraint import orthogonalize_by_constraint
from .._mesh.network import ANY_NETWORK, Network
from .._mesh.on_mesh import orthogonalize_on_each_device
from .._mesh.placement import fits
from .._newton_schulz.solver import Solver
from .one_device import orthogonalize_on_one_device


def orthogonalize_where_compiler_puts(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    specs: None = None,
    network: Network = ANY_NETWORK,
) -> list[jax.Array]:
    """Orthogonalizes leaves, and leaves them as they lie."""
    del specs

    def on_one_device(solver, leaves):
        return orthogonalize_on_one_device(solver, leaves, views=views)

    if solver.platform == "tpu":
        # Custom partitioning does not work there (jax-ml/jax#38196).
        if mesh := _automatic_mesh(leaves):
            return orthogonalize_by_constraint(
                solver, leaves, views=views, mesh=mesh, network=network
            )
        return on_one_device(solver, leaves)

    def partition(mesh: Mesh, arguments, results):
        del results
        solver, leaves = arguments
        specs = [_spec(leaf.shape, _sharding(leaf, mesh)) for leaf in leaves]
        on_device = functools.partial(
            orthogonalize_on_each_device,
            views=views,
            mesh=mesh.shape,
            specs=specs,
            network=network,
        )
        placed = [NamedSharding(mesh, spec) for spec in specs]
        told = jax.tree.map(lambda x: _sharding(x, mesh), solver)
        return mesh, on_device, placed, (told, placed)

    partitioned = custom_partitioning(on_one_device)
    partitioned.def_partition(partition, sharding_rule=_every_leaf_as_it_was)

    def call(solver, leaves):
        return partitioned(solver, leaves)

    # In the key of JAX's cache the call is an address, which does not say what it does.
    # The name does, where JAX leaves the address out (see `shardings`).
    settings = dataclasses.replace(solver, ns_steps=None), tuple(views), network
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    call.__name__ = f"orthogonalize_{digest[:16]}"
    return jax.jit(call)(solver, list(leaves))


def _automatic_mesh(leaves: Sequence[jax.Array]) -> AbstractMesh | None:
    """The mesh that leaves lie on by their type, or else the one that is set."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((m for m in meshes if set(m.axis_types) == {AxisType.Auto}), None)


def _sharding(x: Any, mesh: Mesh) -> NamedSharding:
    # Where no argument of the program lies on the mesh, JAX gives no mesh to any.
    if isinstance(x.sharding, NamedSharding):
        return x.sharding
    return NamedSharding(mesh, PartitionSpec())


def _spec(shape: tuple[int, ...], sharding: NamedSharding) -> PartitionSpec:
    # The compiler can cut unevenly.
    cuts_evenly = fits(shape, sharding.spec, sharding.mesh)
    return sharding.spec if cuts_evenly else PartitionSpec()


def _every_leaf_as_it_was(mesh: Mesh, operands, results) -> SdyShardingRule:
    del mesh
    names = (f"axis{i}" for i in itertools.count())
    mappings = tuple(ArrayMapping(*itertools.islice(names, x.rank)) for x in operands)
    return SdyShardingRule(mappings, mappings[len(mappings) - len(results) :])
