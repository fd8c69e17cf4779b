"""The heads of a product of query and key: their dimensions and their number."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .facts import union
from .graph import AllMarks
from .marks import distinct, is_varied, Marks, marks_along, numbered, varied
from .primitives import Kind
from .scaling import Factor, IsLast, never, Scaling
from .softmaxes import Product


# The most entries along dimensions in which heads are counted exactly. Each entry may
# be a head with a bit of its own: 2**14 marks of 2**14 bits are 32 MiB.
_MOST = 1 << 14


class HeadMap(NamedTuple):
    """The heads of a product."""

    axes: tuple[int, ...]  # axes of the product's marks along which heads are
    marks: Marks  # marks of the product, with a bit for each head
    number: int

    def head_ids(self, marks: Marks) -> tuple[np.ndarray, int]:
        """Returns the head, or group of heads, of each entry, and their number."""
        # In the order of the first head in each: `m & -m` is the lowest bit of a mark.
        groups = sorted(distinct(marks), key=lambda m: (m & -m, m))
        numbers = {m: i for i, m in enumerate(groups)}
        if sum(m.bit_count() for m in groups) != union(groups).bit_count():
            # Groups overlap: some entries serve several heads, others one.
            numbers = dict.fromkeys(groups, 0)
        owner = np.empty(marks.shape, int)
        owner.ravel()[:] = [numbers[m] if m else -1 for m in marks.ravel().tolist()]
        return owner, len(set(numbers.values()))


class Refused(Exception):
    """Raised if heads cannot be distinguished, or are not heads of one layer."""


def heads_of(scaling: Scaling, product: Product, order: tuple[int, int]) -> HeadMap:
    """Returns the heads of a product whose query is operand `order[0]`.

    Along heads, a side has different entries of parameters. Devices may be heads, if
    each has some of them, and so may the trips of a loop. A kernel has its heads along
    its outputs. All summands, such as biases, adapters and a second stream of tokens,
    agree about heads. A table of positions, before a kernel or added to its output,
    distinguishes positions instead. Learned tokens without a kernel do the same; the
    other side does not have their positions.
    """
    over = [d for d, _ in product.over] if product.eqn.kind is Kind.PRODUCT else []
    gone = product.keys | {product.lead + d for d in over}
    sizes = {a: n for a, n in product.sizes.items() if n > 1 and a not in gone}
    chosen = _axes_of(scaling, product, order, sizes)
    count = math.prod(sizes[a] for a in chosen)
    if count > _MOST:
        raise Refused(
            f"heads are along dimensions of {count} entries, together with the "
            "batch: keep an axis for them"
        )
    shape = [sizes[a] if a in chosen else 1 for a in product.sizes]
    numbers = np.arange(count).reshape(shape)
    classes = np.array(_classes(scaling, product, order, _bits(numbers), count))
    return HeadMap(tuple(chosen), _bits(classes[numbers]), int(classes.max()) + 1)


def _axes_of(
    scaling: Scaling, product: Product, order: tuple[int, int], sizes: dict[int, int]
) -> list[int]:
    """Returns the axes along which heads are; other axes are batches and positions."""
    loops = {x.axis for x in product.eqn.frame.lead if x.is_loop}
    rank = len(product.sizes)
    all_marks = tuple(numbered(rank, a, size) for a, size in sizes.items())
    chosen: set[int] = set()
    # If the last kernel has no heads, as a rotation shared by all of them, the second
    # pass follows its operand to the kernel before.
    for is_last in (_is_nearest(len(sizes)), never):
        for i in order if not chosen else ():
            makers = _makers(scaling, product, i, all_marks, is_last)
            found = [(f, _along(sizes, loops, f.all_marks)) for f in makers]
            of_kernels = [axes for f, axes in found if f.is_kernel]
            known = of_kernels or [axes - product.free[i] for _, axes in found]
            chosen |= set.intersection(*known) if known else set()
    return sorted(chosen)


def _classes(
    scaling: Scaling, product: Product, order: tuple[int, int], marks: Marks, count: int
) -> list[int]:
    """Returns the head of each entry along the axes of heads.

    Entries are of different heads if some kernel has different entries for them. Along
    the rest of a dimension all heads are the same: it is the batch's.
    """
    signs: list[np.ndarray] = []
    sides = [i for i in order if is_varied(product.side(i, marks))]
    for is_last in (_is_nearest(1), never):
        for i in sides if not signs else ():
            for f in _makers(scaling, product, i, (marks,), is_last):
                if is_varied(f.all_marks[0]):
                    of = sorted(distinct(f.all_marks[0]))
                    signs += [bits_of(mark, count) for mark in of]
    if not signs:
        return [0] * count
    columns = map(bytes, np.stack(signs).T.astype(np.uint8))
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(column, len(numbers)) for column in columns]


def _is_nearest(n: int) -> IsLast:
    """Returns a test of whether a kernel made the dimensions that a product sums over.

    The kernel's marks show it: the first `n` are of other dimensions.
    """
    return lambda kernel, _: len(kernel) == n or any(map(is_varied, kernel[n:]))


def _makers(
    scaling: Scaling, product: Product, i: int, all_marks: AllMarks, is_last: IsLast
) -> Iterator[Factor]:
    """Yields for each summand of an operand the factor that shows where heads are.

    This is the last kernel, preferably one that made what the product sums over.
    """
    own = *(product.side(i, x) for x in all_marks), *product.over_of(i)
    for s in scaling.of(product.operand(i), own, is_last, deepest=1):
        kernels = [f for f in s.factors if f.is_kernel]
        made = [
            f for f in kernels if any(map(is_varied, f.all_marks[len(all_marks) :]))
        ]
        yield from (made or kernels or s.factors)[:1]


def _along(axes: dict[int, int], loops: set[int], all_marks: AllMarks) -> set[int]:
    """Returns the axes of a product, or loops around it, along which a leaf has heads.

    A loop's trips are layers if each has one entry of a stack, and heads if each has
    several entries of an axis.
    """
    own = {a: x for a, x in zip(axes, all_marks, strict=False) if is_varied(x)}
    return {a for a, x in own.items() if a not in loops or _is_shared_out(x)}


def _is_shared_out(marks: Marks) -> bool:
    """Whether marks that differ along an axis have several entries each."""
    lines = [marks_along(marks, axis) for axis in varied(marks)[:1]]
    return any(np.count_nonzero(line) > len(distinct(line)) for line in lines)


def shows_all(kernel: AllMarks, other: AllMarks) -> bool:
    """Whether a kernel's operand distinguishes no more heads than the kernel itself."""
    found = distinct(kernel[0])
    is_apart = all(m.bit_count() == 1 for m in found) and len(found) > 1
    return is_apart or not is_varied(other[0])


def _bits(numbers: np.ndarray) -> Marks:
    marks = np.empty(numbers.shape, object)
    marks.ravel()[:] = [1 << x for x in numbers.ravel().tolist()]
    return marks


def bits_of(mark: int, n: int) -> np.ndarray:
    """Returns the bits of a mark, as booleans."""
    raw = np.frombuffer(int(mark).to_bytes((n + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little")[:n].astype(bool)
