"""Attention, read backwards: what makes each head's logits larger.

From the product of query and key to the parts of parameters that a clip scales.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .dependence import Dependence, Use
from .facts import members, union
from .graph import Atom, Eqn
from .heads import bits_of, Heads, heads_of, shows_all, TooMany
from .labels import along, distinct, full, is_varied, joined, marks, varied
from .numbers import Lead
from .primitives import moves, shared
from .scaling import ADDED, Factor, NORMED, Sum
from .sites import Apart, Site, site_of, Unclear
from .softmaxes import Path, Product, Softmaxes


# Dimensions that a product sums over are cut into regions up to this length.
_LONGEST = 1 << 14


@dataclasses.dataclass(frozen=True)
class Part:
    """Entries of a parameter that are linear in logits."""

    parameter: int
    # The head of each entry of one layer, -1 for none; it broadcasts to the layer.
    owners: np.ndarray
    heads: int  # how many it distinguishes
    stack: tuple[int, ...]  # axes of layers that a loop runs
    why: str = ""  # it is not known which layer an entry is of

    @property
    def mask(self) -> np.ndarray:
        """Which entries of the parameter it has; it broadcasts."""
        return np.expand_dims(self.owners >= 0, self.stack)


PICKED = (
    "an index that is not a loop counter picks a layer of '{}' {}: use jax.lax.scan "
    "over the stack, or an index that counts 0, 1, ..."
)
PARTIAL = (
    "a loop does not go through all layers in '{}' {} one by one: use jax.lax.scan "
    "over an axis that has all of them, and no others"
)


@dataclasses.dataclass
class Layer:
    """An attention layer: what a clip may scale, and where its logits are."""

    products: list[Eqn]
    heads: int = 0
    query: list[Part] = dataclasses.field(default_factory=list)
    key: list[Part] = dataclasses.field(default_factory=list)
    # What brings the whole of a factor, since what it meets stays: `shared`, a key that
    # heads share, or a side that no parameter scales.
    whole: list[Part] = dataclasses.field(default_factory=list)
    shared: list[Part] = dataclasses.field(default_factory=list)
    # Which sides bring a whole.
    sides: set[int] = dataclasses.field(default_factory=set)
    # All parameters that either side was made of, and of these learned queries.
    makers: set[int] = dataclasses.field(default_factory=set)
    tokens: set[int] = dataclasses.field(default_factory=set)
    devices: tuple[str, ...] = ()  # axes of a mesh along which heads are
    # Loops whose trips are different layers, or different heads.
    loops: frozenset[Any] = frozenset()
    loops_of_heads: frozenset[Any] = frozenset()
    site: Site | None = None
    refusal: str = ""
    unclear: str = ""  # why its statistic cannot be recorded

    @property
    def parts(self) -> list[Part]:
        return [*self.query, *self.key, *self.whole, *self.shared]

    @property
    def key_alone(self) -> bool:
        """Whether the key brings the whole, against a query that all heads share."""
        return self.sides == {KEY} and all(part.heads == 1 for part in self.shared)

    @property
    def line(self) -> str:
        return self.products[0].line


class _Pair(NamedTuple):
    """The scales of the query and the key of a product; `None` where there are none."""

    query: list[Part] | None
    key: list[Part] | None
    whys: list[str]

    def side(self, i: int) -> list[Part] | None:
        return self.key if i else self.query

    def without(self, i: int, why: str) -> "_Pair":
        """The pair of which one side stays."""
        whys = [why if j == i else x for j, x in enumerate(self.whys)]
        query, key = (None if j == i else self.side(j) for j in (QUERY, KEY))
        return _Pair(query, key, whys)


class _Array(NamedTuple):
    """An array that enters logits, and of which scaled entries it is linear in."""

    atom: Atom
    role: int | None
    line: str = ""  # where it does, if that is known


class _Scaled(NamedTuple):
    """Entries that a clip would scale, and where they meet activations."""

    parts: list[Part]
    events: set[int]

    def has(self, use: Use) -> bool:
        return any(
            part.parameter == use.parameter
            and bool((part.mask & (use.label != 0)).any())
            for part in self.parts
        )


def attention_layers(softmaxes: Softmaxes) -> list[Layer]:
    """One for each softmax of products of query and key."""
    softmax_of = ((x, softmaxes.products(x)) for x in softmaxes.all())
    made = [(products, x.exps) for x, products in softmax_of if products]
    facts = softmaxes.facts
    bits = union(facts.product(p.at) for products, _ in made for p in products)
    dependence = Dependence(softmaxes.graph, facts, bits)
    readers = [LayerReader(softmaxes, dependence, *x) for x in made]
    for reader in readers:
        reader.read_products()
    clipped = union(event for x in readers for side in x.events for event in side)
    found = [reader.read(clipped) for reader in readers]
    # In the order in which the function calls them: paths may be numbered by it.
    return sorted((x for x in found if x), key=lambda x: x.products[0].at)


class LayerReader:
    """The reading of the products that one softmax is of."""

    def __init__(
        self,
        softmaxes: Softmaxes,
        dependence: Dependence,
        products: list[Product],
        exps: list[Eqn],
    ):
        self.softmaxes, self.dependence = softmaxes, dependence
        self.products, self.exps = products, exps
        self.layer = Layer([p.at for p in products])
        self.refusals: list[str] = []
        # What was read so far: the products but those that are biases, as bits, too;
        # what scales their sides; and the parameters of their queries.
        self.found: list[tuple[Product, Heads]] = []
        self.bits = 0
        self.pairs: list[_Pair] = []
        self.queries: set[int] = set()
        # Queries and keys, and for each of both where what scales it meets activations.
        self.arrays: list[_Array] = []
        self.events: tuple[set[int], set[int]] = set(), set()
        self.clipped = 0

    def read_products(self) -> None:
        """Notes what scales each product."""
        self.refusals += [
            f"query and key are subtracted at {p.at.line}, and their distance squared"
            for p in self.products
            if p.at.name == "sub"
        ]
        # Products of which the softmax's dimensions are known first: they show what the
        # query's parameters are.
        for product in sorted(self.products, key=lambda p: not any(p.is_key)):
            self._read_product(product)

    def read(self, clipped: int) -> Layer | None:
        """Reads the rest; `clipped` are the events of what scales any layer."""
        layer, self.clipped = self.layer, clipped
        counts = {heads.number for _, heads in self.found}
        if len(counts) > 1:
            self.refusals.append(f"its products have {sorted(counts)} heads")
        layer.heads = max(counts, default=0)
        if layer.makers and layer.makers <= self.softmaxes.frozen:
            return None  # as good as data
        path = self._way_to_softmax()
        # A query that the key gates is linear in its own kernel, but not in the key's:
        # the key stays.
        scaled = [
            _Scaled([p for x in self.pairs for p in x.side(i) or ()], self.events[i])
            for i in (QUERY, KEY)
        ]
        for i, why in self._again(scaled, self.arrays, path).items():
            self.pairs = [x.without(i, why) for x in self.pairs]
        # Where nothing scales the product, there may be a factor of the logits.
        is_unscaled = [(x.query, x.key) for x in self.pairs] == [(None, None)]
        if is_unscaled and path and (own := self._temperature(path)):
            _put(layer.whole, own)
        else:
            self._roles(self.pairs, layer.heads)
        for at in path.nonlinear if path else ():
            self.refusals.append(
                f"{at.name} at {at.line}, which is not linear, stands between the "
                "product and its softmax"
            )
        layer.refusal = self.refusals[0] if self.refusals else ""
        return layer

    def _read_product(self, product: Product) -> None:
        """Notes what scales the sides of a product, along its heads."""
        layer, facts = self.layer, self.softmaxes.facts
        order = self._query_first(product)
        if order is None:
            # The product of a parameter and what is no query is a bias.
            if facts.weight_of(product.at) is None:
                self.refusals.append(
                    self._lost(product)
                    or "its softmax is over no axis that is the key's alone: give "
                    "query and key an axis of their own each"
                )
            return
        try:
            heads = heads_of(self.softmaxes.scaling, product, order)
        except TooMany as why:
            self.refusals.append(str(why))
            return
        for pair in self._by_region(product, order, heads):
            self.pairs.append(pair)
            self.queries |= {p.parameter for p in pair.query or ()}
        layer.tokens |= self._tokens(product)
        leads = [x for x in product.at.frame.lead if x.axis in heads.axes]
        layer.devices = tuple(str(x.of) for x in leads if not x.is_loop)
        layer.loops_of_heads = frozenset(x.of for x in leads if x.is_loop)
        self.found.append((product, heads))
        self.bits |= facts.product(product.at)

    def _way_to_softmax(self) -> Path | None:
        """The path from the last product to its softmax, whose site is noted."""
        if not self.exps:
            self.refusals.append("it is normalized by a function other than softmax")
        if not (self.found and self.exps):
            return None
        path = None
        if len(self.exps) > 1 and any(map(self._is_part, self.exps)):
            self.refusals.append(
                f"its logits are split, and the part at {self.exps[-1].line} has a "
                "softmax of its own: split query and key before their product, and "
                "not the logits"
            )
        try:
            self.layer.site, path = site_of(
                self.softmaxes, self.found, self.exps[-1], self.bits
            )
        except Apart as why:
            self.refusals.append(str(why))
        except Unclear as why:
            self.layer.unclear = str(why)
        return path

    def _is_part(self, exp: Eqn) -> bool:
        """Whether an exponential is of some of a product's entries only."""
        atom, facts = exp.inputs()[-1], self.softmaxes.facts
        products = [facts.product(p.at) for p, _ in self.found]
        ways = (self.softmaxes.to_product(atom, atom.whole, bit) for bit in products)
        return any(labels is not None and not labels[0].all() for labels, _ in ways)

    def _again(
        self, scaled: Sequence[_Scaled], arrays: Sequence[_Array], path: Path | None
    ) -> dict[int, str]:
        """Which of the scaled entries enter logits in a second way, and where.

        `arrays` are all that query, key or a temperature is made of. What is added to
        logits or multiplied with them may not change with scaled entries at all.
        """
        facts, found = self.softmaxes.facts, {}
        own = {x.atom for x in arrays}
        for at, i in [*path.added, *(x[:2] for x in path.factors)] if path else ():
            atom = at.inputs()[i]
            if atom not in own and not facts.of(atom).products & self.bits:
                arrays = [*arrays, _Array(atom, None, at.line)]
        # As query or key of an earlier call of the layer they made the layer's input.
        before: dict[int, int] = {}
        for parts, events in scaled:
            for x in (part.parameter for part in parts):
                met = facts.meetings(x) & union(events)
                past = union(facts.upstream(1 << i) for i in members(met)) & ~met
                before[x] = before.get(x, 0) | past & self.clipped
        events = union(facts.meetings(x) & ~past for x, past in before.items())
        parameters = union(1 << x for x in before)
        for atom, role, line in arrays:
            for use in self.dependence.uses(atom, events, parameters):
                if use.event and not use.event & ~before.get(use.parameter, 0):
                    continue
                sides = [i for i, x in enumerate(scaled) if x.has(use)]
                if role not in sides or use.event not in scaled[role].events:
                    why = AGAIN.format(line or use.line or self.layer.line)
                    found |= {i: why for i in sides if i not in found}
        return found

    def _temperature(self, path: Path) -> list[Part] | None:
        """Parameters that the logits themselves are multiplied with."""
        _, heads = self.found[-1]
        rows = self.layer.site.rows if self.layer.site else ()
        of = {1 << int(x): 1 << h for h, row in enumerate(rows) for x in row}
        for at, i, labels in path.factors:
            if at.name == "mul" and self.softmaxes.facts.of(at.inputs()[i]).is_weight:
                label = np.zeros(labels[0].shape, object)
                for entry, head in of.items():
                    label |= np.where((labels[0] & entry) != 0, head, 0).astype(object)
                move = dict(moves(at, 0))[i]
                found = self.softmaxes.scaling.of(at.inputs()[i], (move(label),))
                parts, _, events = self._parts(found, heads, [])
                sets = sorted(distinct(move(label)), key=lambda m: (m & -m, m))
                if parts and all(p.heads in (1, len(sets)) for p in parts):
                    arrays = [x._replace(role=None) for x in self.arrays]
                    arrays.append(_Array(at.inputs()[i], 0))
                    if not self._again([_Scaled(parts, events)], arrays, path):
                        self._group([members(m) for m in sets])
                        return parts
        return None

    def _group(self, heads: list[list[int]]) -> None:
        """Makes one head of several that one temperature scales, as XCiT's does."""
        site = self.layer.site
        if site and 1 < len(heads) < len(site.rows):
            site.rows = np.array([site.rows[own].ravel() for own in heads])
            self.layer.heads = len(heads)

    def _query_first(self, product: Product) -> tuple[int, int] | None:
        """Which operand is the query.

        The softmax is over dimensions of the key alone. Where these are lost, as by
        Transformer-XL's shift of relative positions, the query has a parameter that the
        query of another product has, too.
        """
        is_key = product.is_key
        if not any(is_key):
            made = [{f.parameter for f in self._factors(product, i)} for i in (0, 1)]
            known = [bool(x & self.queries) for x in made]
            is_key = [known[1 - i] and not known[i] for i in (0, 1)]
        if not any(is_key):
            # Axes of one entry do not show what the softmax is over, nor do pairs that
            # were gathered, as for the edges of a graph. Query heads may share a key.
            is_paired = product.keys <= shared(product.to)
            sizes = [math.prod(product.shape[d] for d in x) for x in product.free]
            if self._lost(product) or min(sizes) > 1 or not is_paired:
                return None
            return (0, 1) if sizes[0] >= sizes[1] else (1, 0)
        return (0, 1) if is_key[1] else (1, 0)

    def _lost(self, product: Product) -> str:
        """What hides from a product's softmax which axes it is over."""
        bit = self.softmaxes.facts.product(product.at)
        for exp in self.exps:
            atom = exp.inputs()[-1]
            _, path = self.softmaxes.to_product(atom, atom.each(), bit)
            for at in path.nonlinear:
                return (
                    f"{at.name} at {at.line} stands between the product and its "
                    "softmax, and hides which axis is that of keys"
                )
        return ""

    def _factors(self, product: Product, i: int) -> Iterator[Factor]:
        """The factors of an operand, marked along what the product sums over."""
        atom = product.operand(i)
        labels = product.over_of(i) or atom.whole
        return (f for s in self.softmaxes.scaling.of(atom, labels) for f in s.factors)

    def _tokens(self, product: Product) -> set[int]:
        """Parameters that are queries, or keys, as activations are: no weight of them.

        Of a token and its kernel the kernel made what the product sums over.
        """
        found: set[int] = set()
        for i, atom in enumerate(product.at.inputs()[:2]):
            fact = self.softmaxes.facts.of(atom)
            found |= {
                f.parameter
                for f in (self._factors(product, i) if fact.is_weight else ())
                if not fact.is_pair
                or (f.is_kernel and not any(map(is_varied, f.labels)))
            }
        return found

    def _by_region(self, product: Product, order: tuple[int, int], heads: Heads):
        """One factor of every summand of query and key, or `None` if one has none.

        Once for each range of what is summed over in which summands are alike. The key
        of latent attention is joined: one part has heads, the other, which a rotary
        embedding turns, is the same for all of them.
        """
        leads = product.at.frame.lead
        loops = [x for x in leads if x.is_loop and x.axis not in heads.axes]
        for region in self._regions(product, order[1]):
            out, whys = [], []
            for i in order:
                atom, label = product.operand(i), product.side(i, heads.label)
                if region is not None:
                    (pair,) = product.over
                    inside = np.zeros([1] * atom.rank, object)
                    inside = full(inside, atom.lead + pair[i], atom.shape[pair[i]])
                    inside.ravel()[region] = -1  # all bits
                    label = label & inside
                trips = [marks(atom.rank, x.axis, x.size) for x in loops]
                found = self.softmaxes.scaling.of(atom, (label, *trips), shows_all)
                parts, why, events = self._parts(found, heads, loops)
                role = order.index(i)
                self.arrays.append(_Array(atom, role))
                self.events[role].update(events)
                out.append(parts)
                whys.append(why)
            if out[0] == [] or out[1] == []:
                continue  # zeros: nothing is there
            yield _Pair(out[0], out[1], whys)

    def _regions(self, product: Product, i: int) -> list[Any]:
        """Where along what is summed over an operand's summands are alike."""
        if len(product.over) != 1:
            return [None]
        (pair,), atom = product.over, product.operand(i)
        n = atom.shape[pair[i]]
        if n == 1 or n > _LONGEST:
            return [None]
        label = marks(atom.rank, atom.lead + pair[i], n, exact=True)
        rows: list[np.ndarray] = []
        for s in self.softmaxes.scaling.of(atom, (label,), shows_all):
            for f in (s.linear or s.factors)[:1]:
                rows.append(bits_of(union(f.labels[0].ravel().tolist()), n))
        regions: dict[bytes, list[int]] = {}
        for j, column in enumerate(np.stack(rows).T if rows else ()):
            regions.setdefault(column.tobytes(), []).append(j)
        return list(regions.values()) if len(regions) > 1 else [None]

    def _parts(
        self, found: Sum, heads: Heads, loops: list[Lead]
    ) -> tuple[list[Part] | None, str, set[int]]:
        parts: dict[int, Part] = {}
        events: set[int] = set()
        for s in found:
            made = [f for f in s.linear if f.labels[0].any()] or s.factors
            self.layer.makers |= {f.parameter for f in made}
        for s in found:
            if any(not f.labels[0].any() for f in s.factors):
                continue  # the summand is elsewhere
            linear = [f for f in s.linear if f.parameter not in self.softmaxes.frozen]
            made = [(self._part(f, heads, loops), f.event) for f in linear]
            if not made:
                return None, FROZEN if s.linear else s.why or NORMED, events
            # The last that was applied is first; but only what distinguishes heads can
            # be scaled for each of them.
            own = [x for x in made if x[0].heads == heads.number > 1]
            own = own or [x for x in made if x[0].heads > 1]
            # What another summand is scaled by is scaled here, too.
            known = [*parts.values()]
            again = [x for x in own or made if known and _overlap([x[0]], known)]
            best, event = (again or own or made)[0]
            events.add(event)
            if old := parts.get(best.parameter):
                if _disagree(old, best):
                    self.refusals.append("a parameter's entries are in several heads")
                best = _merged(old, best)
            parts[best.parameter] = best
        return list(parts.values()), "", events

    def _part(self, factor: Factor, heads: Heads, loops: list[Lead]) -> Part:
        label, why = factor.labels[0], PICKED if factor.is_picked else ""
        stack: list[int] = []
        for loop, trips in zip(loops, factor.labels[1:], strict=True):
            own = varied(trips)
            for axis in own:
                line = along(trips, axis)
                if axis in stack or len(distinct(line)) < len(line):
                    why = why or PARTIAL
            stack += [a for a in own if a not in stack]
            self.layer.loops |= {loop.of} if own else set()
        label = joined(label, stack).squeeze(tuple(stack))
        return Part(factor.parameter, *heads.owners(label), tuple(stack), why)

    def _roles(self, pairs: Sequence[_Pair], heads: int) -> None:
        """Which side brings how much of a factor, the same wherever its entries are."""
        ways = [self._way(pair, heads) for pair in pairs]
        # Where a side brings the whole in one product, the other side of all products
        # that it is in stays: that of a query with a table of relative keys, which all
        # heads share, and so of the query with its key.
        while True:
            before = list(ways)
            for i, pair in enumerate(pairs):
                for j, other in enumerate(pairs):
                    for side in (QUERY, KEY):
                        if ways[j] != side or ways[i] not in (BOTH, 1 - side):
                            continue
                        whole = _overlap(pair.side(side), other.side(side))
                        if whole or _overlap(pair.side(1 - side), other.side(1 - side)):
                            ways[i] = side if ways[i] == BOTH else NONE
            if ways == before:
                break
        for way, pair in zip(ways, pairs, strict=True):
            if way == BOTH:
                _put(self.layer.query, pair.query or ())
                _put(self.layer.key, pair.key or ())
            elif way == NONE:
                self.refusals.append(
                    "a parameter is in several of its products, which ask for "
                    "different scales"
                )
            elif way in (QUERY, KEY):
                self.layer.sides.add(way)
                _put(self.layer.whole, pair.side(way) or ())
                _put(self.layer.shared, pair.side(1 - way) or ())

    def _way(self, pair: _Pair, heads: int) -> Any:
        # Both sides are scaled if each head has its own entries in both, or all share
        # both, as the gains of QK-norm. Else the query alone: keys that several heads
        # share stay. The key alone where nothing scales the query.
        q, k = pair.query, pair.key
        q_own, k_own = (
            p is not None and all(x.heads == heads for x in p) for p in (q, k)
        )
        is_told = heads > 1 and any(x.heads > 1 for x in (*(q or ()), *(k or ())))
        if q and k and ((q_own and k_own) or not is_told):
            return BOTH
        if q and (q_own or not k_own):
            return QUERY
        if k and (k_own or not is_told):
            return KEY
        if k:
            self.refusals.append(
                f"{pair.whys[0]} the query, and several query heads share a key"
            )
        else:
            self.refusals.append(_why(*pair.whys))
        return None


AGAIN = "the logits change in a second way, at {}, with the parameters that would scale"
FROZEN = "what makes it is frozen, so that no parameter scales"
QUERY, KEY, BOTH, NONE = 0, 1, "both", "none"


def _overlap(one: list[Part] | None, other: list[Part] | None) -> bool:
    """Whether parts have entries in common."""
    return any(
        a.parameter == b.parameter and bool((a.mask & b.mask).any())
        for a in one or ()
        for b in other or ()
    )


def _disagree(a: Part, b: Part) -> bool:
    """Whether some entry is of one head here, and of another there."""
    if a.stack != b.stack or a.heads != b.heads:
        return False
    one, other = np.broadcast_arrays(a.owners, b.owners)
    return bool(((one != other) & (one >= 0) & (other >= 0)).any())


def _put(role: list[Part], parts: Iterable[Part]) -> None:
    """Adds parts; several products of the same entries scale them once."""
    for part in parts:
        for i, old in enumerate(role):
            if old.parameter == part.parameter:
                role[i] = _merged(old, part)
                break
        else:
            role.append(part)


def _merged(a: Part, b: Part) -> Part:
    if a.stack != b.stack:
        return b
    shape = np.broadcast_shapes(a.owners.shape, b.owners.shape)
    owners = np.maximum(
        np.broadcast_to(a.owners, shape), np.broadcast_to(b.owners, shape)
    )
    return dataclasses.replace(a, owners=owners, heads=max(a.heads, b.heads))


def _why(why_q: str, why_k: str) -> str:
    if why_q == why_k == ADDED:
        return f"{ADDED} query and key, and no parameter scales these"
    if why_q == why_k:
        return f"{why_q} query and key"
    return f"{why_q} the query; {why_k} the key"
