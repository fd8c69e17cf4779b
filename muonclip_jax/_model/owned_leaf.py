"""Which head owns each entry of a leaf: what a layer is scaled and cut by."""

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

    Leaves are equal if their fields are: `owners` has one entry along every axis on
    which nothing depends, whatever it was made of.

    **Arguments:**

    - `path`: below the layer or, with a slash in front, from the root of the params.
    - `stack`: the axes of the leaf that are a stack of layers, the outermost first.
    - `owners`: integers that broadcast to one layer of the leaf, which has no axes of
        the stack: the head of each entry, -1 where no head scales it.
    - `heads`: how many heads are counted. Heads that share all their entries count as
        one, so that it is 1 for a gain of all heads.
    - `is_of_all`: whether all heads share it, however many they are: `heads` is then no
        number of heads.
    """

    path: str
    stack: tuple[int, ...]
    owners: np.ndarray
    heads: int
    is_of_all: bool = False

    def __post_init__(self):
        # Two rules may describe one leaf by owners of different shapes, and layers are
        # found again by their leaves: as small as they can be, these compare by bytes.
        owners = np.asarray(self.owners, np.int32)
        for axis in range(owners.ndim):
            first = owners.take([0], axis) if owners.shape[axis] else owners
            owners = first if (owners == first).all() else owners
        owners.setflags(write=False)
        object.__setattr__(self, "owners", owners)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedLeaf) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        heads, owners = (self.heads, self.is_of_all), self.owners
        return self.path, self.stack, heads, owners.shape, owners.tobytes()

    @property
    def mask(self) -> np.ndarray:
        """True for entries that some head owns; it broadcasts to the whole leaf."""
        return np.expand_dims(self.owners >= 0, self.stack)

    def owned(self, shape: Shape) -> "OwnedLeaf | None":
        """The leaf itself if it can have this shape, as [`HeadLeaf`][] has it made."""
        layer = [n for i, n in enumerate(shape) if i not in self.stack]
        is_deep = len(shape) == len(layer) + len(self.stack)
        if not is_deep or len(layer) != self.owners.ndim:
            return None
        pairs = zip(self.owners.shape, layer, strict=True)
        return self if all(own in (1, n) for own, n in pairs) else None

    def is_apart_from(self, other: "OwnedLeaf") -> bool:
        """Whether two descriptions of one leaf have no entry in common."""
        return not (self.mask & other.mask).any()

    def joined_with(self, other: "OwnedLeaf") -> "OwnedLeaf":
        """One description of the entries of two, where both have the same stack."""
        owners = np.maximum(*np.broadcast_arrays(self.owners, other.owners))
        heads = max(self.heads, other.heads)
        return dataclasses.replace(self, owners=owners, heads=heads)

    def spread(self, of_heads: Any, rest: int = 1) -> Any:
        """Gives every entry what its head has in `(*stack, heads)`, others the `rest`.

        It broadcasts to the whole leaf: factors multiply it. Numbers of NumPy stay
        NumPy's.
        """
        # Entries without an owner read the first head's, which `where` then replaces.
        at, xp = np.maximum(self.owners, 0), jnp
        if isinstance(of_heads, np.ndarray):
            found, xp = of_heads[..., at], np
        else:
            # Without the promise XLA clamps the indices, or fills, on every update.
            found = of_heads.at[..., at].get(mode="promise_in_bounds")
        found = xp.where(self.owners < 0, rest, found)
        return xp.moveaxis(found, range(len(self.stack)), self.stack)

    def along(self, axis: int) -> tuple[int, int]:
        """How many entries of one line along an axis have an owner, and how many own.

        An axis of heads has as many of one as of the other, and one on which the head
        does not depend has 1 owner. In between, heads are a part of the axis.
        """
        # Sorted, every head begins where its number first appears: -1, for nobody, is
        # what comes before the line, so that it begins nothing.
        ordered = np.sort(self.owners, axis)
        owned = (ordered >= 0).sum(axis)
        own = (np.diff(ordered, axis=axis, prepend=-1) > 0).sum(axis)
        return int(owned.max(initial=0)), int(own.max(initial=0))

    def row_spec(
        self, cut: PartitionSpec, counts: Sequence[int]
    ) -> PartitionSpec | None:
        """The spec of a row `(*stack, heads)` where `cut` is that of the leaf.

        `counts` says into how many blocks each entry cuts. `None` where a block of the
        leaf has no run of consecutive heads, as one of the fused (3, heads, head_dim)
        has heads of the query and of no key, or the other way round.
        """
        rest = (i for i in range(self.mask.ndim) if i not in self.stack)
        entries = dict(enumerate(cut))
        of_heads = None
        for axis, at in enumerate(rest):
            entry = entries.get(at)
            if entry is None or self.along(axis)[1] < 2:
                continue  # whole, or cut where the head does not depend on it
            # Block i of the leaf has to hold the i-th of as many equal runs of heads:
            # that is what a row cut by the same entry has on the same device.
            blocks = np.array_split(self.owners, counts[at], axis)
            runs = np.array_split(np.arange(self.heads), counts[at])
            pairs = zip(blocks, runs, strict=True)
            is_run = all(np.array_equal(np.unique(b[b >= 0]), run) for b, run in pairs)
            if not is_run or self.heads % counts[at] or of_heads is not None:
                return None
            of_heads = entry
        return PartitionSpec(*map(entries.get, self.stack), of_heads)
