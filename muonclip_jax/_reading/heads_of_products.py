"""The heads of a product of query and key: their dimensions and their number."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .fact import union
from .graph import AllMarks
from .marks import distinct, is_varied, Marks, marks_along, numbered, varied
from .primitives import Kind
from .scaling import Factor, never, Scaling
from .softmaxes import Product


# The most entries along dimensions in which heads are counted exactly. Each entry may
# be a head with a bit of its own: 2**14 marks of 2**14 bits are 32 MiB.
_MOST = 1 << 14


class HeadMap(NamedTuple):
    """The heads of a product."""

    axes: tuple[int, ...]  # axes of the product's marks along which heads are
    marks: Marks  # marks of the product, with a bit for each head
    number: int

    @property
    def all(self) -> int:
        """All heads, as bits."""
        return (1 << self.number) - 1


def head_ids(marks: Marks, heads: int) -> tuple[np.ndarray, int] | None:
    """Returns the head, or group of heads, of each entry, and their number.

    `heads` are the heads of the layer, as bits. Groups are in the order of the first
    head in each. Returns `None` if they are of different sizes, or if some head has no
    entries.
    """
    # `m & -m` is the lowest bit of a mark.
    groups = sorted(distinct(marks), key=lambda m: (m & -m, m))
    numbers = {m: i for i, m in enumerate(groups)}
    sizes = [m.bit_count() for m in groups]
    if sum(sizes) != union(groups).bit_count():
        # Groups overlap: some entries serve several heads, others one.
        numbers = dict.fromkeys(groups, 0)
    elif len({*sizes}) > 1 or (len(groups) > 1 and union(groups) != heads):
        return None
    owner = np.empty(marks.shape, int)
    owner.ravel()[:] = [numbers[m] if m else -1 for m in marks.ravel().tolist()]
    return owner, len(set(numbers.values()))


def is_apart(marks: Marks, covered: int) -> bool:
    """Whether entries of a parameter differ in their marks, or lack some marks.

    `covered` are the marks of all parameters. Padding has entries of no parameter, so
    its marks are no other head.
    """
    return is_varied(marks) or union(distinct(marks)) not in (0, covered)


def _covered(makers: Sequence[Factor], i: int) -> int:
    """Returns the union of the marks of all factors along one axis."""
    return union(mark for f in makers for mark in distinct(f.all_marks[i]))


class Refused(Exception):
    """Raised if heads cannot be distinguished, or are not heads of one layer."""


def heads_of(scaling: Scaling, product: Product, order: tuple[int, int]) -> HeadMap:
    """Returns the heads of a product whose query is operand `order[0]`.

    Along heads, different entries of parameters make a side. Devices may be heads, if
    each has some of them, and so may the trips of a loop. A kernel has its heads along
    its outputs. All summands, such as biases, adapters and a second stream of tokens,
    agree about heads. A table of positions, before a kernel or added to its output,
    distinguishes positions, not heads. Learned tokens without a kernel do so, too; the
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
    for stops in (True, False):
        for i in order if not chosen else ():
            makers = [*_makers(scaling, product, i, all_marks, stops)]
            covered = [_covered(makers, j) for j in range(len(sizes))]
            shared = {*sizes} - product.free[i] - loops
            by_factor = [(f, _along(sizes, loops, shared, covered, f)) for f in makers]
            of_kernels = [axes for f, axes in by_factor if f.is_kernel]
            sets = of_kernels or [axes - product.free[i] for _, axes in by_factor]
            chosen |= set.intersection(*sets) if sets else set()
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
    for stops in (True, False):
        for i in sides if not signs else ():
            makers = [*_makers(scaling, product, i, (marks,), stops)]
            for f in makers:
                if is_apart(f.all_marks[0], _covered(makers, 0)):
                    masks = sorted(distinct(f.all_marks[0]))
                    signs += [bits_of(mark, count) for mark in masks]
    if not signs:
        return [0] * count
    columns = map(bytes, np.stack(signs).T.astype(np.uint8))
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(column, len(numbers)) for column in columns]


def _makers(
    scaling: Scaling, product: Product, i: int, all_marks: AllMarks, stops: bool
) -> Iterator[Factor]:
    """Yields for each summand of an operand the factor that shows where heads are.

    This is the last kernel, preferably one that made the dimensions summed over, and
    has heads: windows of a pooling have none. With `stops` the search ends at a kernel
    that made these dimensions.
    """
    atom, over = product.operand(i), product.over_of(i)
    of_over = slice(len(all_marks), len(all_marks) + len(over))

    def is_near(marks: AllMarks) -> bool:
        return any(map(is_varied, marks[of_over]))

    def is_last(kernel: AllMarks, _: AllMarks) -> bool:
        return not over or is_near(kernel)

    # With marks of trips, summands of different trips are no long sum.
    operand_marks = *(product.side(i, x) for x in all_marks), *over, *atom.trips()
    for s in scaling.of(atom, operand_marks, is_last if stops else never):
        kernels = [f for f in s.factors if f.is_kernel]
        near_kernels = [f for f in kernels if is_near(f.all_marks)]
        near = [f for f in s.factors if is_near(f.all_marks)] if near_kernels else []
        apart = [f for f in near if any(map(is_varied, f.all_marks[: of_over.start]))]
        apart.sort(key=lambda f: not f.is_kernel)  # a kernel before its bias
        yield from (apart or near_kernels or kernels or s.factors)[:1]


def _along(
    axes: dict[int, int],
    loops: set[int],
    shared: set[int],
    covered: Sequence[int],
    factor: Factor,
) -> set[int]:
    """Returns the axes of a product, or loops around it, along which a leaf has heads.

    A loop's trips are layers if each has one entry of a stack, and heads if each has
    several entries of an axis. A leaf may serve some entries of an axis only, as the
    leaf of one of the layers that `vmap` goes through. An axis that only one side has
    may also be one of positions, some of which have a kernel of their own. It counts
    only if the leaf serves one entry, as that of a layer does.
    """
    marks_of: dict[int, Marks] = {}
    rows = zip(axes.items(), factor.all_marks, covered, strict=False)
    for (a, size), x, of_all in rows:
        is_some = a not in loops and is_apart(x, of_all)  # marks are for some entries
        if is_some and not is_varied(x) and a not in shared:
            is_some = distinct(x) <= distinct(numbered(1, 0, size))
        if is_some or is_varied(x):
            marks_of[a] = x
    of_loops = [x for a, x in marks_of.items() if a in loops]
    return {a for a, x in marks_of.items() if a not in loops or _is_split(x, of_loops)}


def _is_split(marks: Marks, of_loops: Sequence[Marks]) -> bool:
    """Whether trips have several entries each along an axis.

    Loops around each other, as over groups of layers, split one axis together.
    """
    for axis in varied(marks)[:1]:
        lines = [x for x in (marks_along(y, axis) for y in of_loops) if is_varied(x)]
        places = [x for x in zip(*(y.tolist() for y in lines), strict=True) if all(x)]
        return len(places) > len({*places})
    return False


def shows_all(kernel: AllMarks, other: AllMarks) -> bool:
    """Whether a kernel's operand distinguishes no more heads than the kernel itself."""
    marks = distinct(kernel[0])
    is_apart = all(m.bit_count() == 1 for m in marks) and len(marks) > 1
    return is_apart or not is_varied(other[0])


def _bits(numbers: np.ndarray) -> Marks:
    marks = np.empty(numbers.shape, object)
    marks.ravel()[:] = [1 << x for x in numbers.ravel().tolist()]
    return marks


def bits_of(mark: int, n: int) -> np.ndarray:
    """Returns the bits of a mark, as booleans."""
    raw = np.frombuffer(int(mark).to_bytes((n + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little")[:n].astype(bool)
