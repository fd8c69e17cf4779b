"""The heads of a product of query and key: along which dimensions, and how many."""

import math
from typing import NamedTuple

import numpy as np

from .facts import union
from .graph import Labels
from .labels import along, distinct, is_varied, Label, marks, varied
from .scaling import Factor, IsLast, never, Scaling
from .softmaxes import Product


# Heads are counted exactly along dimensions of at most so many entries. Each of these
# may be a head with a bit of its own: 2**14 marks of 2**14 bits are 32 MiB.
_MOST = 1 << 14


class Heads(NamedTuple):
    """The heads of a product."""

    axes: tuple[int, ...]  # of its labels, along which they are
    label: Label  # of the product, a bit for each head
    number: int

    def owners(self, label: Label) -> tuple[np.ndarray, int]:
        """The head, or group of heads, of each entry, and how many there are."""
        # In the order of the first head in each: `m & -m` is the lowest bit of a mark.
        groups = sorted(distinct(label), key=lambda m: (m & -m, m))
        numbers = {m: i for i, m in enumerate(groups)}
        if sum(m.bit_count() for m in groups) != union(groups).bit_count():
            # Some entries are of several heads, of which others are of one.
            numbers = dict.fromkeys(groups, 0)
        owner = np.empty(label.shape, int)
        owner.ravel()[:] = [numbers[m] if m else -1 for m in label.ravel().tolist()]
        return owner, len(set(numbers.values()))


class TooMany(Exception):
    """Dimensions with heads that are too long to count them."""


def heads_of(scaling: Scaling, product: Product, order: tuple[int, int]) -> Heads:
    """The heads of a product whose query is the first operand in `order`.

    Along them a side's entries are of other parameters. Devices are one, if each has
    some of the heads, and the trips of a loop. What a kernel makes has its outputs; all
    summands, such as biases, adapters and a second stream of tokens, agree in what is a
    head. A table of positions, before the kernel or added to what it makes,
    distinguishes positions, and so do learned tokens alone, which have positions where
    the other side has none.
    """
    lead, rank = product.lead, product.rank
    over = {a for a, _ in product.over} if product.at.name == "mul" else set()
    sizes = {x.axis: x.size for x in product.at.frame.lead}
    sizes |= {lead + d: n for d, n in enumerate(product.shape)}
    gone = product.keys | {lead + d for d in over}
    axes = sorted(a for a, n in sizes.items() if n > 1 and a not in gone)
    chosen = _axes_of(scaling, product, order, {a: sizes[a] for a in axes})
    count = math.prod(sizes[a] for a in chosen)
    if count > _MOST:
        raise TooMany(
            f"heads are along dimensions of {count} entries, together with the "
            "batch: keep an axis for them"
        )
    numbers = np.zeros([1] * rank, int)
    for a in chosen:
        own = np.arange(sizes[a]).reshape([-1 if b == a else 1 for b in range(rank)])
        numbers = numbers * sizes[a] + own
    classes = np.array(_classes(scaling, product, order, _bits(numbers), count))
    return Heads(tuple(chosen), _bits(classes[numbers]), int(classes.max()) + 1)


def _axes_of(
    scaling: Scaling, product: Product, order: tuple[int, int], sizes: dict[int, int]
) -> list[int]:
    """The axes along which heads are; others are batches and positions."""
    loops = {x.axis for x in product.at.frame.lead if x.is_loop}
    n, chosen = len(sizes), set()
    # What the last kernel is applied to, is followed to the one before if that has no
    # heads: a rotation, say, which is one for all of them.
    for is_last in (_is_nearest(n), never):
        for i in order if not chosen else ():
            own = (marks(product.rank, a, size) for a, size in sizes.items())
            labels = tuple(product.side(i, x) for x in own)
            labels += product.over_of(i)
            found = scaling.of(product.operand(i), labels, is_last, deepest=1)
            of_kernels, of_others = [], []
            for s in found:
                if kernel := _maker(s.factors, n):
                    of_kernels.append(_along(sizes, loops, kernel.labels))
                elif s.factors:
                    own = _along(sizes, loops, s.factors[0].labels)
                    of_others.append(own - product.free[i])
            known = of_kernels or of_others
            chosen |= set.intersection(*known) if known else set()
    return sorted(chosen)


def _classes(
    scaling: Scaling, product: Product, order: tuple[int, int], label: Label, count: int
) -> list[int]:
    """The head of each entry along the axes of heads.

    A head is what some kernel has entries of its own for; along the rest of a dimension
    all have the same: it is the batch's.
    """
    signs: list[np.ndarray] = []
    sides = [(i, own) for i in order if is_varied(own := product.side(i, label))]
    for i, own, is_last in [(*x, y) for y in (_is_nearest(1), never) for x in sides]:
        if is_last is never and signs:
            break
        labels = own, *product.over_of(i)
        for s in scaling.of(product.operand(i), labels, is_last, deepest=1):
            maker = _maker(s.factors, 1) or (s.factors[0] if s.factors else None)
            if maker and is_varied(maker.labels[0]):
                of = sorted(distinct(maker.labels[0]))
                signs += [bits_of(mark, count) for mark in of]
    if not signs:
        return [0] * count
    columns = map(bytes, np.stack(signs).T.astype(np.uint8))
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(column, len(numbers)) for column in columns]


def _is_nearest(n: int) -> IsLast:
    """Whether a kernel made what the product sums over.

    So shows its label, of which the `n` before are of something else.
    """
    return lambda kernel, _: len(kernel) == n or any(map(is_varied, kernel[n:]))


def _maker(factors: tuple[Factor, ...], n: int) -> Factor | None:
    """The last kernel; that which made what the product sums over, if one did."""
    kernels = [f for f in factors if f.is_kernel]
    own = [f for f in kernels if any(is_varied(x) for x in f.labels[n:])]
    return (own or kernels or [None])[0]


def _along(axes: dict[int, int], loops: set[int], labels: Labels) -> set[int]:
    """Along which axes of a product, or loops around it, a leaf has heads.

    A loop's trips are layers where each has one entry of a stack, and heads where each
    has several entries of an axis.
    """
    own = {a: x for a, x in zip(axes, labels, strict=False) if is_varied(x)}
    return {a for a, x in own.items() if a not in loops or _is_shared_out(x)}


def _is_shared_out(label: Label) -> bool:
    """Whether marks that differ along an axis have several entries each."""
    lines = [along(label, axis) for axis in varied(label)[:1]]
    return any(np.count_nonzero(line) > len(distinct(line)) for line in lines)


def shows_all(kernel: Labels, other: Labels) -> bool:
    """Whether what a kernel is applied to distinguishes no more heads than itself."""
    found = distinct(kernel[0])
    is_apart = all(m.bit_count() == 1 for m in found) and len(found) > 1
    return is_apart or not is_varied(other[0])


def _bits(numbers: np.ndarray) -> Label:
    label = np.empty(numbers.shape, object)
    label.ravel()[:] = [1 << x for x in numbers.ravel().tolist()]
    return label


def bits_of(mark: int, n: int) -> np.ndarray:
    """The bits of a mark, as booleans."""
    raw = np.frombuffer(int(mark).to_bytes((n + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little")[:n].astype(bool)
