"""The head that owns each entry of a leaf: QK-Clip scales and Muon splits by it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._parameters.paths import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedLeaf:
    """A leaf of an attention layer, with the head that owns each of its entries.

    Leaves with equal fields are equal. `head_ids` has one entry along each axis on
    which the head does not depend, so equal heads have equal shapes.

    **Arguments:**

    - `path`: path below the layer, or, with a slash in front, from the params' root.
    - `stack`: the axes of the leaf that are a stack of layers, the outermost first.
    - `head_ids`: the head of each entry, -1 where no head scales it. Integers that
        broadcast to one layer of the leaf, without the axes of the stack.
    - `heads`: number of heads. Heads that share all their entries count as one: a gain
        that all heads share has 1.
    - `is_of_all`: whether all heads share the leaf. `heads` then does not say how many
        there are.
    """

    path: str
    stack: tuple[int, ...]
    head_ids: np.ndarray
    heads: int
    is_of_all: bool = False

    def __post_init__(self):
        # Two rules may give one leaf heads of different shapes, and leaves are keys of
        # layers. The smallest shape is unique, so bytes can be compared.
        head_ids = np.asarray(self.head_ids, np.int32)
        for axis in range(head_ids.ndim):
            first = head_ids.take([0], axis) if head_ids.shape[axis] else head_ids
            head_ids = first if (head_ids == first).all() else head_ids
        head_ids.setflags(write=False)
        object.__setattr__(self, "head_ids", head_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedLeaf) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        heads, head_ids = (self.heads, self.is_of_all), self.head_ids
        return self.path, self.stack, heads, head_ids.shape, head_ids.tobytes()

    @property
    def mask(self) -> np.ndarray:
        """Returns True for entries that a head owns; broadcasts to the whole leaf."""
        return np.expand_dims(self.head_ids >= 0, self.stack)

    def owned(self, shape: Shape) -> "OwnedLeaf | None":
        """Returns itself if the shape fits, else `None`, as `HeadLeaf.owned` does."""
        layer = [n for i, n in enumerate(shape) if i not in self.stack]
        is_deep = len(shape) == len(layer) + len(self.stack)
        if not is_deep or len(layer) != self.head_ids.ndim:
            return None
        pairs = zip(self.head_ids.shape, layer, strict=True)
        return self if all(size in (1, n) for size, n in pairs) else None

    def is_apart_from(self, other: "OwnedLeaf") -> bool:
        """Whether two descriptions of one leaf have no entry in common."""
        return not (self.mask & other.mask).any()

    def joined_with(self, other: "OwnedLeaf") -> "OwnedLeaf":
        """Returns the union of two descriptions that have the same stack."""
        head_ids = np.maximum(*np.broadcast_arrays(self.head_ids, other.head_ids))
        heads = max(self.heads, other.heads)
        return dataclasses.replace(self, head_ids=head_ids, heads=heads)

    def spread(self, of_heads: Any, rest: int = 1) -> Any:
        """Returns the value of each entry's head, from `(*stack, heads)`.

        Entries without a head get `rest`. The result broadcasts to the whole leaf. It
        is a NumPy array if `of_heads` is.
        """
        # Entries without an owner read the first head's value; `where` replaces it.
        heads, xp = np.maximum(self.head_ids, 0), jnp
        if isinstance(of_heads, np.ndarray):
            values, xp = of_heads[..., heads], np
        else:
            # Without the promise XLA clamps the indices or fills, at every update.
            values = of_heads.at[..., heads].get(mode="promise_in_bounds")
        values = xp.where(self.head_ids < 0, rest, values)
        return xp.moveaxis(values, range(len(self.stack)), self.stack)

    def along(self, axis: int) -> tuple[int, int]:
        """Returns how many entries of a line along an axis are owned, and by how many.

        On an axis of heads both numbers are equal. If the head does not depend on the
        axis, there is 1 owner. Otherwise heads are a part of the axis.
        """
        # In sorted order each head begins where its number first appears. Prepending
        # -1 (no owner) keeps -1 from counting as a beginning.
        ordered = np.sort(self.head_ids, axis)
        entries = (ordered >= 0).sum(axis)
        owners = (np.diff(ordered, axis=axis, prepend=-1) > 0).sum(axis)
        return int(entries.max(initial=0)), int(owners.max(initial=0))

    def row_spec(
        self, cut: PartitionSpec, counts: Sequence[int]
    ) -> PartitionSpec | None:
        """Returns the spec of a row `(*stack, heads)`, if `cut` is the leaf's spec.

        `counts` has the number of blocks for each entry of `cut`. Returns `None` if a
        block has no run of consecutive heads: a block of a fused (3, heads, head_dim)
        may have heads of the query but not of the key, or the other way round.
        """
        rest = (i for i in range(self.mask.ndim) if i not in self.stack)
        entries = dict(enumerate(cut))
        of_heads = None
        for axis, leaf_axis in enumerate(rest):
            entry = entries.get(leaf_axis)
            if entry is None or self.along(axis)[1] < 2:
                continue  # whole, or cut where the head does not depend on it
            # Block i of the leaf must hold run i of the heads, of as many equal runs as
            # blocks: a row cut by the same entry has that run on the same device.
            blocks = np.array_split(self.head_ids, counts[leaf_axis], axis)
            runs = np.array_split(np.arange(self.heads), counts[leaf_axis])
            pairs = zip(blocks, runs, strict=True)
            is_run = all(np.array_equal(np.unique(b[b >= 0]), run) for b, run in pairs)
            if not is_run or self.heads % counts[leaf_axis] or of_heads is not None:
                return None
            of_heads = entry
        return PartitionSpec(*map(entries.get, self.stack), of_heads)
