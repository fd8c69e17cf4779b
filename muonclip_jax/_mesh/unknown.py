"""A warning where nobody says how parameters lie, and no one can find out."""

import warnings
from collections.abc import Sequence

from .._matrices.view import MatrixView
from .._parameters.paths import Path, show_all
from .placement import Placement


def warn_of_unknown(
    paths: Sequence[Path],
    views: Sequence[MatrixView | None],
    placement: Placement | None,
) -> None:
    """Warns on a mesh of TPUs, if it is unknown how matrices lie on it."""
    if placement is None or not _is_of_tpus(placement):
        return
    unknown = [
        path
        for path, view, spec in zip(paths, views, placement.specs, strict=True)
        if view is not None and spec is None
    ]
    if unknown:
        warnings.warn(
            f"Muon does not know how {show_all(unknown, at_most=3)} lie on the "
            "mesh: under automatic axes JAX does not report it on TPU. XLA will choose "
            "how the matrices travel to the devices that orthogonalize them, which "
            "takes more traffic. Pass shardings= to the optimizer, make the mesh with "
            "AxisType.Explicit, or call tx.init outside jax.jit on sharded parameters",
            stacklevel=3,
        )


def _is_of_tpus(placement: Placement) -> bool:
    device = placement.mesh.abstract_mesh.abstract_device
    return device is not None and device.device_kind.startswith("TPU")
