"""Attention, read backwards: the parameters that scale each head's logits.

Goes from the product of query and key to the entries of parameters that a clip scales.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from .back import shared
from .cells import trip_numbers
from .dependence import Dependence, Dependency
from .fact import members, union
from .graph import Atom, Eqn
from .heads_of_products import bits_of, HeadMap, heads_of, Refused, shows_all
from .marks import distinct, is_varied, numbered
from .parts import ScaledEntries
from .primitives import Kind, moves
from .scaling import ADDED, Factor
from .sides import Divider, LayerCells, LONGEST, Pair, Side, Sides
from .sites import Site, sites_of, Unclear
from .softmaxes import Product, Route, Softmaxes


WHILE = (
    "jax.lax.while_loop goes through layers, and how often is not known: use "
    "jax.lax.scan, or jax.lax.fori_loop between two numbers"
)


@dataclasses.dataclass
class Layer:
    """An attention layer: the parts that a clip may scale, and where its logits are."""

    products: list[Eqn]
    heads: int = 0
    pairs: list[Pair] = dataclasses.field(default_factory=list)
    # All parameters that made either side, and the learned queries or keys among them.
    makers: set[int] = dataclasses.field(default_factory=set)
    tokens: set[int] = dataclasses.field(default_factory=set)
    devices: tuple[str, ...] = ()  # mesh axes along which heads are
    # Loops whose trips have parameters of their own, the outermost first, and loops
    # whose trips are different heads.
    loops: tuple[Any, ...] = ()
    sizes: tuple[int, ...] = ()  # of these loops
    loops_of_heads: frozenset[Any] = frozenset()
    sites: list[Site] = dataclasses.field(default_factory=list)
    # Several layers may be recorded together, as `(*loops, recorded heads)`. This one
    # has `own_heads` among these heads, and `trips`: an array `(*stack, trips)` of
    # their numbers, with all trips of its loops counted in one row.
    recorded: int = 0
    own_heads: list[int] | None = None
    trips: np.ndarray | None = None
    refusal: str = ""  # why its heads are not known
    unscaled: str = ""  # why no parameter scales its heads, if none does
    unclear: str = ""  # why its statistic cannot be recorded

    @property
    def parts(self) -> list[ScaledEntries]:
        return [part for x in self.pairs for part in (*x.query, *x.key)]

    @property
    def line(self) -> str:
        return self.products[0].line

    def is_made_by(self, parameters: Set[int]) -> bool:
        """Whether only these, and at least one, make its query and key."""
        return bool(self.makers) and self.makers <= parameters

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its statistic, `(*stack, heads)`."""
        stack = self.sizes if self.trips is None else self.trips.shape[:-1]
        return (*stack, self.heads)

    @property
    def stacked(self) -> tuple[Any, ...]:
        """How its statistic is taken from the recorded array."""
        trips = None if self.trips is None else self.trips.tolist()
        return self.heads, self.recorded, self.own_heads, self.loops, trips


class _Array(NamedTuple):
    """An array that enters logits; `role` says which scaled entries it is linear in."""

    atom: Atom
    role: int | None
    line: str = ""  # the line where it enters, if known


class _ScaledSide(NamedTuple):
    """Entries that a clip would scale, and the events where they meet activations."""

    parts: list[ScaledEntries]
    events: set[int]

    def has(self, use: Dependency) -> bool:
        masks = (x.leaf.mask for x in self.parts if x.parameter == use.parameter)
        return any(bool((mask & (use.marks != 0)).any()) for mask in masks)


def attention_layers(softmaxes: Softmaxes) -> tuple[list[Layer], list[Layer]]:
    """Returns the trained and the frozen layers: one for each softmax.

    It is several layers if loops or heads have parameters of their own. A layer is
    frozen if all parameters that make its query and key are.
    """
    pairs = ((x, softmaxes.products(x)) for x in softmaxes.all())
    groups = [(products, x.exps) for x, products in pairs if products]
    facts = softmaxes.facts
    bits = union(facts.product(p.eqn) for products, _ in groups for p in products)
    dependence = Dependence(softmaxes.graph, facts, bits)
    readers = [LayerReader(softmaxes, dependence, *x) for x in groups]
    for reader in readers:
        reader.read_products()
    clipped = union(event for x in readers for side in x.events for event in side)
    layers = [layer for reader in readers for layer in reader.read(clipped)]
    # Layers are in the order of their calls, since paths may be numbered by it.
    layers.sort(key=lambda x: x.products[0].address)
    trained = [x for x in layers if not x.is_made_by(softmaxes.frozen)]
    return trained, [x for x in layers if x.is_made_by(softmaxes.frozen)]


class LayerReader:
    """Reads the products of query and key that enter one softmax."""

    def __init__(
        self,
        softmaxes: Softmaxes,
        dependence: Dependence,
        products: list[Product],
        exps: list[Eqn],
    ):
        self.softmaxes, self.dependence = softmaxes, dependence
        self.products, self.exps = products, exps
        self.layer = Layer([p.eqn for p in products])
        self.divider = Divider(softmaxes)
        self.refusals = self.divider.refusals
        # The products that are no biases, with their heads and as bits; their sides;
        # the layers of their cells; and the parameters of their queries.
        self.head_maps: list[tuple[Product, HeadMap]] = []
        self.bits = 0
        self.sides: list[Sides] = []
        self.classes = list[LayerCells]()
        self.queries: set[int] = set()
        # All queries and keys, and the events where scaled entries of either are used.
        self.arrays: list[_Array] = []
        self.events: tuple[set[int], set[int]] = set(), set()
        self.clipped = 0

    def read_products(self) -> None:
        """Notes which parameters scale each product, for each layer of its cells."""
        # First products whose key is known: they show which parameters make queries.
        for product in sorted(self.products, key=lambda p: not any(p.is_key)):
            self._read_product(product)
        self.classes = self.divider.divide(self.sides) if self.sides else []
        for one in self.classes:
            for i, events in enumerate(one.events):
                self.events[i].update(events)

    def read(self, clipped: int) -> list[Layer]:
        """Reads the rest; `clipped` are the events of scaled entries of any layer."""
        layer, self.clipped = self.layer, clipped
        counts = {heads.number for _, heads in self.head_maps}
        if len(counts) > 1:
            self.refusals.append(f"its products have {sorted(counts)} heads")
        layer.heads = layer.recorded = max(counts, default=0)
        layer.makers = {i for x in self.classes for i in x.makers}
        if layer.is_made_by(self.softmaxes.frozen):
            return [layer]
        routes: list[Route] = []
        try:
            if self.head_maps:
                layer.sites, routes = sites_of(
                    self.softmaxes, self.head_maps, self.exps, self.bits
                )
        except Refused as why:
            self.refusals.append(str(why))
        except Unclear as why:
            layer.unclear = str(why)
        # A query that the key gates is linear in its own kernel but not in the key's,
        # so the key is not scaled.
        pairs = [x for one in self.classes for x in one.pairs]
        queries = [part for x in pairs for part in x.query]
        keys = [part for x in pairs for part in x.key]
        scaled = [*map(_ScaledSide, (queries, keys), self.events)]
        for i, why in self._second_uses(scaled, self.arrays, routes).items():
            self.classes = [
                x._replace(pairs=[pair.without(i, why) for pair in x.pairs])
                for x in self.classes
            ]
        # If nothing scales the product, a factor of the logits may.
        is_unscaled = all(
            [(y.query, y.key) for y in x.pairs] == [([], [])] for x in self.classes
        )
        if is_unscaled and self.classes and routes:
            self.classes = self._temperature(routes[-1]) or self.classes
        self._check_loops()
        for eqn in (eqn for route in routes for eqn in route.nonlinear):
            self.refusals.append(
                f"{eqn.name} at {eqn.line}, which is not linear, stands between the "
                "product and its softmax"
            )
        layer.loops = tuple(x.name for x in self.divider.trips.loops)
        layer.sizes = tuple(x.size for x in self.divider.trips.loops)
        layer.loops_of_heads = self.divider.loops_of_heads
        if not self.classes:
            layer.refusal = self.refusals[0] if self.refusals else ""
            return [layer]
        live = [x for x in self.classes if x.makers] or self.classes[:1]
        layers = [self._layer(x) for x in live]
        if self.refusals:  # the same for all layers
            self.layer.pairs = [pair for x in layers for pair in x.pairs]
            self.layer.refusal = self.refusals[0]
            return [self.layer]
        return layers

    def _layer(self, layer_cells: LayerCells) -> Layer:
        """Returns the layer of a class of cells."""
        layer, cells = self.layer, layer_cells.cells
        heads, pairs, refusals = cells.heads.bit_count(), [], []
        for pair in layer_cells.pairs:
            key_heads = {part.leaf.heads for part in pair.key}
            if not pair.query and not pair.key:
                refusals.append(_why(*pair.whys))
            elif not pair.query and key_heads not in ({1}, {heads}):
                refusals.append(
                    f"{pair.whys[0]} the query, and several query heads share a key"
                )
            else:
                pairs.append(pair)
        # Trips that nothing scales are in one class. Each has its own statistic.
        is_each = bool(refusals) and cells.trips == (1 << self.divider.trips.number) - 1
        return dataclasses.replace(
            layer,
            heads=heads,
            pairs=pairs,
            makers=layer_cells.makers,
            own_heads=members(cells.heads) if heads < layer.recorded else None,
            trips=None if is_each else trip_numbers(layer_cells.trips),
            unscaled=refusals[0] if refusals else "",
        )

    def _check_loops(self) -> None:
        """Notes why the trips of loops over layers cannot be distinguished, if so."""
        for loop in self.divider.trips.loops:
            frame = self.layer.products[0].frame
            while frame.caller and frame.caller.address != loop.name:
                frame = frame.caller.frame
            if frame.caller and frame.caller.name == "while":
                self.refusals.append(WHILE)
            sites = (x.eqn.address[: len(loop.name)] for x in self.layer.sites)
            if any(address != loop.name for address in sites):
                self.refusals.append(
                    f"the loop at {self.layer.line} goes through layers, and its "
                    "logits enter the softmax outside of it"
                )

    def _read_product(self, product: Product) -> None:
        """Notes which parameters scale the sides of a product, along its heads."""
        layer, facts = self.layer, self.softmaxes.facts
        if product.eqn.kind is Kind.DIFFERENCE:
            self.refusals.append(
                f"query and key are subtracted at {product.eqn.line}, and their "
                "distance squared"
            )
        order = self._query_first(product)
        if order is None:
            # A product of a parameter with an array that is no query is a bias.
            if facts.weight_of(product.eqn) is None:
                self.refusals.append(
                    self._lost(product)
                    or "its softmax is over no axis that is the key's alone: give "
                    "query and key an axis of their own each"
                )
            return
        try:
            heads = heads_of(self.softmaxes.scaling, product, order)
        except Refused as why:
            self.refusals.append(str(why))
            return
        for sides in self._by_region(product, order, heads):
            self.sides.append(sides)
            self.queries |= {f.parameter for s in sides.sums[0] for f in s.linear}
        layer.tokens |= self._tokens(product)
        leads = [x for x in product.eqn.frame.lead if x.axis in heads.axes]
        layer.devices = tuple(str(x.name) for x in leads if not x.is_loop)
        self.divider.loops_of_heads = frozenset(x.name for x in leads if x.is_loop)
        self.head_maps.append((product, heads))
        self.bits |= facts.product(product.eqn)

    def _second_uses(
        self,
        scaled: Sequence[_ScaledSide],
        arrays: Sequence[_Array],
        routes: Sequence[Route],
    ) -> dict[int, str]:
        """Returns the sides whose scaled entries enter logits again, and where.

        `arrays` are all queries, keys and temperatures. An array that is added to
        logits, or multiplied with them, must not depend on scaled entries at all.
        """
        facts, reasons = self.softmaxes.facts, {}
        atoms = {x.atom for x in arrays}
        others = (x[:2] for route in routes for x in (*route.added, *route.factors))
        for eqn, i in others:
            atom = eqn.inputs()[i]
            if atom not in atoms and not facts.of(atom).products & self.bits:
                arrays = [*arrays, _Array(atom, None, eqn.line)]
        # Exclude the layer's input, which scaled entries made in its earlier calls.
        earlier: dict[int, int] = {}
        for parts, events in scaled:
            for x in (part.parameter for part in parts):
                uses = facts.meetings(x) & union(events)
                past = union(facts.upstream(1 << i) for i in members(uses)) & ~uses
                earlier[x] = earlier.get(x, 0) | past & self.clipped
        events = union(facts.meetings(x) & ~past for x, past in earlier.items())
        parameters = union(1 << x for x in earlier)
        for atom, role, line in arrays:
            is_side = role is not None or atom in atoms
            for use in self.dependence.uses(atom, events, parameters, is_side):
                sides = [i for i, x in enumerate(scaled) if x.has(use)]
                if role not in sides or use.event not in scaled[role].events:
                    why = AGAIN.format(line or use.line or self.layer.line)
                    reasons |= {i: why for i in sides if i not in reasons}
        return reasons

    def _temperature(self, route: Route) -> list[LayerCells] | None:
        """Returns the layers that a temperature scales, which multiplies the logits."""
        _, heads = self.head_maps[-1]
        rows = self.layer.sites[-1].rows
        head_of = {int(x): 1 << h for h, row in enumerate(rows) for x in row}

        def bits(entries: int) -> int:
            return union(head_of.get(x, 0) for x in members(entries))

        for eqn, i, (marks, *_) in route.factors:
            atom = eqn.inputs()[i]
            is_weight = self.softmaxes.facts.of(atom).is_weight
            if eqn.kind is not Kind.PRODUCT or not is_weight:
                continue
            marks = np.asarray(np.frompyfunc(bits, 1, 1)(marks), object)
            marks = dict(moves(eqn, 0))[i](marks)
            side = Side(atom, marks, 0)
            sides = Sides([side], heads, [self.divider.sum_of(side)])
            sets = sorted(distinct(marks), key=lambda m: (m & -m, m))
            classes = self.divider.divide([sides], self.sides)
            parts = [p for x in classes for pair in x.pairs for p in pair.query]
            is_each = all(p.leaf.heads in (1, len(sets)) for p in parts)
            if not is_each or not all(y.query for x in classes for y in x.pairs):
                continue
            arrays = [x._replace(role=None) for x in self.arrays]
            arrays.append(_Array(atom, 0))
            scaled = _ScaledSide(parts, {y for x in classes for y in x.events[0]})
            if self._second_uses([scaled], arrays, [route]):
                continue
            # Heads that share a temperature, as in XCiT, are one.
            if 1 < len(sets) < heads.number:
                for site in self.layer.sites:
                    rows = [site.rows[members(m)].ravel() for m in sets]
                    site.rows = np.array(rows)
                self.layer.recorded = len(sets)
                joint = (1 << len(sets)) - 1
                classes = [
                    x._replace(cells=x.cells._replace(heads=joint)) for x in classes
                ]
            return classes
        return None

    def _query_first(self, product: Product) -> tuple[int, int] | None:
        """Returns the operands in the order query, key; `None` if that is not known.

        The softmax is over dimensions that only the key has. If these cannot be
        followed, as with Transformer-XL's shift of relative positions, the query is the
        side that shares a parameter with the query of another product.
        """
        is_key = product.is_key
        if not any(is_key):
            makers = [{f.parameter for f in self._factors(product, i)} for i in (0, 1)]
            is_query = [bool(x & self.queries) for x in makers]
            is_key = [is_query[1 - i] and not is_query[i] for i in (0, 1)]
        if not any(is_key):
            # Axes of one entry do not show what the softmax is over, nor do gathered
            # pairs, as for the edges of a graph. Query heads may share a key, so the
            # larger side is the query, or the one that meets several keys.
            is_paired = product.keys <= {product.lead + d for d in shared(product.to)}
            sizes = [math.prod(product.sizes[a] for a in x) for x in product.free]
            if self._lost(product) or min(sizes) > 1 or not is_paired:
                return None
            others = (x for x in self.products if x is not product)
            operands = [x.operand(i) for x in others for i in (0, 1)]
            meets_several = [product.operand(i) in operands for i in (0, 1)]
            first, second = zip(sizes, meets_several, strict=True)
            return (0, 1) if first >= second else (1, 0)
        return (0, 1) if is_key[1] else (1, 0)

    def _lost(self, product: Product) -> str:
        """Returns what hides the axes of a product's softmax; empty if nothing does."""
        bit = self.softmaxes.facts.product(product.eqn)
        for atom in (exp.inputs()[-1] for exp in self.exps):
            _, route = self.softmaxes.to_product(atom, atom.each(), bit)
            for eqn in route.nonlinear:
                if any(x.sums & bit for x in self.softmaxes.facts.inputs(eqn)):
                    continue  # the logarithm of the sum, which divides
                return (
                    f"{eqn.name} at {eqn.line} stands between the product and its "
                    "softmax, and hides which axis is that of keys"
                )
        return ""

    def _factors(self, product: Product, i: int) -> Iterator[Factor]:
        """Iterates over an operand's factors, marked along the dimensions summed."""
        atom = product.operand(i)
        all_marks = product.over_of(i) or atom.whole
        return (
            f for s in self.softmaxes.scaling.of(atom, all_marks) for f in s.factors
        )

    def _tokens(self, product: Product) -> set[int]:
        """Returns parameters that are themselves queries or keys, not their weights.

        In a product of token and kernel, the kernel made the dimensions summed over.
        """
        tokens: set[int] = set()
        for i in (0, 1):
            fact = self.softmaxes.facts.of(product.operand(i))
            tokens |= {
                f.parameter
                for f in (self._factors(product, i) if fact.is_weight else ())
                if not fact.is_pair
                or (f.is_kernel and not any(map(is_varied, f.all_marks)))
            }
        return tokens

    def _by_region(
        self, product: Product, order: tuple[int, int], heads: HeadMap
    ) -> Iterator[Sides]:
        """Iterates over regions of the sum, with the summands of query and key.

        A region is a range of the summed dimension in which summands are alike. The key
        of latent attention joins two parts: one has heads, and the other, which a
        rotary embedding turns, is the same for all of them.
        """
        for region in self._regions(product, order[1]):
            sides = []
            for role, i in enumerate(order):
                atom, marks = product.operand(i), product.side(i, heads.marks)
                if region is not None:
                    d = product.over[0][i]
                    is_inside = np.isin(np.arange(atom.shape[d]), region)
                    bits = np.where(is_inside, -1, 0).astype(object)  # -1: all bits
                    marks = marks & atom.marked(d, bits)
                self.arrays.append(_Array(atom, role))
                sides.append(Side(atom, marks, role, shows_all))
            yield Sides(sides, heads, [self.divider.sum_of(x) for x in sides])

    def _regions(self, product: Product, i: int) -> list[Any]:
        """Returns the regions of the sum in which an operand's summands are alike."""
        if len(product.over) != 1:
            return [None]
        (pair,), atom = product.over, product.operand(i)
        n = atom.shape[pair[i]]
        if n == 1 or n > LONGEST:
            return [None]
        marks = numbered(atom.rank, atom.lead + pair[i], n, exact=True)
        all_marks = marks, *atom.trips()
        summands = self.softmaxes.scaling.of(atom, all_marks, shows_all)
        first = [f for s in summands for f in (s.linear or s.factors)[:1]]
        rows = [bits_of(union(f.all_marks[0].ravel().tolist()), n) for f in first]
        regions: dict[bytes, list[int]] = {}
        for j, column in enumerate(np.stack(rows).T if rows else ()):
            regions.setdefault(column.tobytes(), []).append(j)
        return list(regions.values()) if len(regions) > 1 else [None]


AGAIN = "the logits change in a second way, at {}, with the parameters that would scale"


def _why(why_q: str, why_k: str) -> str:
    if why_q == why_k == ADDED:
        return f"{ADDED} query and key, and no parameter scales these"
    if why_q == why_k:
        return f"{why_q} query and key"
    return f"{why_q} the query; {why_k} the key"
