"""Attention, read backwards: what makes each head's logits larger.

From the product of query and key to the parts of parameters that a clip scales.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .facts import union
from .graph import Eqn
from .heads import bits_of, Heads, heads_of, shows_all, TooMany
from .labels import along, distinct, full, is_varied, joined, marks, varied
from .numbers import Lead
from .primitives import moves
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


def attention_layers(softmaxes: Softmaxes) -> list[Layer]:
    """One for each softmax of products of query and key."""
    found = []
    for softmax in softmaxes.all():
        if products := softmaxes.products(softmax):
            found.append(LayerReader(softmaxes, products, softmax.exps).read())
    # In the order in which the function calls them: paths may be numbered by it.
    return sorted((x for x in found if x), key=lambda x: x.products[0].at)


class LayerReader:
    """The reading of the products that one softmax is of."""

    def __init__(self, softmaxes: Softmaxes, products: list[Product], exps: list[Eqn]):
        self.softmaxes, self.products, self.exps = softmaxes, products, exps
        self.layer = Layer([p.at for p in products])
        self.refusals: list[str] = []
        # What was read so far: the products but those that are biases, as bits, too;
        # what scales their sides; and the parameters of their queries.
        self.found: list[tuple[Product, Heads]] = []
        self.bits = 0
        self.pairs: list[_Pair] = []
        self.queries: set[int] = set()
        self.events = 0  # where what scales the logits meets activations

    def read(self) -> Layer | None:
        layer = self.layer
        # Products of which the softmax's dimensions are known first: they show what the
        # query's parameters are.
        for product in sorted(self.products, key=lambda p: not any(p.is_key)):
            self._read_product(product)
        counts = {heads.number for _, heads in self.found}
        if len(counts) > 1:
            self.refusals.append(f"its products have {sorted(counts)} heads")
        layer.heads = max(counts, default=0)
        if layer.makers and layer.makers <= self.softmaxes.frozen:
            return None  # as good as data
        if any(p.at.name == "sub" for p in self.products):
            self.refusals.append(
                "query and key are subtracted, and their distance squared"
            )
        path = self._way_to_softmax()
        # Where nothing scales the product, there may be a factor of the logits.
        is_unscaled = [(x.query, x.key) for x in self.pairs] == [(None, None)]
        if is_unscaled and path and (own := self._temperature(path)):
            _put(layer.whole, own)
        else:
            self._roles(self.pairs, layer.heads)
        if path:
            self._check(path)
        layer.refusal = self.refusals[0] if self.refusals else ""
        return layer

    def _read_product(self, product: Product) -> None:
        """Notes what scales the sides of a product, along its heads."""
        layer, facts = self.layer, self.softmaxes.facts
        order = self._query_first(product)
        if order is None:
            # The product of a parameter and what is no query is a bias.
            if facts.weight_of(product.at) is None:
                self.refusals.append("query and key could not be distinguished")
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
        try:
            self.layer.site, path = site_of(
                self.softmaxes, self.found, self.exps[-1], self.bits
            )
        except Apart:
            self.refusals.append(
                "logits of several products are joined, each of other heads: give "
                "each of them a softmax of its own"
            )
        except Unclear as why:
            self.layer.unclear = str(why)
        return path

    def _check(self, path: Path) -> None:
        """Notes why logits are not linear in what scales the product."""
        facts = self.softmaxes.facts
        for at in path.nonlinear:
            self.refusals.append(
                f"{at.name} at {at.line}, which is not linear, stands between the "
                "product and its softmax"
            )
        for at, i in path.added:
            fact = facts.of(at.inputs()[i])
            if fact.events & self.events and not fact.products & self.bits:
                self.refusals.append(
                    "its query or key enters another summand of the logits at "
                    f"{at.line}"
                )
        for at, i, _ in path.factors:
            if facts.of(at.inputs()[i]).events & self.events:
                self.refusals.append(
                    f"its query or key enters a factor of the logits at {at.line}"
                )

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
                move, atom = dict(moves(at, 0))[i], at.inputs()[i]
                # Trips are layers here as they are to the sides of a product.
                loops = [x for x in at.frame.lead if x.is_loop]
                loops = [x for x in loops if x.of not in self.layer.loops_of_heads]
                trips = [marks(atom.rank, x.axis, x.size) for x in loops]
                found = self.softmaxes.scaling.of(atom, (move(label), *trips))
                parts, _ = self._parts(found, heads, loops)
                if parts and all(p.heads in (1, heads.number) for p in parts):
                    return parts
        return None

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
            return None
        return (0, 1) if is_key[1] else (1, 0)

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
                parts, why = self._parts(found, heads, loops)
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
    ) -> tuple[list[Part] | None, str]:
        parts: dict[int, Part] = {}
        for s in found:
            made = [f for f in s.linear if f.labels[0].any()] or s.factors
            self.layer.makers |= {f.parameter for f in made}
        for s in found:
            if any(not f.labels[0].any() for f in s.factors):
                continue  # the summand is elsewhere
            linear = [f for f in s.linear if f.parameter not in self.softmaxes.frozen]
            made = [(self._part(f, heads, loops), f.event) for f in linear]
            if not made:
                return None, FROZEN if s.linear else s.why or NORMED
            # The last that was applied is first; but only what distinguishes heads can
            # be scaled for each of them.
            own = [x for x in made if x[0].heads == heads.number > 1]
            own = own or [x for x in made if x[0].heads > 1]
            # What another summand is scaled by is scaled here, too.
            known = [*parts.values()]
            again = [x for x in own or made if known and _overlap([x[0]], known)]
            best, event = (again or own or made)[0]
            self.events |= event
            if old := parts.get(best.parameter):
                if _disagree(old, best):
                    self.refusals.append("a parameter's entries are in several heads")
                best = _merged(old, best)
            parts[best.parameter] = best
        return list(parts.values()), ""

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
                "nothing scales the query, such as one that is normed without a gain, "
                "and several query heads share a key"
            )
        else:
            self.refusals.append(_why(*pair.whys))
        return None


FROZEN = "what makes it is frozen, so that no parameter scales"
QUERY, KEY, BOTH, NONE = 0, 1, "both", "none"


def _overlap(one: list[Part] | None, other: list[Part] | None) -> bool:
    """Whether parts have entries in common."""

    def of(part: Part) -> np.ndarray:
        return np.expand_dims(part.owners >= 0, part.stack)

    return any(
        a.parameter == b.parameter and bool((of(a) & of(b)).any())
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
