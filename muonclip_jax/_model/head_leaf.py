"""One leaf of an attention layer, and where in it the heads are."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._parameters.stacks import Shape, Stack, stack_at


class HeadLeaf(NamedTuple):
    """Where one parameter leaf carries the heads of its attention layer.

    **Arguments:**

    - `path`: below the layer, `"query/kernel"`, or from the root of the params with a
        slash in front, `"/encoder/query"`.
    - `ndim`: how many axes the leaf has in one layer; all others are a stack of layers.
    - `axis`: the axis of the heads, from the end, after `split`; several, in a tuple,
        where heads are in groups, the one that counts groups first; `None` for a leaf
        that all heads share, such as the gain of a norm.
    - `split`: the sizes that one axis is made of, where heads have no axis of their
        own: `(heads, head_dim)`, or `(3, heads, head_dim)` for fused kernels. One of
        them may be -1, as in a reshape.
    - `part`: an axis from the end, after `split`, and the slice of it that is meant;
        several such pairs, in a tuple, where several axes are cut. The rest of the leaf
        belongs to others, such as the keys after the queries in one axis of heads.
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
    part: tuple[int, slice] | tuple[tuple[int, slice], ...] | None = None
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
        # A size of -1 rounds down: 10 into heads of 4 would be two heads and a rest
        # that no head scales.
        size = layer[self.split_axis]
        if math.prod(self._sizes(size)) != size:
            return None
        view = self._view(layer)
        axes = *self.head_axes, *self.parts
        if not all(-len(view) <= axis < 0 for axis in axes):
            return None
        return math.prod(self._counts(view))

    def scale(self, shape: Shape, factors: Any) -> Any:
        """Spreads `(*stack, heads)` factors out so that they multiply the leaf.

        In NumPy if they are NumPy's.
        """
        xp: Any = np if isinstance(factors, np.ndarray) else jnp
        place = self.stack_of(len(shape))
        view = self._view(place.sizes(shape) + place.layer(shape))
        # The stack in front, the heads at their axes, and 1 at all others.
        *stack, heads = factors.shape
        axes = self.head_axes if heads != 1 else ()
        scale = factors.reshape(*stack, *(self._counts(view) if axes else ()))
        # Heads are counted by the axes in the order given, which need not be theirs.
        order = [len(stack) + axes.index(axis) for axis in sorted(axes)]
        scale = scale.transpose(*range(len(stack)), *order)
        others = [i for i in range(-len(view) + len(stack), 0) if i not in axes]
        scale = xp.expand_dims(scale, tuple(others))
        for axis, part in self.parts.items():
            inside = np.zeros(view[axis], bool)
            inside[part] = True
            if axis in axes:
                # Factors of heads that are a part of their axis, and 1 for the others.
                start = int(np.argmax(inside))
                widths = [(0, 0)] * scale.ndim
                widths[axis] = (start, view[axis] - start - scale.shape[axis])
                scale = xp.pad(scale, widths, constant_values=1)
            else:
                inside = inside.reshape(-1, *(1,) * (-axis - 1))
                scale = xp.where(inside, scale, 1)
        if self.split:
            # The axes of the split are one again, which needs each in its full size.
            stop = len(view) + 1 + self.split_axis
            start = stop - len(self.split)
            before, after = scale.shape[:start], scale.shape[stop:]
            scale = xp.broadcast_to(scale, before + view[start:stop] + after)
            scale = scale.reshape(*before, -1, *after)
        stacked = range(place.depth)
        return xp.moveaxis(scale, stacked, [place.start + i for i in stacked])

    def row_spec(self, rank: int, spec: PartitionSpec) -> PartitionSpec | None:
        """The spec of a row `(*stack, heads)` where this one cuts the leaf.

        `None` where a block of the leaf has no consecutive heads.
        """
        place, entries = self.stack_of(rank), [*spec, *[None] * (rank - len(spec))]
        stack = entries[place.start : place.start + place.depth]
        cuts = []
        for axis in self.head_axes:
            # The axis of the leaf of which this one, after `split`, is all or a part.
            if axis <= self.split_axis:
                axis = min(axis + max(len(self.split), 1) - 1, self.split_axis)
            cuts.append(entries[place.axis(axis, rank)])
        if not any(cuts):
            return PartitionSpec(*stack, None)
        # Blocks of an axis are consecutive along its first factor alone: a block of the
        # fused (3, heads, head_dim) has heads of the query and of no key, or the other
        # way round.
        first = self.head_axes[0]
        start = self.split_axis + 1 - len(self.split)
        is_minor = start < first <= self.split_axis
        # Nor are they where heads are a part of an axis, or counted in another order.
        is_cut = not self.parts.keys().isdisjoint(self.head_axes)
        is_turned = list(self.head_axes) != sorted(self.head_axes)
        if is_minor or is_cut or is_turned or any(cuts[1:]):
            return None
        return PartitionSpec(*stack, cuts[0])

    def is_apart_from(self, other: "HeadLeaf") -> bool:
        """Whether parts of one leaf have no entry in common, as far as they tell."""
        if self._replace(axis=None, part=None) != other._replace(axis=None, part=None):
            return False
        pairs = [
            (x, other.parts[axis])
            for axis, x in self.parts.items()
            if axis in other.parts
        ]
        return any(
            None not in (a.start, a.stop, b.start, b.stop)
            and (0 <= a.start <= a.stop <= b.start or 0 <= b.start <= b.stop <= a.start)
            for a, b in pairs
        )

    @property
    def head_axes(self) -> tuple[int, ...]:
        """The axes of the heads, from the end, after `split`."""
        if self.axis is None:
            return ()
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def parts(self) -> dict[int, slice]:
        """The axes that are cut, after `split`, and what is meant of them."""
        pairs: Any = self.part or ()
        return dict([pairs] if pairs and isinstance(pairs[0], int) else pairs)

    def _counts(self, view: Shape) -> Shape:
        """How many heads there are along each axis of them, of all or of the part."""
        sizes = ((axis, range(view[axis])) for axis in self.head_axes)
        return tuple(len(n[self.parts.get(axis, slice(None))]) for axis, n in sizes)

    def _view(self, shape: Shape) -> Shape:
        """The shape after `split`."""
        at = len(shape) + self.split_axis
        return shape[:at] + self._sizes(shape[at]) + shape[at + 1 :]

    def _sizes(self, size: int) -> Shape:
        """The sizes that an axis is split into."""
        known = math.prod(part for part in self.split if part != -1)
        sizes = (size // known if part == -1 else part for part in self.split)
        return tuple(sizes) if self.split else (size,)
