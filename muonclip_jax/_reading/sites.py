"""Finds where logits enter a softmax, and the head of each logit there.

At this place the logits are scaled and masked, and their maximum is not subtracted
yet. The recorder takes the largest logits there.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._model.statistics import largest
from . import jaxprs, kernels
from .fact import members
from .graph import Atom, Eqn
from .heads_of_products import HeadMap, Refused
from .jaxprs import Address
from .marks import numbered, union_but
from .primitives import Kind, moves
from .softmaxes import Product, Route, Softmaxes
from .symbols import Twin, written


@dataclasses.dataclass
class Site:
    """An equation that has logits as an operand, and their layout there.

    - `eqn`: the equation; `operand` is the index of the logits.
    - `axes`: the axes along which the equation takes their maximum, if it does.
    - `dims`: the dimensions of the heads.
    - `rows`: for each head, the indices of its entries of `dims`, in C order.
    - `blocks`: if not `()`, these entries first become `(-1, n, size)`, and `rows` has
        indices of `n`. A symbolic dimension that holds heads is taken apart like this.
    - `boxes`: if the operand holds more than logits, such as a sink, the parts that are
        logits: a slice along each dimension.
    - `factor`: the factor of the logits between here and the exponential.
    - `biases`: if a softcap or a bias follows the products, the equations from the
        products to here, each with the operands that are a bias.
    - `added`: the lines that add a bias made by parameters, with these parameters.
    """

    eqn: Eqn
    axes: tuple[int, ...] = ()
    operand: int = 0
    dims: tuple[int, ...] = ()
    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1), int))
    blocks: tuple[Any, ...] = ()
    boxes: list[tuple[slice, ...]] = dataclasses.field(default_factory=list)
    factor: float = 1.0
    biases: dict[Address, set[int]] = dataclasses.field(default_factory=dict)
    added: dict[str, set[int]] = dataclasses.field(default_factory=dict)

    @property
    def atom(self) -> Atom:
        """The logits."""
        return self.eqn.inputs()[self.operand]

    def largest(self, x: Any) -> jax.Array:
        """Returns the maximum of the logits of every head, `(heads,)`."""
        if jaxprs.is_statistic(self.eqn.jaxpr_eqn):
            return x
        x = jax.lax.stop_gradient(x)
        if not self.boxes and not {*self.dims} & {*self.axes}:
            # This repeats the maximum of the softmax, and adds a sum along the same
            # axes to find NaN. By XLA's count on CPU it costs 3.9 % of the bytes of
            # GPT-2 at 4 layers of 256, and 1.2 % without the sum, as
            # benchmarks/attention_statistics.py counts them. The softmax's own maximum
            # would be free, but a row that sees no key makes it NaN, too.
            x = jnp.expand_dims(largest(x, self.axes), self.axes)
        axes = [i for i in range(x.ndim) if i not in self.dims]
        cut = [_cut(x, box) for box in self.boxes] or [x]
        parts = [largest(part, axes).ravel() for part in cut]
        maxima = functools.reduce(jnp.maximum, parts)  # NaN if any part is
        if self.blocks:
            maxima = largest(maxima.reshape(self.blocks), (0, 2))
        return largest(maxima[self.rows], 1) * self.factor

    def in_symbols(self, other: "Site", twins: Sequence[Twin]) -> "Site | None":
        """Returns the site of the original, from the sites of both of its twins.

        Returns `None` if these differ in a way that no dimension explains.
        """
        (form, parts), (same, others) = ((x._form(), x.boxes) for x in (self, other))
        if form != same or math.isnan(self.factor):
            return None
        shapes = self.atom.shape, other.atom.shape
        boxes = [
            tuple(_slice(twins, *axis) for axis in zip(*both, *shapes, strict=True))
            for both in zip(parts, others, strict=True)
        ]
        rows, blocks = self.rows, ()
        if not np.array_equal(rows, other.rows):
            (n, size, rows), (m, size_of_other, same) = self._blocks(), other._blocks()
            if n != m or not np.array_equal(rows, same):
                return None
            blocks = -1, n, written(twins, (size, size_of_other))
        is_clear = None not in (*blocks, *itertools.chain(*boxes))
        new = dataclasses.replace(self, rows=rows, boxes=boxes, blocks=blocks)
        return new if is_clear else None

    def _form(self) -> tuple[Any, ...]:
        layout = self.operand, self.axes, self.dims, str(self.factor), len(self.boxes)
        return self.eqn.address, *layout, self.biases

    def _blocks(self) -> tuple[int, int, np.ndarray]:
        """Returns the smallest `n` with the largest `size`, as for `blocks`; `rows`."""
        heads = np.full(math.prod(self.atom.shape[d] for d in self.dims), -1)
        for head, row in enumerate(self.rows):
            heads[row] = head
        size = math.gcd(len(heads), *(np.flatnonzero(np.diff(heads)) + 1).tolist())
        heads = heads[::size]
        n = next(
            n
            for n in range(1, len(heads) + 1)
            if len(heads) % n == 0 and not (heads.reshape(-1, n) - heads[:n]).any()
        )
        rows = [np.flatnonzero(heads[:n] == head) for head in range(len(self.rows))]
        return n, size, np.array(rows)


def _slice(
    twins: Sequence[Twin], one: slice, other: slice, n: int, m: int
) -> slice | None:
    """Returns a slice of a dimension of the original, from those of both twins."""
    ends = []
    for i in (0, 1):
        ends_of_twins = one.indices(n)[i], other.indices(m)[i]
        end = written(twins, ends_of_twins)
        if end is None:  # counted from the end, it may have a form
            whole = written(twins, (n, m))
            rest = written(twins, (n - ends_of_twins[0], m - ends_of_twins[1]))
            if rest is None:
                return None
            end = whole - rest
        ends.append(end)
    return slice(*ends)


def _cut(x: jax.Array, box: tuple[slice, ...]) -> jax.Array:
    """Returns a part of an array, whose ends may be symbolic."""
    starts = [part.start or 0 for part in box]
    both = zip(box, x.shape, strict=True)
    return jax.lax.slice(
        x, starts, [n if part.stop is None else part.stop for part, n in both]
    )


class Unclear(Exception):
    """Raised for logits that enter a softmax in a way that cannot be recorded."""


HeadMaps = Sequence[tuple[Product, HeadMap]]


def sites_of(
    softmaxes: Softmaxes, head_maps: HeadMaps, exps: Sequence[Eqn], bits: int
) -> tuple[list[Site], list[Route]]:
    """Returns where the products of a layer enter its softmax, and their routes.

    There is one site if all logits are joined, and one for each tile of keys if not.
    """
    if named := _statistic(softmaxes, head_maps[-1][0]):
        return [named], []
    sites: dict[Atom, Site] = {}
    routes: list[Route] = []
    facts, missing = softmaxes.facts, bits
    for exp in exps:
        site = _entrance(softmaxes, exp, bits)
        if site is None or site.atom in sites:
            continue
        fact = facts.value(site.atom)
        here = [x for x in head_maps if facts.product(x[0].eqn) & fact.products]
        if here:
            sites[site.atom] = site
            routes += _routes(softmaxes, here, site, bits)
            missing &= ~fact.products
    if missing or not sites:
        raise Unclear(_LOST)
    return [*sites.values()], routes


_LOST = "could not be followed into the softmax"


def _routes(
    softmaxes: Softmaxes, head_maps: HeadMaps, site: Site, bits: int
) -> list[Route]:
    """Returns the routes of products to a site, and notes in it where heads are."""
    product, heads = head_maps[-1]
    atom, bits_of = site.atom, [softmaxes.facts.product(x.eqn) for x, _ in head_maps]
    all_marks, _ = softmaxes.to_product(atom, atom.each() or atom.whole, bits_of[-1])
    if all_marks is None:
        raise Unclear(_LOST)
    of_heads = [a for a in heads.axes if a >= product.lead]
    # Some of these entries may belong to no head, which `is_varied` would not see.
    marked = [{*union_but(x, of_heads).ravel().tolist()} for x in all_marks]
    dims = enumerate(zip(atom.shape, marked, strict=False))
    site.dims = tuple(d for d, (n, masks) in dims if n > 1 and len(masks) > 1)
    site.rows, route = _rows(softmaxes, site, product, heads)
    routes = [softmaxes.to_product(atom, atom.whole, bit)[1] for bit in bits_of[:-1]]
    routes.append(route)
    if any(route.joins for route in routes):
        # Joining the logits of a query with several kinds of keys, such as keys and
        # their means, is fine. Logits joined along the axis of heads have different
        # heads in each product, so they are not one layer.
        rows = (_rows(softmaxes, site, *x)[0] for x in head_maps)
        if any(not np.array_equal(x, site.rows) for x in rows):
            raise Refused(
                "logits of several products are joined, each of other heads: give each "
                "of them a softmax of its own"
            )
        site.boxes = [_box(softmaxes, site, bit) for bit in bits_of]
        if (slice(None),) * len(atom.shape) in site.boxes:  # logits fill the operand
            site.boxes = []
    _note_biases(softmaxes, site, routes, bits)
    return routes


def _note_biases(
    softmaxes: Softmaxes, site: Site, routes: Sequence[Route], bits: int
) -> None:
    """Notes which operands are added to the logits without query and key in them."""
    eqns = [eqn for route in routes for eqn in route.eqns]
    biases: dict[Address, set[int]] = {eqn.address: set() for eqn in eqns}
    for eqn, i in (added for route in routes for added in route.added):
        fact = softmaxes.facts.value(eqn.inputs()[i])
        if not (fact.products | fact.pairs) & bits:
            biases[eqn.address].add(i)
            kernel = fact.only_kernel
            if parameters := members(fact.leaves) if kernel is None else [kernel]:
                site.added.setdefault(eqn.line, set()).update(parameters)
    if any(biases.values()) or any(eqn.kind is Kind.SOFTCAP for eqn in eqns):
        site.biases = biases


def _statistic(softmaxes: Softmaxes, product: Product) -> Site | None:
    """Returns the equation that names a kernel's maxima as the statistic, if any."""
    frame = product.eqn.frame
    while frame.kind != "kernel":
        if frame.caller is None:
            return None
        frame = frame.caller.frame
    call: Any = frame.caller
    rule: Any = kernels.rule_of(call.jaxpr_eqn)
    for eqn in softmaxes.equations if isinstance(rule.maxima, int) else ():
        if jaxprs.is_statistic(eqn.jaxpr_eqn):
            (atom,) = eqn.inputs()
            if any(x.eqn is call for x in softmaxes.graph.walk(atom, atom.whole)):
                return Site(eqn)
    return None


def _entrance(softmaxes: Softmaxes, exp: Eqn, bits: int) -> Site | None:
    """Goes back from an exponential to its operand before it was shifted.

    A softmax subtracts the maximum of its logits, their log-sum-exp, or any other
    number that all logits of a query share. Returns `None` if the operand has no
    logits: `exp(old_max - new_max)` rescales earlier sums to a new maximum.
    """
    base: Any = exp.inputs()[0].number if exp.name == "pow" else None
    factor = math.log(base or 2) if exp.name != "exp" else 1.0
    site = Site(exp, factor=factor, operand=len(exp.jaxpr_eqn.invars) - 1)
    atom = exp.inputs()[-1]
    while True:
        eqns = softmaxes.graph.made_by(atom)
        if len(eqns) != 1 or softmaxes.facts.product(eqns[0]) & bits:
            return site
        (eqn,), inputs = eqns, eqns[0].inputs()
        kind, facts = eqn.kind, softmaxes.facts.inputs(eqn)
        operands = [i for i, f in enumerate(facts) if (f.products | f.pairs) & bits]
        if kind is Kind.LOGARITHM or (kind is Kind.LARGER and len(operands) > 1):
            return None
        if not operands or not moves(eqn, 0):
            return site
        is_scaled = kind in (Kind.PRODUCT, Kind.QUOTIENT)
        if is_scaled and len(operands) > 1:
            return site  # logits divided by their own spread are not shifted
        if kind is Kind.DIFFERENCE and operands[0] == 0:
            if maxima := softmaxes.maxima(inputs[1], facts[0].products & bits):
                # A maximum of segments, by a scatter, has no axis of its own.
                axes = maxima[0].axes
                site = Site(maxima[0] if axes else eqn, axes, factor=factor)
            elif operands == [0, 1] or softmaxes.maxima(inputs[1], bits):
                site = Site(eqn, factor=factor)
        elif is_scaled:
            number = inputs[1 - operands[0]].number
            number = number if isinstance(number, int | float) and number else math.nan
            factor = factor * number if kind is Kind.PRODUCT else factor / number
        atom = inputs[operands[-1] if kind is Kind.CHOICE else operands[0]]


def _rows(
    softmaxes: Softmaxes, site: Site, product: Product, heads: HeadMap
) -> tuple[np.ndarray, Route]:
    """Returns `Site.rows` for a product, and the route from the product to the site."""
    atom = site.atom
    count = math.prod(atom.shape[d] for d in site.dims)
    cannot = (
        "enter the softmax in an order in which heads cannot be distinguished: keep an "
        "axis for them"
    )
    if count > 1 << 14:
        raise Unclear(cannot)
    sizes = [n if d in site.dims else 1 for d, n in enumerate(atom.shape)]
    marks = numbered(1, 0, count, exact=True).reshape([1] * atom.lead + sizes)
    bit = softmaxes.facts.product(product.eqn)
    all_marks, route = softmaxes.to_product(atom, (marks,), bit)
    assert all_marks is not None
    # Each product has its own axes of heads: one with skewed relative positions may
    # order them differently.
    entry_marks = union_but(all_marks[0], [a for a in heads.axes if a >= product.lead])
    head_marks = heads.marks
    # On a mesh each device has its own heads: take those of the first device.
    for lead in product.eqn.frame.lead:
        if lead.axis in heads.axes:
            head_marks = head_marks.take([0], lead.axis)
    entries_of: dict[int, int] = {}
    both = (x.ravel().tolist() for x in np.broadcast_arrays(entry_marks, head_marks))
    for entries, head in zip(*both, strict=True):
        entries_of[head] = entries_of.get(head, 0) | entries
    rows = [members(entries_of[head]) for head in sorted(entries_of)]
    if any(rows) and not all(rows):
        raise Refused(
            "the logits of only some heads enter the softmax at "
            f"{site.eqn.line}: split query and key by heads before their product, and "
            "not their logits"
        )
    is_apart = sum(map(len, rows)) == len({i for row in rows for i in row})
    if not is_apart or len({*map(len, rows)}) != 1:
        raise Unclear(cannot)
    return np.array(rows), route


def _box(softmaxes: Softmaxes, site: Site, bit: int) -> tuple[slice, ...]:
    """Returns the part of the operand that holds a product's logits."""
    box = [slice(None)] * len(site.atom.shape)
    for d, n in enumerate(site.atom.shape):
        # Float marks are joined by their maximum: marks n and -n give both ends.
        up = site.atom.marked(d, np.arange(n, dtype=float))
        all_marks, _ = softmaxes.to_product(site.atom, (up, -up), bit)
        if all_marks is not None and n > 1 and d not in site.dims:
            low, high = -int(all_marks[1].max()), int(all_marks[0].max()) + 1
            box[d] = slice(None) if (low, high) == (0, n) else slice(low, high)
    return tuple(box)
