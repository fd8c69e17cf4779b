"""Products of arrays with named axes, which stay cut as explicit axes of a mesh say."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


class NamedAxes(NamedTuple):
    """A letter for each axis of an array; those that are `gone` have the size 1."""

    names: str
    gone: tuple[int, ...] = ()

    @property
    def kept(self) -> str:
        return "".join(x for i, x in enumerate(self.names) if i not in self.gone)


def named_product(
    factors: tuple[NamedAxes, NamedAxes], product: NamedAxes, x: jax.Array, y: jax.Array
) -> jax.Array:
    """Multiplies, and sums over the names that the product lacks, in full precision."""
    arrays = [
        jnp.squeeze(array, axes.gone)
        for axes, array in zip(factors, (x, y), strict=True)
    ]
    names = [axes.kept for axes in factors]
    cuts, mesh = _cuts(names, arrays)
    settings: dict[str, Any] = {}
    if mesh is not None:
        arrays = [
            jax.sharding.reshard(array, _sharding(mesh, of, cuts))
            for of, array in zip(names, arrays, strict=True)
        ]
        settings["out_sharding"] = _sharding(mesh, product.kept, cuts)
    result = jnp.einsum(
        f"{','.join(names)}->{product.kept}", *arrays, precision="highest", **settings
    )
    return jnp.expand_dims(result, product.gone)


def _cuts(names: list[str], arrays: list[jax.Array]) -> tuple[dict[str, Any], Any]:
    """The explicit axes of the mesh by name, and the mesh if there are any."""
    cuts: dict[str, Any] = {}
    mesh = None
    for of, array in zip(names, arrays, strict=True):
        sharding = jax.typeof(array).sharding
        for name, cut in zip(of, sharding.spec, strict=False):
            if cut is not None:
                cuts[name], mesh = cut, sharding.mesh
    return cuts, mesh


def _sharding(mesh: Any, names: str, cuts: dict[str, Any]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(cuts.get(name) for name in names)))
