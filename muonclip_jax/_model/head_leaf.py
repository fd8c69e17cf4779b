"""One leaf of an attention layer: where in it the heads lie."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._parameters.stacks import Shape, Stack, stack_at


class HeadLeaf(NamedTuple):
    """Where one parameter leaf carries the heads of its attention layer.

    **Arguments:**

    - `path`: below the layer, `"query/kernel"`.
    - `ndim`: how many axes the leaf has in one layer; all others are a stack of layers.
    - `axis`: the axis of the heads, from the end, after `split`; several, in a tuple,
        where heads lie in groups; `None` for a leaf that all heads share, such as the
        gain of a norm.
    - `split`: the sizes that one axis is made of, where heads have no axis of their
        own: `(heads, head_dim)`, or `(3, heads, head_dim)` for fused kernels. One of
        them may be -1, as in a reshape.
    - `part`: an axis from the end, after `split`, and the slice of it that is meant;
        the rest of the leaf belongs to others.
    - `stack_axis`: where the axes of a stack begin, if not in front, or, from the end,
        where they stop: -1 for the last; the other arguments describe the leaf as if
        they were in front.
    - `split_axis`: the axis that `split` is of, from the end: -2 for a kernel of
        `(heads * head_dim, features)`, as PyTorch and Equinox have it.

    !!! example

        GPT-2's fused kernel of shape `(768, 3 * 768)`, 12 heads:

        >>> import muonclip_jax as mc
        >>> fused = (3, 12, 64)
        >>> query = mc.HeadLeaf("c_attn/kernel", 2, split=fused, part=(-3, slice(0, 1)))
        >>> key = mc.HeadLeaf("c_attn/kernel", 2, split=fused, part=(-3, slice(1, 2)))
        >>> layer = mc.AttentionLayer("h/0/attn", query=(query,), key=(key,))
    """

    path: str
    ndim: int
    axis: int | tuple[int, ...] | None = -2
    split: tuple[int, ...] = ()
    part: tuple[int, slice] | None = None
    stack_axis: int = 0
    split_axis: int = -1

    def stack(self, shape: Shape) -> Shape:
        """The axes that a stack of layers adds to a leaf of this shape."""
        return self.stack_of(len(shape)).sizes(shape)

    def stack_of(self, rank: int) -> Stack:
        """Where the axes of the stack are in a leaf of this rank.

        **Raises:** `ValueError` where `stack_axis` is out of range.
        """
        depth = max(0, rank - self.ndim)
        stack = stack_at(self.stack_axis, rank, depth) if depth else Stack(0, 0)
        if stack is None:
            raise ValueError(
                f"stack_axis={self.stack_axis} is out of range for '{self.path}' with "
                f"{rank} axes, {self.ndim} of them in one layer"
            )
        return stack

    def heads(self, shape: Shape) -> int | None:
        """The number of heads in a leaf of this shape; `None` if it does not fit.

        A leaf that all heads share counts as one.
        """
        layer = self.stack_of(len(shape)).layer(shape)
        if len(layer) != self.ndim or not -self.ndim <= self.split_axis < 0:
            return None
        size = layer[self.split_axis]
        if math.prod(self._sizes(size)) != size:
            return None
        view = self._view(layer)
        axes = *self.head_axes, *(self.part[:1] if self.part else ())
        if not all(-len(view) <= axis < 0 for axis in axes):
            return None
        return math.prod(view[axis] for axis in self.head_axes)

    def scale(self, shape: Shape, factors: jax.Array) -> jax.Array:
        """Spreads `(*stack, heads)` factors out so that they multiply the leaf."""
        place = self.stack_of(len(shape))
        view = self._view(place.sizes(shape) + place.layer(shape))
        scale = self._at_head_axes(factors, view)
        if self.part:
            scale = jnp.where(_inside(view, *self.part), scale, 1)
        if self.split:
            scale = self._joined(scale, view)
        stack = range(place.depth)
        return jnp.moveaxis(scale, stack, [place.start + i for i in stack])

    def row_spec(self, rank: int, spec: PartitionSpec) -> PartitionSpec | None:
        """How a spec of such a leaf cuts a row `(*stack, heads)`.

        `None` where a block of the leaf has no consecutive heads.
        """
        place, entries = self.stack_of(rank), [*spec, *[None] * (rank - len(spec))]
        stack = entries[place.start : place.start + place.depth]
        cuts = [
            entries[place.axis(self._before_split(axis), rank)]
            for axis in self.head_axes
        ]
        if not any(cuts):
            return PartitionSpec(*stack, None)
        first = self.head_axes[0]
        start = self.split_axis + 1 - len(self.split)
        is_minor = start < first <= self.split_axis
        return None if is_minor or any(cuts[1:]) else PartitionSpec(*stack, cuts[0])

    @property
    def head_axes(self) -> tuple[int, ...]:
        """The axes of the heads, from the end, after `split`."""
        if self.axis is None:
            return ()
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def _before_split(self, axis: int) -> int:
        """The axis of the leaf that one after `split` is, or is a part of."""
        if axis > self.split_axis:
            return axis
        return min(axis + max(len(self.split), 1) - 1, self.split_axis)

    def _at_head_axes(self, factors: jax.Array, view: Shape) -> jax.Array:
        """The factors with the stack in front, heads at their axes, 1 at all others."""
        *stack, heads = factors.shape
        shape = [*stack, *(1,) * (len(view) - len(stack))]
        for axis in self.head_axes if heads != 1 else ():
            shape[axis] = view[axis]
        return factors.reshape(shape)

    def _joined(self, x: jax.Array, view: Shape) -> jax.Array:
        """The axes of the split as one again."""
        stop = len(view) + 1 + self.split_axis
        start = stop - len(self.split)
        before, behind = x.shape[:start], x.shape[stop:]
        x = jnp.broadcast_to(x, before + view[start:stop] + behind)
        return x.reshape(*before, -1, *behind)

    def _view(self, shape: Shape) -> Shape:
        at = len(shape) + self.split_axis
        return shape[:at] + self._sizes(shape[at]) + shape[at + 1 :]

    def _sizes(self, size: int) -> Shape:
        """What an axis is split into."""
        known = math.prod(part for part in self.split if part != -1)
        sizes = (size // known if part == -1 else part for part in self.split)
        return tuple(sizes) if self.split else (size,)


def _inside(shape: Shape, axis: int, part: slice) -> np.ndarray:
    """Whether an entry belongs to the part, along its axis."""
    inside = np.zeros(shape[axis], bool)
    inside[part] = True
    return inside.reshape(-1, *(1,) * (-axis - 1))


def everywhere(x: jax.Array) -> jax.Array:
    """A copy on every device, where axes are explicit and some of them cut it."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, PartitionSpec()) if any(spec) else x
