"""Finds attention that was not understood, by one rule.

A product of two activations that goes through something nonlinear and then weighs a
third activation is attention, whatever stands between. `Facts` and `Softmaxes` know the
forms that can be read. This module follows every other product forward, as a bit in a
few sets, and asks at the end whether it weighs along what one operand alone has: keys.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from .attention import Layer
from .facts import members, union
from .graph import Atom, Eqn, Frame, Origin
from .jaxprs import names
from .labels import is_varied
from .makers import Makers
from .primitives import ELEMENTWISE, moves, PRODUCTS
from .softmaxes import exponent, Softmaxes
from .uses import ALGEBRA


class Taint(NamedTuple):
    """The products that a variable was made of, a bit for each."""

    entrywise: int = 0  # multiplied entry by entry, and nothing was summed yet
    linear: int = 0
    bent: int = 0  # went through something nonlinear
    exponential: int = 0  # those of the bent that an exponential bent
    choice: int = 0  # a mask or an index was made of them
    # A bit that is unset where nothing but copies along some axis are in it.
    varied: int = 0

    @property
    def all(self) -> int:
        return self.entrywise | self.linear | self.bent

    def without(self, bits: int) -> "Taint":
        return Taint(*(x & ~bits for x in self[:-1]), self.varied)

    @property
    def after_nonlinear(self) -> "Taint":
        return self._replace(bent=self.bent | self.linear)


# Of numbers and copies of arrays, and of arrays, that no products are in.
_CLEAN, _VARIED = Taint(), Taint(varied=1)


def _joined(taints: Iterable[Taint]) -> Taint:
    return Taint(*map(union, zip(_CLEAN, *taints, strict=True)))


class Site(NamedTuple):
    """Where products weigh an activation."""

    eqn: Eqn
    i: int  # the operand that the products are
    bits: int
    # "contracted" with the activation, a weight for each "vector" of it, or one for
    # each of its "channels".
    how: str


_SUMS = names("reduce_sum cumsum fft")
# The entries along an axis are compared or summed up, as a normalization does.
_COMPARES = names("reduce_sum reduce_max sort cumsum cumlogsumexp")
# The result is a number for many logits, no logits.
_ENDS = ALGEBRA | names(
    "reduce_max reduce_min argmax argmin reduce_and reduce_or cummax cummin pmax pmin"
)
_LINEAR = names("mul div neg real imag conj sign stop_gradient not and or xor eq ne")
_BENDS = (ELEMENTWISE | names("max min cumlogsumexp")) - _LINEAR
_ORDERS = names("sort top_k approx_top_k")


def suspicions(
    reader: Softmaxes, layers: Sequence[Layer]
) -> tuple[list[Layer], list[Layer]]:
    """Attention besides `layers`: what may be a softmax, and what has none.

    The second kind, as attention by sigmoids, is no error: no logit can saturate it.
    """
    forward = _Forward(reader, {eqn for layer in layers for eqn in layer.products})
    refused, unclipped, seen = [], [], set()
    for site in forward.sites.values():
        bits = forward.over_keys(site)
        roots = dict.fromkeys(forward.root(bit) for bit in _each(bits))
        births = [forward.eqns[bit] for bit in roots]
        if not births or seen.issuperset(births):
            continue
        seen.update(births)
        makers = {n for eqn in births for x in eqn.inputs() for n in forward.makers(x)}
        layer = Layer(births, makers=makers)
        mixed = [forward.eqns[bit] for bit in _each(bits) if bit not in roots]
        if not bits & forward.exponential:
            if not forward.is_normalized(site, bits):
                unclipped.append(layer)
                continue
            layer.refusal = "it is normalized by a function other than softmax"
        elif mixed:
            layer.refusal = (
                f"{mixed[0].name} at {mixed[0].line} mixes its logits before an "
                f"exponential of them weighs activations at {site.eqn.line}"
            )
        else:
            layer.refusal = (
                f"an exponential of it weighs activations at {site.eqn.line}, in no "
                "form of attention that can be read"
            )
        refused.append(layer)
    return refused, unclipped


def _each(bits: int) -> Iterator[int]:
    return (1 << i for i in members(bits))


class _Forward:
    """Follows the products of two activations through all frames, as `Facts` does."""

    def __init__(self, reader: Softmaxes, read: set[Eqn]):
        self._reader, self._facts, self._graph = reader, reader.facts, reader.graph
        self._makers = Makers(reader.graph, reader.facts, reader.scaling)
        self._read = read
        self.sites: dict[tuple[Eqn, int], Site] = {}
        self.exponential = 0  # products of which an exponential weighs something
        self._compared: list[tuple[int, Atom, tuple[int, ...]]] = []
        self.eqns: dict[int, Eqn] = {}  # products, by their bit
        self._bits: dict[tuple[Eqn, int], int] = {}
        # What a matrix or a window over keys makes of a product gets a bit of its own:
        # the product, and its dimensions that each of the result is made of.
        self._root: dict[int, int] = {}
        self._mixes: dict[int, list[set[int]]] = {}
        # Products that a kernel took for features: no logits, wherever else they go.
        self._ended = 0
        self._of: dict[Atom, Taint] = {}
        self._own: dict[Atom, set[int]] = {}
        self._features: dict[tuple[Atom, int], bool] = {}
        self._run(self._graph.top, [_VARIED] * len(self._graph.top.inputs))

    def of(self, atom: Atom) -> Taint:
        if isinstance(atom.var, Literal):
            return _CLEAN
        taint = self._of.get(atom, _VARIED)
        return taint.without(self._ended) if taint.all & self._ended else taint

    # Frames.

    def _run(self, frame: Frame, inputs: list[Taint]) -> list[Taint]:
        self._of |= zip(frame.inputs, inputs, strict=True)
        for eqn in frame.live:
            for var, taint in zip(eqn.eqn.outvars, self._outputs(eqn), strict=True):
                is_index = jnp.issubdtype(var.aval.dtype, jnp.integer)
                if var.aval.dtype == bool or (is_index and eqn.name in _ORDERS):
                    taint = _VARIED._replace(choice=taint.all | taint.choice)
                self._of[Atom(frame, var)] = taint
        return [self.of(atom) for atom in frame.outputs]

    def _outputs(self, eqn: Eqn) -> list[Taint]:
        n = len(eqn.eqn.outvars)
        if not eqn.inside:
            return [self._primitive(eqn)] * n
        runs = [self._inside(inner) for inner in eqn.inside]
        outs = [_joined(taints) for taints in zip(*runs, strict=True)][:n]
        rest = _joined(map(self.of, eqn.inputs()))
        return [*outs, *[rest] * (n - len(outs))]

    def _inside(self, inner: Frame) -> list[Taint]:
        """The results of a run, those of all trips if it is a loop's."""
        own = [self.of(x.atom) for x in inner.outer]
        while True:
            outs, after = self._run(inner, own), list(own)
            for k, i in enumerate(inner.carried):
                after[i] = outs[k] = _joined([own[i], outs[k]])
            if after == own:
                return outs
            own = after

    # Equations.

    def _primitive(self, eqn: Eqn) -> Taint:
        name, atoms = eqn.name, eqn.inputs()
        taints = [self.of(atom) for atom in atoms]
        if name in PRODUCTS:
            return self._product(eqn, taints)
        if name == "mul":
            return self._times(eqn, taints)
        out = _joined(taints)
        if name == "sub" and self._is_of_two(eqn) and self._is_outer(eqn):
            out = out._replace(entrywise=out.entrywise | self._born(eqn))
        if name in ("broadcast_in_dim", "tile"):
            return out._replace(varied=0)
        if not out.all | out.choice or name in _ENDS:
            return _VARIED if out.varied else _CLEAN
        if name in _COMPARES and out.linear | out.bent:
            params = eqn.eqn.params
            axis = params.get("axis", params.get("dimension"))
            axes = params.get("axes", (axis,))
            self._compared.append((out.linear | out.bent, atoms[0], tuple(axes)))
        if name in ("gather", "dynamic_slice"):
            return taints[0]  # an index decides what is taken, and is no part of it
        if name == "select_n":
            bent = out.bent | out.linear & taints[0].choice
            return _joined(taints[1:])._replace(bent=bent)
        if name == "div":
            return _quotient(*taints)
        if name in _SUMS and out.entrywise:
            return self._summed(eqn, out)
        if exponent(eqn) is not None or name == "expm1":
            out = out.after_nonlinear
            return out._replace(exponential=out.bent)
        if name in ("log", "log1p"):  # a softplus, or logarithms of a softmax's shares
            return out.after_nonlinear._replace(exponential=0)
        if name in ("integer_pow", "square") and out.entrywise:
            return out  # the square of a difference has a product in it
        return out.after_nonlinear if name in _BENDS else out

    def _is_of_two(self, eqn: Eqn) -> bool:
        """Whether both operands are activations that parameters made."""
        x, y = eqn.inputs()[:2]
        return x.var is not y.var and all(f.is_deep for f in self._facts.inputs(eqn))

    def _times(self, eqn: Eqn, taints: list[Taint]) -> Taint:
        a, b = taints
        out = _joined(taints)._replace(choice=0)
        bent = a.linear & (b.linear | b.choice) | b.linear & a.choice
        out = out._replace(bent=out.bent | bent)
        for i in (0, 1) if a.bent | b.bent else ():
            if self._weighs(eqn, i, taints):
                # The same along an axis, it weighs vectors; else the other may be.
                for j, how in ((i, "vector"), (1 - i, "channel")):
                    if self._reader.is_repeated(eqn, j):
                        self._met(eqn, i, taints[i], how)
                        break
        if not self._is_of_two(eqn):
            return out
        if self._is_outer(eqn):
            return out._replace(linear=out.linear | self._born(eqn))
        x, y = self._facts.inputs(eqn)
        if x.sole == y.sole not in (None, -1):
            return out  # of one kernel's outputs alone, as in `silu`
        return out._replace(entrywise=self._born(eqn))

    def _summed(self, eqn: Eqn, out: Taint) -> Taint:
        """What is summed along what both operands have is a product of theirs."""
        atom, params = eqn.inputs()[0], eqn.eqn.params
        found = out.entrywise if eqn.name == "fft" else 0
        axes = params.get("axes", (params.get("axis"),))
        for bit in _each(out.entrywise & ~found):
            along, (a, b) = self._along(bit, atom), self._sides(bit)
            if along and any(along[axis] & a & b for axis in axes):
                found |= bit
        rest = out.entrywise & ~found
        return out._replace(linear=out.linear | found, entrywise=rest)

    def _product(self, eqn: Eqn, taints: list[Taint]) -> Taint:
        facts = self._facts.inputs(eqn)[:2]
        weight = (
            self._facts.weight_of(eqn) if facts[0].leaves | facts[1].leaves else None
        )
        is_plain = [not f.leaves or weight == i for i, f in enumerate(facts)]
        if not any(is_plain) and not (facts[0].is_weight and facts[1].is_weight):
            for i in (0, 1):
                if self._weighs(eqn, i, taints):
                    if eqn.contracted:
                        self._met(eqn, i, taints[i], "contracted")
                    elif {*eqn.to[1 - i]} - {*eqn.to[i]}:
                        self._met(eqn, i, taints[i], "vector")
            if eqn.contracted or eqn.name == "conv_general_dilated":
                return _VARIED._replace(linear=self._born(eqn))
            out, own = _joined(taints), self._born(eqn)
            if all({*to} - eqn.shared for to in eqn.to):
                return out._replace(linear=out.linear | own)
            return out._replace(entrywise=own)
        kept = [_VARIED, _VARIED]
        for i, (fact, other) in enumerate(zip(facts, facts[::-1], strict=True)):
            is_of_data = not other.leaves and other.has_data and bool(eqn.contracted)
            if taints[i].all:
                kept[i] = self._mixed(eqn, i, taints[i])
                if is_of_data and taints[i].exponential and not taints[1 - i].all:
                    self._met(eqn, i, taints[i], "contracted", of_data=True)
            if is_of_data and fact.is_deep and self._is_over_outputs(eqn, i):
                # Keys among the arguments. A softmax alone makes attention of these.
                kept[i] = kept[i]._replace(linear=kept[i].linear | self._born(eqn))
        return _joined(kept)

    def _is_over_outputs(self, eqn: Eqn, i: int) -> bool:
        """Whether a product sums over the outputs of a kernel."""
        atom = eqn.inputs()[i]
        return any(self._is_feature(atom, pair[i]) for pair in eqn.contracted)

    # From births to where they weigh.

    def _born(self, eqn: Eqn) -> int:
        """The bit of a product of two activations, unless it is read or no attention."""
        facts = self._facts.inputs(eqn)[:2]
        leaves, trained = (
            union(x) for x in zip(*((f.leaves, f.trained) for f in facts))
        )
        is_frozen = {*members(leaves)} <= self._reader.frozen
        if eqn in self._read or is_frozen or not trained:
            return 0
        if any(f.is_onehot for f in facts):
            return 0  # rows are picked
        return self._bit(eqn, 0)

    def _bit(self, eqn: Eqn, root: int) -> int:
        bit = self._bits.setdefault((eqn, root), 1 << len(self._bits))
        self.eqns[bit] = eqn
        return bit

    def root(self, bit: int) -> int:
        """The product whose entries were mixed, or itself."""
        return self._root.get(bit, bit)

    def _weighs(self, eqn: Eqn, i: int, taints: list[Taint]) -> bool:
        """Whether products weigh the other operand, which no product is in."""
        own, other = taints[i], taints[1 - i]
        is_bent = own.bent & ~own.entrywise and not other.linear | other.bent
        return bool(is_bent) and self._facts.inputs(eqn)[1 - i].is_deep

    def _met(
        self, eqn: Eqn, i: int, own: Taint, how: str, of_data: bool = False
    ) -> None:
        bits = own.bent & ~own.entrywise
        if of_data or how == "channel":  # else gates and norms would be attention
            bits &= own.exponential
        if bits:
            before = self.sites.get((eqn, i))
            bits |= before.bits if before else 0
            self.sites[eqn, i] = Site(eqn, i, bits, how)
            self.exponential |= bits & own.exponential

    def _mixed(self, eqn: Eqn, i: int, taint: Taint) -> Taint:
        """What a weight or data leave of products: what they sum over decides.

        Over features, it is a layer that is applied to what was attended to. Over keys,
        the result is new logits, born again.
        """
        sources = _sources(eqn, i)
        if sources is None:
            return _VARIED
        atom, (over, of) = eqn.inputs()[i], sources
        over = [d for d in over if atom.shape[d] > 1]
        is_of_parameter = bool(self._facts.inputs(eqn)[1 - i].leaves)
        now = dict.fromkeys(_each(taint.all), 0)
        for bit in now:
            is_entrywise = bool(bit & taint.entrywise & ~taint.linear and over)
            if is_entrywise and is_of_parameter:
                continue
            along = self._along(bit, atom)
            if along is None:
                continue
            # Heads are mixed as logits or as weights. What was normed is no longer one.
            is_normed = bool(bit & taint.bent & ~taint.exponential)
            if any(
                not along[d] or self._is_of_features(bit, along[d], is_normed)
                for d in over
            ):
                self._ended |= bit
                continue
            a, b = self._sides(bit)
            if is_entrywise and not all(along[d] <= a & b for d in over):
                continue
            now[bit] = bit
            if over or eqn.name == "conv_general_dilated":
                root = self.root(bit)
                now[bit] = new = self._bit(eqn, root)
                self._root[new] = root
                self._mixes[new] = [set().union(*(along[d] for d in ds)) for ds in of]
        bits = [union(now.get(b, 0) for b in _each(x)) for x in taint[:4]]
        return Taint(0, bits[0] | bits[1], bits[2], bits[3], 0, 1)

    def _sides(self, bit: int) -> tuple[set[int], set[int]]:
        """The dimensions of a product that each of its operands has."""
        a, b = (
            {d for d in x if d is not None} for x in self._to(self.eqns[self.root(bit)])
        )
        return a, b

    def _to(self, eqn: Eqn) -> Sequence[Sequence[int | None]]:
        """For each operand, the dimension of the product that each of its own is."""
        if eqn.name in ("mul", "sub"):
            return [sorted(self._varied(x)) for x in eqn.inputs()]
        return eqn.to if eqn.name != "conv_general_dilated" else ((), ())

    def _is_of_features(self, bit: int, dims: set[int], heads: bool = False) -> bool:
        """Whether dimensions of a product are outputs of kernels, or columns of tables.

        Those that both operands have are heads, or else were summed over.
        """
        eqn = self.eqns[self.root(bit)]
        a, b = self._sides(bit)
        is_all = heads or eqn.name in ("mul", "sub")
        wanted = dims if is_all else dims - (a & b)
        for atom, to in zip(eqn.inputs(), self._to(eqn), strict=False):
            own = to if eqn.name in PRODUCTS else range(len(atom.shape))
            if any(
                o in wanted and self._is_feature(atom, d) for d, o in enumerate(own)
            ):
                return True
        return False

    def _is_feature(self, atom: Atom, d: int) -> bool:
        key = atom, d
        if key not in self._features:
            labels = atom.marks([d])
            found = [x.labels for x in self._makers.of(atom, labels)]

            def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
                if origin.parameter is not None:
                    found.append(origin.labels)
                if (eqn := origin.at) is None or eqn.is_product:
                    return []
                facts = self._facts.inputs(eqn)
                return [(i, None) for i, f in enumerate(facts) if f.leaves]

            if not any(is_varied(x) for (x,) in found):
                self._graph.back(atom, labels, ahead)
            self._features[key] = any(is_varied(x) for (x,) in found)
        return self._features[key]

    def makers(self, atom: Atom) -> set[int]:
        """The parameters that made an activation, as far as kernels go."""
        return {x.number for x in self._makers.of(atom, atom.whole)}

    # Dimensions.

    def _along(self, bit: int, atom: Atom) -> list[set[int]] | None:
        """For each axis of what a product became, its dimensions that this comes of."""
        target, found = self.eqns[bit], []

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            if (eqn := origin.at) is target:
                found.append(origin.labels)
            if eqn is None or eqn is target:
                return []
            inputs, back = eqn.inputs(), moves(eqn, origin.k)
            return [
                (i, None) for i, _ in back if self._of.get(inputs[i], _CLEAN).all & bit
            ]

        self._graph.back(atom, atom.each(), ahead)
        if not found:
            return None
        lead, rank = len(target.frame.lead), len(target.output().shape)
        mixes = self._mixes.get(bit) or [{d} for d in range(rank)]
        return [
            set().union(
                *(mixes[d] for x in axis for d in range(rank) if x.shape[lead + d] > 1)
            )
            for axis in zip(*found, strict=True)
        ]

    def _is_outer(self, eqn: Eqn) -> bool:
        """Whether each operand varies along a dimension of which the other is a copy."""
        shape, inputs = eqn.output().shape, eqn.inputs()
        if any(self.of(x).varied and x.shape == shape for x in inputs):
            return False
        a, b = map(self._varied, inputs)
        return bool(a - b) and bool(b - a)

    def _varied(self, atom: Atom) -> set[int]:
        """The dimensions along which an array is no copy.

        As `Graph.copied` finds them, but rows that an index picked are no copies.
        """
        if atom not in self._own:
            own = self._own[atom] = set()

            def ahead(origin: Origin, depth: int) -> list[tuple[int, int]]:
                eqn, back = origin.at, []
                stops = PRODUCTS | names("gather dynamic_slice")
                if eqn and depth < 12 and eqn.name not in stops:
                    back = [] if "reduce_" in eqn.name else moves(eqn, origin.k)
                if not back:
                    is_all = eqn is not None and eqn.name == "gather"
                    labels = enumerate(origin.labels)
                    own.update(d for d, x in labels if is_all or is_varied(x))
                return [(i, depth + 1) for i, _ in back]

            self._graph.back(atom, atom.each(), ahead, 0)
            own -= {d for d, n in enumerate(atom.shape) if n == 1}
        return self._own[atom]

    # The answer.

    def over_keys(self, site: Site) -> int:
        """Products of a site that weigh along what one of their operands alone has."""
        return union(b for b in _each(site.bits) if self._keys(site, b) is not None)

    def _keys(self, site: Site, bit: int) -> set[int] | None:
        """The dimensions of a product that it weighs along."""
        eqn, i = site.eqn, site.i
        atom, other = eqn.inputs()[i], eqn.inputs()[1 - i]
        along, product = self._along(bit, atom), self.eqns[self.root(bit)]
        is_complex = jnp.issubdtype(
            product.output().var.aval.dtype, jnp.complexfloating
        )
        if along is None or is_complex or product.name == "conv_general_dilated":
            return set()  # lags are the keys, which no operand has
        a, b = self._sides(bit)
        sides = [
            {d for d in x if not self._is_of_features(bit, {d})} for x in (a - b, b - a)
        ]
        if site.how == "contracted":
            dims = {pair[i] for pair in eqn.contracted}
        else:
            dims = self._varied(atom)
        if site.how == "channel":
            # The values are the same for all queries, and differ along keys.
            own = self._varied(other) if len(other.shape) == len(atom.shape) else dims
            queries = set().union(*(along[d] for d in dims - own))
            dims &= own
            sides = [x for x, y in zip(sides, sides[::-1]) if queries & y]
        keys = set().union(*(along[d] for d in dims)) & set().union(*sides)
        return keys or None

    def is_normalized(self, site: Site, bits: int) -> bool:
        """Whether entries of products are compared along what they weigh along."""
        keys = {bit: self._keys(site, bit) for bit in _each(bits)}
        for compared, atom, axes in self._compared:
            for bit in _each(compared & bits):
                along = self._along(bit, atom)
                if along and any(along[axis] & keys[bit] for axis in axes):
                    return True
        return False


def _quotient(a: Taint, b: Taint) -> Taint:
    """The products of a denominator are none of the result's.

    But of a sigmoid that is written out, as `1 / (1 + exp(-x))`.
    """
    if not a.all:
        return Taint(bent=b.exponential)
    return a._replace(bent=a.bent | a.linear & b.all)


def _sources(eqn: Eqn, i: int) -> tuple[list[int], list[list[int]]] | None:
    """The dimensions of an operand that a product sums over, and those it mixes.

    The second for each dimension of the result. `None` for windows of a convolution.
    """
    if eqn.name != "conv_general_dilated":
        over = [d for d, o in enumerate(eqn.to[i]) if o is None]
        own = {o: [d] for d, o in enumerate(eqn.to[i]) if o is not None}
        return over, [own.get(o, over) for o in range(len(eqn.output().shape))]
    if i:
        return None
    numbers, params = eqn.eqn.params["dimension_numbers"], eqn.eqn.params
    pairs = zip(numbers.out_spec, numbers.lhs_spec, strict=True)
    window = eqn.inputs()[1].shape[numbers.rhs_spec[1]]
    is_depthwise = params["feature_group_count"] > 1 and window == 1
    over = [] if is_depthwise else [numbers.lhs_spec[1]]
    return over, [[d] for _, d in sorted(pairs)]
