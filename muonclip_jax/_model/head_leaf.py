"""One leaf of an attention layer and the place of its heads, written by hand."""

import math
from typing import Any, NamedTuple

import numpy as np

from .._parameters.layer_stacks import LayerStack, stack_at
from .._parameters.paths import Shape
from .owned_leaf import OwnedLeaf


class HeadLeaf(NamedTuple):
    """Where one parameter leaf carries the heads of its attention layer.

    **Arguments:**

    - `path`: path below the layer, `"query/kernel"`, or from the root of the params
        with a slash in front, `"/encoder/query"`.
    - `ndim`: number of axes in one layer; all other axes are a stack of layers.
    - `axis`: the axis of the heads, from the end, after `split`. If heads are in
        groups, a tuple of axes, first the one that counts groups. `None` for a leaf
        that all heads share, such as the gain of a norm.
    - `split`: if heads have no axis of their own, the sizes into which an axis is
        reshaped: `(heads, head_dim)`, or `(3, heads, head_dim)` for fused kernels. One
        size may be -1, as in a reshape.
    - `part`: an axis from the end, after `split`, and the slice of it that belongs to
        this layer; a tuple of such pairs if several axes are cut. The rest of the leaf
        has other uses, such as the keys after the queries in one axis of heads.
    - `stack_axis`: the first axis of the stack, if it is not in front; a negative
        number is the last axis of the stack, from the end. The other arguments
        describe the leaf as if the stack were in front.
    - `split_axis`: the axis that `split` splits, from the end: -2 for a kernel of
        `(heads * head_dim, features)`, as in PyTorch and Equinox.

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

    def owned(self, shape: Shape) -> OwnedLeaf | None:
        """Returns the head of each entry in a leaf of this shape; `None` if unfit.

        Only this function interprets `axis`, `split` and `part`.

        **Raises:** `ValueError` if `stack_axis` is out of range.
        """
        depth = max(0, len(shape) - self.ndim)
        stack = (
            stack_at(self.stack_axis, len(shape), depth) if depth else LayerStack(0, 0)
        )
        if stack is None:
            raise ValueError(
                f"stack_axis={self.stack_axis} is out of range for '{self.path}' with "
                f"{len(shape)} axes, {self.ndim} of them in one layer"
            )
        layer = stack.layer(shape)
        if len(layer) != self.ndim or not -self.ndim <= self.split_axis < 0:
            return None
        # A size of -1 rounds down: 10 entries would be two heads of 4, and a rest that
        # no head scales.
        view = self._view(layer)
        if math.prod(view) != math.prod(layer):
            return None
        if not all(-len(view) <= axis < 0 for axis in (*self.head_axes, *self.parts)):
            return None
        rank, stop = len(view), len(view) + self.split_axis + 1
        split = range(stop - len(self.split), stop if self.split else 0)
        # Full size along axes of heads and parts, and along the sizes of `split`, which
        # become one axis again below.
        named = {i % rank for i in (*self.head_axes, *self.parts)} | {*split}
        head_ids = np.full([n if i in named else 1 for i, n in enumerate(view)], -1)
        slices = tuple(self.parts.get(i - rank, slice(None)) for i in range(rank))
        # `head_axes` says in which order heads are counted; the leaf may have another.
        counts = [head_ids[slices].shape[i] for i in self.head_axes]
        heads = np.arange(math.prod(counts)).reshape(counts)
        order = sorted(range(len(counts)), key=self.head_axes.__getitem__)
        others = tuple(i for i in range(rank) if i - rank not in self.head_axes)
        head_ids[slices] = np.expand_dims(heads.transpose(order), others)
        if self.split:
            before, after = head_ids.shape[: split.start], head_ids.shape[stop:]
            head_ids = head_ids.reshape(*before, -1, *after)
        stack_axes = tuple(range(stack.start, stack.start + stack.depth))
        return OwnedLeaf(self.path, stack_axes, head_ids, heads.size, self.axis is None)

    @property
    def head_axes(self) -> tuple[int, ...]:
        """Returns the axes of the heads, from the end, after `split`."""
        if self.axis is None:
            return ()
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def parts(self) -> dict[int, slice]:
        """Returns the slice of each axis that `part` cuts, after `split`."""
        pairs: Any = self.part or ()
        return dict([pairs] if pairs and isinstance(pairs[0], int) else pairs)

    def _view(self, shape: Shape) -> Shape:
        """Returns the shape of one layer after `split`."""
        axis = len(shape) + self.split_axis
        product = math.prod(part for part in self.split if part != -1)
        sizes = (shape[axis] // product if part == -1 else part for part in self.split)
        return (
            *shape[:axis],
            *(sizes if self.split else shape[axis : axis + 1]),
            *shape[axis + 1 :],
        )
