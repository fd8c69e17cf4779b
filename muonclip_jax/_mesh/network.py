"""What is known of the network between the devices of a mesh.

Between the slices of a TPU it is slow against their chips: there a matrix is often
iterated twice in less time than its result takes to arrive. So replicas repeat the work
of others, and do not share it.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._matrices.stacks import Stack
from .._newton_schulz.solver import Solver
from .block_layout import AxisRoles


#: Arithmetic a byte from which on sharing it between slices takes less time: 459
#: TFLOP/s of a v5p chip in bfloat16 over its 6.25 GB/s of the data center's network
#: (https://jax-ml.github.io/scaling-book/tpus).
FLOPS_PER_BYTE = 459e12 / 6.25e9


#: Chips for which the compiler has exchanges of unequal sizes. For "TPU v5 lite" it has
#: some, and refuses others.
RAGGED_KINDS = ("TPU v4", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")


class Network(NamedTuple):
    """Replicas along `axes` repeat what takes less than `below` a byte of results.

    `is_ragged` is whether devices can send each other messages of unequal sizes.
    """

    axes: tuple[str, ...] = ()
    below: float = math.inf  # floating-point operations
    is_ragged: bool = False

    def of_matrices(
        self,
        solver: Solver,
        shape: tuple[int, int],
        dtype: jnp.dtype,
        roles: AxisRoles,
        mesh: Mapping[Any, int],
    ) -> tuple[str, ...]:
        """The axes along which matrices of one shape, dtype and roles are repeated.

        Sharing them saves a device its part of the arithmetic of its group of replicas.
        But every one in the group receives its blocks of all results of the others.
        """
        along = tuple(name for name in roles.replicated if name in self.axes)
        group = [mesh[name] for name in roles.replicated if name not in self.axes]
        flops, size = work_and_bytes(solver, shape, dtype)
        return along if self.are_cheap(flops / math.prod(group), size) else ()

    @property
    def alternatives(self) -> list["Network"]:
        """This, and to repeat everything where that is a question of cost."""
        if math.isinf(self.below):
            return [self]
        return [self, self._replace(below=math.inf)]

    def received(
        self, solver: Solver, stack: Stack, roles: AxisRoles, mesh: Mapping[Any, int]
    ) -> float:
        """Bytes that a device receives along the axes, of results that are shared."""
        along = math.prod(mesh[x] for x in roles.replicated if x in self.axes)
        blocks = stack.count / math.prod(mesh[x] for x in roles.sharded)
        _, size = work_and_bytes(solver, stack.shape, jnp.dtype(stack.dtype))
        return blocks * size * (1 - 1 / along)

    def are_cheap(self, flops: float, size: float) -> bool:
        """Whether arithmetic takes less time than as many bytes."""
        return flops < self.below * size


ANY_NETWORK = Network()


def work_and_bytes(
    solver: Solver, shape: tuple[int, int], dtype: jnp.dtype
) -> tuple[float, float]:
    """Floating-point operations of a matrix, and what it takes to send."""
    size = math.prod(shape) * solver.wire_dtype(dtype).itemsize
    return 2.0 * solver.cost(shape, dtype), size


def axes_to_repeat(
    given: str | Sequence[str] | None, replicas: Sequence[Hashable]
) -> tuple[str, ...] | None:
    """What the user says, as names; `replicas` are those of `axis_name`."""
    if given is None:
        return None
    axes = (given,) if isinstance(given, str) else tuple(given)
    both = [name for name in axes if name in replicas]
    if both:
        raise ValueError(
            f"both repeat_axes and axis_name name {both}, but what axis_name names is "
            "shared: leave them out of axis_name, and average gradients over them"
        )
    return axes


def network_of(mesh: Mesh) -> Network:
    """That of a mesh's devices; between slices of a TPU arithmetic takes less time."""
    slices = np.vectorize(_slice, otypes=[int])(mesh.devices)
    axes = [
        name
        for axis, name in enumerate(mesh.axis_names)
        if (slices != slices.take([0], axis)).any()
    ]
    is_ragged = all(x.device_kind in RAGGED_KINDS for x in mesh.devices.flat)
    return Network(tuple(axes), FLOPS_PER_BYTE, is_ragged)


def _slice(device: Any) -> int:
    # On GPU it counts hosts, and the networks between them are many.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
