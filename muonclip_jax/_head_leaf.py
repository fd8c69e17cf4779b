"""One leaf of an attention layer: where in it the heads lie."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadLeaf(NamedTuple):
    """Where one parameter leaf carries the heads of its attention layer.

    **Arguments:**

    - `path`: below the layer, `"query/kernel"`.
    - `ndim`: how many axes the leaf has in one layer; axes in front of them are a
        stack of layers.
    - `axis`: the axis of the heads, from the end, after `split`.
    - `split`: the sizes that the last axis is made of, where heads have no axis of
        their own: `(heads, head_dim)`, or `(3, heads, head_dim)` for fused kernels.
        One of them may be -1, as in a reshape.
    - `part`: an axis from the end, after `split`, and the slice of it that is meant;
        the rest of the leaf belongs to others.

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
    axis: int = -2
    split: tuple[int, ...] = ()
    part: tuple[int, slice] | None = None

    def heads(self, shape: tuple[int, ...], stack: tuple[int, ...]) -> int | None:
        """The number of heads in a leaf of this shape; `None` if it does not fit."""
        if len(shape) != len(stack) + self.ndim or shape[: len(stack)] != stack:
            return None
        if self.split and math.prod(self._sizes(shape[-1])) != shape[-1]:
            return None
        view, layer = self._view(shape), self._view(shape[len(stack) :])
        axes = (self.axis, self.part[0]) if self.part else (self.axis,)
        return view[self.axis] if all(-len(layer) <= a < 0 for a in axes) else None

    def scale(self, shape: tuple[int, ...], factors: jax.Array) -> jax.Array:
        """Spreads `(*stack, heads)` factors out so that they multiply the leaf."""
        view, stack = self._view(shape), factors.ndim - 1
        before = len(view) + self.axis - stack
        scale = factors.reshape(
            *factors.shape[:-1], *(1,) * before, -1, *(1,) * (-self.axis - 1)
        )
        if self.part:
            axis, part = self.part
            inside = jnp.zeros(view[axis], bool).at[part].set(True)
            scale = jnp.where(inside.reshape(-1, *(1,) * (-axis - 1)), scale, 1)
        if self.split:
            kept, sizes = scale.shape[: -len(self.split)], self._sizes(shape[-1])
            scale = jnp.broadcast_to(scale, kept + sizes).reshape(*kept, shape[-1])
        return scale

    def _view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:-1] + self._sizes(shape[-1]) if self.split else shape

    def _sizes(self, last: int) -> tuple[int, ...]:
        known = math.prod(size for size in self.split if size != -1)
        return tuple(last // known if size == -1 else size for size in self.split)
