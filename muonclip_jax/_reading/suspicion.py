"""Finds attention that was not understood, by one rule.

A product of two activations that passes through a nonlinear function and then weighs a
third activation is attention, whatever stands between. `Softmaxes` knows the forms that
can be read. This module follows every other product forward, as a bit in a few sets.
It then asks whether the product weighs along keys: axes that one operand alone has.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never, NamedTuple

import jax.numpy as jnp

from .attention import Layer
from .fact import members, union
from .facts import is_choice
from .forward import Forward
from .graph import Atom, Eqn
from .makers import Makers
from .modulated import sides_of
from .primitives import Kind, moves
from .softmaxes import dimensions_in, exponent, Softmaxes


class Taint(NamedTuple):
    """The products that a variable depends on, with a bit for each product."""

    entrywise: int = 0  # multiplied entry by entry, and not summed yet
    linear: int = 0
    bent: int = 0  # passed through a nonlinear function
    exponential: int = 0  # the bent products that passed through an exponential
    totals: int = 0  # the variable contains a sum of their entries
    logged: int = 0  # the variable contains the logarithm of such a sum
    choice: int = 0  # a mask or an index depends on them
    varied: int = 0  # 0 if the variable is repeated along some axis, else 1

    @property
    def all(self) -> int:
        return self.entrywise | self.linear | self.bent

    def nonlinear(self) -> "Taint":
        return self._replace(bent=self.bent | self.linear)


_COPY, _ARRAY = Taint(), Taint(varied=1)


class Suspect(NamedTuple):
    """A product of two activations, or the result of mixing its entries."""

    eqn: Eqn
    root: Eqn  # the product itself
    root_dims: list[set[int]]  # the product's, in each dimension of the result


_CONV = "conv_general_dilated"

#: Kinds that multiply or compare two activations.
_OF_TWO = (Kind.CONTRACTION, Kind.PRODUCT, Kind.DIFFERENCE)


def suspicions(
    softmaxes: Softmaxes, layers: Sequence[Layer]
) -> tuple[list[Layer], list[Layer]]:
    """Returns attention besides `layers`: with a possible softmax, and without one.

    A softmax divides exponentials by their sum. Attention without it, such as by
    sigmoids or by exponentials alone, is not clipped and is no error.
    """
    read = {eqn for layer in layers for eqn in layer.products}
    suspicion = _Suspicion(softmaxes, read)
    refused, without_softmax, seen = [], [], set()
    for (site, i), bits in suspicion.sites.items():
        bits = union(bit for bit in _each(bits) if suspicion.is_over_keys(site, i, bit))
        suspects = [suspicion.products[bit] for bit in _each(bits)]
        roots = list(dict.fromkeys(x.root for x in suspects))
        if seen.issuperset(roots):
            continue
        seen.update(roots)
        atoms = [atom for eqn in roots for atom in eqn.inputs()]
        makers = {m.parameter for x in atoms for m in suspicion.makers.of(x, x.whole)}
        layer = Layer(roots, makers=makers)
        is_divided = bits & (suspicion.divisors | suspicion.normalized)
        if bits & suspicion.exponential and (is_divided or softmaxes.divides(site)):
            layer.refusal = (
                f"an exponential of it weighs activations at {site.line}, in no form "
                "of attention that can be read"
            )
            for x in [x.eqn for x in suspects if x.eqn is not x.root][:1]:
                layer.refusal += f": {x.name} at {x.line} mixes its logits before"
        elif bits & suspicion.normalized:
            layer.refusal = "it is normalized by a function other than softmax"
        (refused if layer.refusal else without_softmax).append(layer)
    return refused, without_softmax


def _each(bits: int) -> Iterator[int]:
    return (1 << i for i in members(bits))


def _is_exponential(eqn: Eqn) -> bool:
    return exponent(eqn) is not None or eqn.name == "expm1"


def _all(sets: Iterable[set[int]]) -> set[int]:
    return set().union(*sets)


class _Suspicion(Forward[Taint]):
    """Follows products of two activations, except the products in `read`."""

    def __init__(self, softmaxes: Softmaxes, read: set[Eqn]):
        super().__init__(_COPY)
        self._softmaxes, self._facts, self._read = softmaxes, softmaxes.facts, read
        self.makers = Makers(softmaxes)
        self.products: dict[int, Suspect] = {}  # by their bit
        self._bits: dict[tuple[Eqn, Eqn], int] = {}
        # The equations and operands that weigh the other operand, with their products.
        self.sites: dict[tuple[Eqn, int], int] = {}
        # Products that weigh after an exponential, or after a sum of their entries.
        self.exponential = self.normalized = 0
        # Products whose exponentials, or sums, divide something.
        self.divisors = 0
        top = softmaxes.graph.top
        self.run(top, [_ARRAY] * len(top.inputs))

    def either(self, values: Sequence[Taint]) -> Taint:
        if all(x is _ARRAY or x is _COPY for x in values):  # the common case, fast
            return _ARRAY if _ARRAY in values else _COPY
        return Taint(*map(union, zip(_COPY, *values, strict=True)))

    def inputs(self, eqn: Eqn) -> list[Taint]:
        taints = super().inputs(eqn)
        if not self._facts.has_slopes or eqn.is_slope:
            return taints
        # The results of a backward pass are data elsewhere, as in `Facts.of`.
        is_slope = (self._facts.value(x).is_slope for x in eqn.inputs())
        pairs = zip(taints, is_slope, strict=True)
        return [_ARRAY if is_one else taint for taint, is_one in pairs]

    def result(self, eqn: Eqn, atom: Atom, value: Taint) -> Taint:
        is_made = value.all and is_choice(eqn, atom)
        return _ARRAY._replace(choice=value.all | value.choice) if is_made else value

    # Equations.

    def primitive(self, eqn: Eqn) -> Taint:
        kind, taints = eqn.kind, self.inputs(eqn)
        is_of_two = kind in _OF_TWO and self._is_of_two(eqn)
        if kind is Kind.CONTRACTION and not is_of_two:
            return self.either([self._through(eqn, i, taints[i]) for i in (0, 1)])
        out = self.either(taints)
        if kind is Kind.PRODUCT:
            a, b = taints
            bent = a.linear & (b.linear | b.choice) | b.linear & a.choice
            out = out._replace(bent=out.bent | bent, choice=0)
        if kind in (Kind.SUM, Kind.DIFFERENCE):  # as by a straight-through estimator
            a, b = taints
            bent = a.linear & b.choice | b.linear & a.choice
            out = out._replace(bent=out.bent | bent)
        if is_of_two:
            return self._of_two(eqn, taints, out)
        if kind is Kind.REPEATED:
            return out._replace(varied=0)
        nothing = _ARRAY if out.varied else _COPY
        if not any(out[:-1]):
            return nothing
        match kind:
            case Kind.EXTREME | Kind.ALGEBRA:
                return nothing  # one number for many entries, where the search ends
            case Kind.CHOICE:
                test, *cases = taints
                bent, chosen = out.bent | out.linear & test.choice, self.either(cases)
                return chosen._replace(bent=bent, choice=chosen.choice | test.choice)
            case Kind.QUOTIENT:
                a, b = taints
                self.divisors |= b.exponential | b.totals
                if not a.all:  # a denominator, unless it is a sigmoid written out
                    return _ARRAY._replace(bent=b.exponential, totals=b.totals)
                bent, totals = a.bent | a.linear & b.all, a.totals | a.all & b.totals
                return a._replace(bent=bent, totals=totals)
            case Kind.TOTAL | Kind.MIXED | Kind.ORDER:
                return self._summed(eqn, out)
            case Kind.LOG_TOTAL:
                out = self._summed(eqn, out).nonlinear()
                return out._replace(logged=out.totals)
            case Kind.EXPONENTIAL | Kind.BENT if _is_exponential(eqn):
                # Only the logarithm of a sum normalizes here. A sum of logarithms is
                # a product of weights, as in stick-breaking attention.
                exponential, totals = out.bent | out.linear, out.totals & out.logged
                self.divisors |= totals
                return out.nonlinear()._replace(exponential=exponential, totals=totals)
            case Kind.LOGARITHM:  # a softplus or a log-softmax
                return out.nonlinear()._replace(exponential=0, logged=out.totals)
            case Kind.LARGER:
                # A sum below which an activation keeps it, as in xLSTM, does not
                # normalize: the weights do not add up to one.
                facts = self._facts.inputs(eqn)
                pairs = zip(facts, taints, strict=True)
                is_bounded = any(f.is_deep and not x.all for f, x in pairs)
                totals = 0 if is_bounded else out.totals
                return out.nonlinear()._replace(totals=totals)
            case (
                Kind.EXPONENTIAL
                | Kind.BENT
                | Kind.STEP
                | Kind.EQUAL
                | Kind.POWER
                | Kind.SOFTCAP
                | Kind.FOLDED
                | Kind.POOLED
            ):
                return out.nonlinear()
            case (
                Kind.SAME
                | Kind.PERMUTED
                | Kind.CUT
                | Kind.PICKED
                | Kind.JOINED
                | Kind.PLACED
                | Kind.STOPPED
                | Kind.LINEAR
                | Kind.SUM
                | Kind.DIFFERENCE
                | Kind.PRODUCT
                | Kind.CONTRACTION
                | Kind.SCATTERED
                | Kind.WINNER
                | Kind.EXCHANGED
                | Kind.COUNTER
                | Kind.GENERATED
                | Kind.UNKNOWN
            ):
                return out
            case _:
                assert_never(kind)

    def _is_of_two(self, eqn: Eqn) -> bool:
        """Returns whether both operands are activations that depend on parameters."""
        facts, (x, y) = self._facts.inputs(eqn)[:2], eqn.inputs()[:2]
        if eqn.kind is not Kind.CONTRACTION:
            return x.var is not y.var and all(f.is_deep for f in facts)
        return all(f.leaves for f in facts) and self._facts.weight_of(eqn) is None

    def _of_two(self, eqn: Eqn, taints: list[Taint], out: Taint) -> Taint:
        """Combines two activations; one of them may weigh the other."""
        is_product = eqn.kind is not Kind.DIFFERENCE
        is_bent = taints[0].bent | taints[1].bent
        # An entrywise outer product repeats both operands, each along other axes.
        is_entrywise = eqn.kind is not Kind.CONTRACTION
        is_alike = is_entrywise and any(x.varied for x in taints)
        a, b = (set(), set()) if is_alike and not is_bent else self._sides(eqn)
        for i, dims, other_dims in ((0, a, b), (1, b, a)) if is_product else ():
            bits = taints[i].bent & ~taints[i].entrywise
            if not (eqn.contracted or other_dims - dims):
                # Without an exponential, weights for each entry are gates or norms.
                bits &= taints[i].exponential if dims - other_dims else 0
            if eqn.contracted and self._is_mask(eqn.inputs()[i]):
                bits |= taints[i].choice  # hard attention
            if not taints[1 - i].linear | taints[1 - i].bent:
                self._note_site(eqn, i, bits, taints[i])
        if is_product and (eqn.contracted or eqn.name == _CONV):
            return _ARRAY._replace(linear=self._born(eqn))
        if a - b and b - a:
            is_linear = is_product and self._born(eqn)
            entrywise = out.entrywise | (0 if is_product else self._born(eqn))
            return out._replace(linear=out.linear | is_linear, entrywise=entrywise)
        x, y = self._facts.inputs(eqn)[:2]
        if not is_product or x.only_kernel == y.only_kernel is not None:
            return out  # both operands are outputs of one kernel, as in `silu`
        return out._replace(entrywise=self._born(eqn))

    def _is_mask(self, atom: Atom) -> bool:
        """Returns whether an array is a mask as numbers, such as one-hot rows."""
        while len(eqns := self._softmaxes.graph.made_by(atom)) == 1:
            eqn, inputs = eqns[0], eqns[0].inputs()
            if eqn.kind is Kind.CHOICE:
                return all(x.number is not None for x in inputs[1:])
            if eqn.kind not in (Kind.SAME, Kind.REPEATED, Kind.PERMUTED, Kind.STOPPED):
                return is_choice(eqn, eqn.output())
            atom = inputs[0]
        return False

    def _note_site(self, eqn: Eqn, i: int, bits: int, taint: Taint) -> None:
        if bits:
            self.sites[eqn, i] = bits | self.sites.get((eqn, i), 0)
            self.exponential |= bits & taint.exponential
            self.normalized |= bits & taint.totals

    def _summed(self, eqn: Eqn, out: Taint) -> Taint:
        """Returns the taint of a sum: along shared dimensions it completes products."""
        products, totals, is_transform = 0, out.totals, eqn.kind is Kind.MIXED
        for bit in _each(out.all) if not is_transform else ():
            along, (a, b) = self._along(bit, eqn.inputs()[0]), self._sides(bit)
            dims = _all(along[d] for d in eqn.axes) if along else set()
            products |= bit if dims & a & b else 0
            totals |= bit if dims - (a & b) else 0
        done = out.entrywise & (out.all if is_transform else products)
        rest = out.entrywise & ~done
        return out._replace(linear=out.linear | done, totals=totals, entrywise=rest)

    def _through(self, eqn: Eqn, i: int, taint: Taint) -> Taint:
        """Returns the taint after a product with a weight or with data, maybe keys."""
        fact, other = (self._facts.inputs(eqn)[j] for j in (i, 1 - i))
        out = self._mixed(eqn, i, taint) if taint.all else _ARRAY
        if other.leaves or not (other.has_data and eqn.contracted):
            return out
        # Keys or values may be arguments: attention to them needs an exponential.
        # Probabilities times a table of numbers, not vectors, are an expectation.
        if any(o is not None and o not in eqn.to[i] for o in eqn.to[1 - i]):
            self._note_site(eqn, i, taint.exponential, taint)
        atom, dims = eqn.inputs()[i], [pair[i] for pair in eqn.contracted]
        is_key = fact.is_deep and any(self.makers.is_output(atom, d) for d in dims)
        return out._replace(linear=out.linear | self._born(eqn)) if is_key else out

    def _mixed(self, eqn: Eqn, i: int, taint: Taint) -> Taint:
        """Returns the taint after a matrix or a convolution.

        A matrix over features is a layer after attention, so its products end. A matrix
        over keys or queries makes new logits.
        """
        atom, to, out = eqn.inputs()[i], eqn.to[i], range(len(eqn.output().shape))
        over = [d for d, o in enumerate(to) if o is None and atom.shape[d] > 1]
        dims_of = [[d for d, o in enumerate(to) if o == k] for k in out]
        is_learned = bool(self._facts.inputs(eqn)[1 - i].leaves)
        new_bits: dict[int, int] = {}
        for bit in _each(taint.all if not i or eqn.name != _CONV else 0):
            is_entrywise = over and bit & taint.entrywise & ~taint.linear
            if is_entrywise and is_learned:
                continue
            along, (a, b) = self._along(bit, atom), self._sides(bit)
            if not along or (is_entrywise and any(along[d] - (a & b) for d in over)):
                continue
            # Mixed heads stay logits or weights; after a norm, heads count as features.
            heads = a & b if bit & taint.bent & ~taint.exponential else set()
            dims = [along[d] for d in over]
            if not all(dims) or self._is_of_features(bit, _all(dims), heads):
                continue
            new_bits[bit] = bit
            if over or eqn.name == _CONV:
                root_dims = [_all(along[d] for d in ds or over) for ds in dims_of]
                suspect = self.products[bit]._replace(eqn=eqn, root_dims=root_dims)
                new_bits[bit] = self._bit(suspect)
        kept = [union(new_bits.get(x, 0) for x in _each(bits)) for bits in taint[:-2]]
        entrywise, linear, *rest = kept
        return Taint(0, entrywise | linear, *rest, varied=1)

    # Products, by dimensions of their result.

    def _born(self, eqn: Eqn) -> int:
        """Returns the bit of a product, or 0.

        It is 0 for products that were read, products of constants or one-hot rows, and
        in a backward pass, where all products are of cotangents.
        """
        facts = self._facts.inputs(eqn)[:2]
        leaves = {*members(union(f.leaves for f in facts))}
        is_fixed = leaves <= self._softmaxes.frozen or not any(f.trained for f in facts)
        if eqn.is_slope or eqn in self._read or is_fixed:
            return 0
        if any(f.is_onehot for f in facts):
            return 0
        if any(self._is_value(eqn, i) for i in (0, 1)):
            return 0
        root_dims = [{d} for d in range(len(eqn.output().shape))]
        return self._bit(Suspect(eqn, eqn, root_dims))

    def _is_value(self, eqn: Eqn, i: int) -> bool:
        """Returns whether a product keeps an operand's features and sums over others.

        Query and key have their features in the sum. An operand that keeps its own is
        weighed: the values of attention, tokens on their way to experts and back.
        """
        if eqn.kind is not Kind.CONTRACTION or eqn.name == _CONV:
            return False
        over, free = (
            any(self.makers.is_output(eqn.inputs()[i], d) for d in dims)
            for dims in sides_of(eqn, i)
        )
        return free and not over

    def _bit(self, product: Suspect) -> int:
        bit = self._bits.setdefault(product[:2], 1 << len(self._bits))
        self.products[bit] = product
        return bit

    def _to(self, eqn: Eqn) -> Sequence[Sequence[int | None]]:
        """Returns `Softmaxes.to`, without the dimensions of a convolution."""
        return self._softmaxes.to(eqn) if eqn.name != _CONV else ((), ())

    def _sides(self, product: Eqn | int) -> tuple[set[int], set[int]]:
        """Returns the dimensions of a product, or of a bit's, that each operand has."""
        eqn = self.products[product].root if isinstance(product, int) else product
        a, b = ({d for d in to if d is not None} for to in self._to(eqn))
        return a, b

    def _is_of_features(self, bit: int, dims: set[int], heads: set[int]) -> bool:
        """Returns whether dimensions of one operand, or `heads`, are kernel outputs."""
        eqn, (a, b) = self.products[bit].root, self._sides(bit)
        is_entrywise = eqn.kind is not Kind.CONTRACTION
        dims = dims if is_entrywise else dims - (a & b) | dims & heads
        pairs = zip(eqn.inputs(), self._to(eqn), strict=False)
        places = [(x, d) for x, to in pairs for d, o in enumerate(to) if o in dims]
        return any(self.makers.is_output(x, d) for x, d in places)

    def _along(self, bit: int, atom: Atom) -> list[set[int]]:
        """Returns the product's dimensions in each axis, or `[]` if marks are lost."""
        target, *_, root_dims = self.products[bit]

        def follow(eqn: Eqn, k: int) -> list[int]:
            back, taints = moves(eqn, k) if eqn is not target else [], self.inputs(eqn)
            return [i for i, _ in back if taints[i].all & bit]

        origins = self._softmaxes.graph.walk(atom, atom.each(), follow)
        arrived = [x.all_marks for x in origins if x.eqn is target]
        return [
            _all(root_dims[d] for x in all_marks for d in dimensions_in(x, target))
            for all_marks in zip(*arrived, strict=True)
        ]

    def is_over_keys(self, site: Eqn, i: int, bit: int) -> bool:
        """Returns whether a site weighs along axes that one operand alone has."""
        along, (a, b) = self._along(bit, site.inputs()[i]), self._sides(bit)
        dtype = self.products[bit].root.output().var.aval.dtype
        if not along or not a | b or jnp.issubdtype(dtype, jnp.complexfloating):
            return True  # after an FFT, the keys are lags, which no operand has
        a, b = (
            {d for d in x if not self._is_of_features(bit, {d}, set())}
            for x in (a - b, b - a)
        )
        to, other_to = self._to(site)[:: -1 if i else 1]
        dims = {pair[i] for pair in site.contracted} or {*range(len(to))}
        if not site.contracted and not {*other_to} - {*to}:
            # With a weight for each entry, the values are the same for all queries.
            dims = {d for d, o in enumerate(to) if o in other_to}
            queries = _all(x for d, x in enumerate(along) if d not in dims)
            a, b = b if queries & a else set(), a if queries & b else set()
        return bool(_all(along[d] for d in dims) & (a | b))
