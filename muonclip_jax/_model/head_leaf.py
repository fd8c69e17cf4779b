"""One leaf of an attention layer, and where in it the heads are."""

import math
from typing import Any, NamedTuple

import jax
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
        view = self._view(layer)
        if math.prod(view) != math.prod(layer):
            return None
        if not all(-len(view) <= axis < 0 for axis in (*self.head_axes, *self.parts)):
            return None
        whole = slice(None)
        sizes = {i: range(view[i])[self.parts.get(i, whole)] for i in self.head_axes}
        return math.prod(map(len, sizes.values()))

    def owners(self, shape: Shape) -> np.ndarray:
        """The head of each entry of one layer, -1 for none; it broadcasts to the layer.

        The one reading of `axis`, `split` and `part`: scales and matrices follow.
        """
        view = self._view(self.stack_of(len(shape)).layer(shape))
        rank, stop = len(view), len(view) + self.split_axis + 1
        split = range(stop - len(self.split), stop if self.split else 0)
        # In full where heads differ, and along factors, which are one axis again below.
        told = {i % rank for i in (*self.head_axes, *self.parts)} | {*split}
        owner = np.full([n if i in told else 1 for i, n in enumerate(view)], -1)
        meant = tuple(self.parts.get(i - rank, slice(None)) for i in range(rank))
        # Heads are counted by the axes in the order given, which need not be theirs.
        counts = [owner[meant].shape[i] for i in self.head_axes]
        heads = np.arange(math.prod(counts)).reshape(counts)
        order = sorted(range(len(counts)), key=self.head_axes.__getitem__)
        others = tuple(i for i in range(rank) if i - rank not in self.head_axes)
        owner[meant] = np.expand_dims(heads.transpose(order), others)
        if self.split:
            before, after = owner.shape[: split.start], owner.shape[stop:]
            owner = owner.reshape(*before, -1, *after)
        return owner

    def scale(self, shape: Shape, factors: jax.Array) -> jax.Array:
        """Spreads `(*stack, heads)` factors out so that they multiply the leaf."""
        place, owner = self.stack_of(len(shape)), self.owners(shape)
        # One factor is of all heads, which share a leaf of their layer.
        at = np.clip(owner, 0, factors.shape[-1] - 1)
        scale = factors.at[..., at].get(mode="promise_in_bounds")
        stacked = range(place.depth)
        return jnp.moveaxis(
            jnp.where(owner < 0, 1, scale), stacked, [place.start + i for i in stacked]
        )

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

    def _view(self, shape: Shape) -> Shape:
        """The shape of one layer after `split`."""
        at = len(shape) + self.split_axis
        known = math.prod(part for part in self.split if part != -1)
        sizes = (shape[at] // known if part == -1 else part for part in self.split)
        return (
            *shape[:at],
            *(sizes if self.split else shape[at : at + 1]),
            *shape[at + 1 :],
        )
