"""One leaf of an attention layer: where in it the heads lie."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadLeaf(NamedTuple):
    """Where one parameter leaf carries the heads of its attention layer.

    **Arguments:**

    - `path`: below the layer, `"query/kernel"`.
    - `ndim`: how many axes the leaf has in one layer; all others are a stack of layers.
    - `axis`: the axis of the heads, from the end, after `split`; `None` for a leaf that
        all heads share, such as the gain of a norm.
    - `split`: the sizes that the last axis is made of, where heads have no axis of
        their own: `(heads, head_dim)`, or `(3, heads, head_dim)` for fused kernels.
        One of them may be -1, as in a reshape.
    - `part`: an axis from the end, after `split`, and the slice of it that is meant;
        the rest of the leaf belongs to others.
    - `stack_axis`: where the axes of a stack begin, if not in front; the other
        arguments describe the leaf as if they were.

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
    axis: int | None = -2
    split: tuple[int, ...] = ()
    part: tuple[int, slice] | None = None
    stack_axis: int = 0

    def stack(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that a stack of layers adds to a leaf of this shape."""
        return self._stack_first(shape)[: max(0, len(shape) - self.ndim)]

    def heads(self, shape: tuple[int, ...]) -> int | None:
        """The number of heads in a leaf of this shape; `None` if it does not fit.

        A leaf that all heads share counts as one.
        """
        layer = self._stack_first(shape)[len(self.stack(shape)) :]
        if len(layer) != self.ndim:
            return None
        if self.split and math.prod(self._sizes(layer[-1])) != layer[-1]:
            return None
        view = self._view(layer)
        axis = -1 if self.axis is None else self.axis
        axes = (axis, self.part[0]) if self.part else (axis,)
        if not all(-len(view) <= a < 0 for a in axes):
            return None
        return 1 if self.axis is None else view[axis]

    def scale(self, shape: tuple[int, ...], factors: jax.Array) -> jax.Array:
        """Spreads `(*stack, heads)` factors out so that they multiply the leaf."""
        view = self._view(self._stack_first(shape))
        stack, axis = factors.ndim - 1, -1 if self.axis is None else self.axis
        before = len(view) + axis - stack
        scale = factors.reshape(
            *factors.shape[:-1], *(1,) * before, -1, *(1,) * (-axis - 1)
        )
        if self.part:
            cut, part = self.part
            inside = jnp.zeros(view[cut], bool).at[part].set(True)
            scale = jnp.where(inside.reshape(-1, *(1,) * (-cut - 1)), scale, 1)
        if self.split:
            kept, sizes = scale.shape[: -len(self.split)], view[-len(self.split) :]
            scale = jnp.broadcast_to(scale, kept + sizes).reshape(*kept, -1)
        first = range(stack)
        return jnp.moveaxis(scale, first, [self.stack_axis + i for i in first])

    def _stack_first(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape as it were if the layers were stacked in front."""
        start = self.stack_axis
        stop = start + max(0, len(shape) - self.ndim)
        return shape[start:stop] + shape[:start] + shape[stop:]

    def _view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:-1] + self._sizes(shape[-1]) if self.split else shape

    def _sizes(self, last: int) -> tuple[int, ...]:
        known = math.prod(size for size in self.split if size != -1)
        return tuple(last // known if size == -1 else size for size in self.split)
