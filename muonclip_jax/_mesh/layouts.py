"""How the parameters of a transformation lie: as told, as found, or as once seen."""

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from .._parameters.paths import is_masked, Path, PathedTree
from .network import ANY_NETWORK, Network, network_of
from .placement import find_placement, given_shardings, Placement, Shardings


class Layouts:
    """What the user gave, and what `init` saw of arrays.

    With automatic axes a traced program does not know how its arguments lie. What they
    were when `init` saw them is then the best guess. A wrong one costs time but not
    correctness, since the compiler moves what lies elsewhere on the mesh.
    """

    def __init__(
        self,
        shardings: Shardings | None,
        repeat_axes: tuple[str, ...] | None = None,
    ):
        self._shardings = shardings
        self._repeat_axes = repeat_axes
        self._seen: dict[Path, tuple[Any, ...]] = {}
        self._networks: dict[Any, Network] = {}  # by shape of the mesh

    def given(self, tree: PathedTree) -> list[Any]:
        """What the user gave for each leaf."""
        return given_shardings(self._shardings, tree)

    def remember(
        self, paths: Sequence[Path], params: Sequence[Any], placement: Placement | None
    ) -> None:
        """Keeps how parameters lie, if the mesh cuts any of them.

        Parameters that `init` sees whole are often cut later, and one that lies whole
        need not be moved. Those on one device are forgotten.
        """
        self.network(placement)  # kept for tracers, whose mesh names no devices
        if any(isinstance(x, Tracer) for x in params):
            return
        for path, leaf in zip(paths, params, strict=True):
            if not is_masked(leaf):
                self._seen.pop(path, None)
        if placement is None or not any(map(_cuts, placement.specs)):
            return
        mesh = placement.mesh.shape_tuple
        for path, leaf, spec in zip(paths, params, placement.specs, strict=True):
            if spec is not None:
                self._seen[path] = mesh, leaf.shape, spec

    def placement(
        self, paths: Sequence[Path], leaves: Sequence[Any], given: Sequence[Any]
    ) -> Placement | None:
        """Where leaves lie, as `find_placement` has it, or else as they once did."""
        placement = find_placement(paths, leaves, given)
        if placement is None:
            return None
        specs = (
            self._recall(path, leaf, placement) if spec is None else spec
            for path, leaf, spec in zip(paths, leaves, placement.specs, strict=True)
        )
        return placement._replace(specs=tuple(specs))

    def network(self, placement: Placement | None) -> Network:
        """That of the mesh, but what replicas repeat is what the user says.

        **Raises:** `ValueError` for axes that the mesh lacks.
        """
        if placement is None:
            return ANY_NETWORK
        mesh = placement.mesh
        # A traced program may not know its devices.
        if isinstance(mesh, Mesh):
            self._networks[mesh.shape_tuple] = network_of(mesh)
        found = self._networks.get(mesh.shape_tuple, ANY_NETWORK)
        if self._repeat_axes is None:
            return found
        absent = [name for name in self._repeat_axes if name not in mesh.shape]
        if absent:
            raise ValueError(
                f"repeat_axes names axes that the mesh lacks: {absent}; it has "
                f"{list(mesh.shape)}"
            )
        return Network(self._repeat_axes, is_ragged=found.is_ragged)

    def _recall(
        self, path: Path, leaf: Any, placement: Placement
    ) -> PartitionSpec | None:
        mesh, shape, spec = self._seen.get(path, (None, None, None))
        same = mesh == placement.mesh.shape_tuple and shape == getattr(leaf, "shape", 0)
        return spec if same else None


def _cuts(spec: PartitionSpec | None) -> bool:
    return spec is not None and any(spec)
