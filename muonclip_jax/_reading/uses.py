"""The uses of every parameter, noted wherever it meets activations."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import jaxprs
from .fact import Fact, members, union
from .facts import is_lookup
from .graph import AllMarks, Atom, Eqn
from .makers import Makers
from .marks import dimensions, is_varied, marks_along, varied
from .modulated import Modulated, sides_of
from .primitives import Kind, moves
from .routers import MULTIPLIES, Routers
from .softmaxes import Softmaxes


class Note(NamedTuple):
    """One use of a parameter, which is given by its place among the leaves.

    The kind is `"contracted"`, `"depthwise"`, `"looked up"`, `"elementwise"` (added to
    or multiplied with activations), `"data"` (used with data alone), `"factor"` (of a
    product of two parameters) or `"unknown"`.
    """

    kind: str
    parameter: int
    eqn: Eqn | None = None
    event: int = 0
    # Axes of the parameter with the role of each: "input", "output", "stack" or "rank"
    # (summed over between two parameters).
    roles: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        return self.eqn.name if self.eqn else ""

    @property
    def line(self) -> str:
        return self.eqn.line if self.eqn else ""


class Uses:
    """The notes of a graph, and other evidence of what parameters are.

    A kernel may make one number for each head: a gate, step or decay. Qwen trains such
    kernels with AdamW. The trace shows them where their outputs are first multiplied
    with another kernel's: they have fewer dimensions, with one number for all features
    of a head. In GLU, adaLN and squeeze-and-excitation, both sides have the same
    dimensions. In an outer product of key and value, each side lacks dimensions of the
    other.
    """

    def __init__(self, softmaxes: Softmaxes, tokens: frozenset[int]):
        self._softmaxes, self._facts = softmaxes, softmaxes.facts
        self._graph = softmaxes.graph
        self._makers = Makers(softmaxes)
        self._routers = Routers(softmaxes, self._makers)
        self.notes: list[Note] = [Note("elementwise", i) for i in tokens]
        # Parameters, each with an axis along which its entries are experts' matrices.
        self.experts: set[tuple[int, int]] = set()
        # For such an axis, a bit for each entry whose outputs were sliced off.
        self.cuts: dict[tuple[int, int], int] = defaultdict(int)
        self.scales: set[int] = set()  # kernels whose outputs scale others' outputs
        self.features: set[int] = set()  # kernels whose outputs are used as features
        self.fed = 0  # events that the operand of a later weight depends on
        self.last = 0  # events where a backward pass begins, at an output head
        # Unreadable operations through which activations went.
        self.hidden: list[Eqn] = []
        self._picked: dict[Atom, bool] = {}  # see `_is_picked`
        self._has_picked = any(
            is_lookup(eqn) and not self._facts.of(eqn.output()).is_deep
            for eqn in softmaxes.equations
        )
        # Products of parameters that are weights of later products, or are looked up.
        self._weights: set[Eqn] = set()
        # Products of parameters, with those that indices picked from tables.
        self._tables: set[tuple[Eqn, int]] = set()
        self._applied: set[tuple[Atom, str]] = set()  # weights, and the lines of uses
        for eqn in softmaxes.equations:
            if eqn.inside:
                self._carries_and_branches(eqn)
            elif not eqn.is_slope:
                self._note(eqn)
        self._note_slopes()
        self.notes = [self._judged(note) for note in self.notes]
        self.chosen = self._routers.events  # events of routers

    def parameters_of(self, *kinds: str) -> set[int]:
        return {note.parameter for note in self.notes if note.kind in kinds}

    def _use(self, kind: str, eqn: Eqn, *facts: Fact) -> None:
        """Notes the same use of all parameters in the operands that are weights.

        A product of parameters gets no note; its factors have theirs.
        """
        for fact in facts:
            leaves = members(fact.leaves) if fact.is_weight and not fact.is_pair else ()
            self.notes += [Note(kind, parameter, eqn) for parameter in leaves]

    # Equations.

    def _note(self, eqn: Eqn) -> None:
        inputs, kind = eqn.inputs(), eqn.kind
        facts = self._facts.inputs(eqn)
        if not any(f.leaves for f in facts):
            return
        if self._facts.event(eqn) & self._facts.norm_events:
            return
        if eqn.is_product:
            self._product(eqn, inputs, facts)
            return
        if not kind.is_known:
            self._unknown(eqn, facts)
        elif kind in (Kind.ORDER, Kind.WINNER):  # may decide where activations go
            self._use("elementwise", eqn, *facts)
            self._routers.choose(inputs[0], facts[0])
        elif kind is Kind.PICKED and facts[0].is_weight and self._facts.event(eqn):
            self._use("looked up", eqn, facts[0])
            if facts[0].is_pair:
                self._weights |= self._products_in(inputs[0])
        elif self._facts.event(eqn):
            self._entrywise(eqn, inputs, facts)
        elif any(f.has_data and not f.leaves for f in facts):
            self._use("data", eqn, *facts)
        if not any(f.is_deep for f in facts):
            return
        if kind in MULTIPLIES:
            self._routers.note(eqn, facts)
            self._scales(eqn, inputs, facts)
        elif kind in (Kind.CUT, Kind.PICKED):
            self._cut(eqn, inputs[0], facts[0])

    def _note_slopes(self) -> None:
        """Notes parameters whose only uses are in slopes, where these begin.

        A network's value may be gone if only its slope is used: in slopes of slopes,
        JAX drops it from functions under `jax.jit`, `jax.checkpoint` and `scan`.
        """
        noted, slopes = {note.parameter for note in self.notes}, 0
        for eqn in self._softmaxes.equations:
            event = self._facts.event(eqn) if eqn.is_slope and not eqn.inside else 0
            if not event:
                continue
            slopes |= event
            facts, before = self._facts.inputs(eqn), self.notes
            weights = union(f.leaves for f in facts if f.is_weight)
            if noted.issuperset(members(weights)):
                continue
            self.notes = []
            if not eqn.is_product:
                self._use("elementwise", eqn, *facts)
            elif (i := self._facts.weight_of(eqn)) is not None:
                self._weight(eqn, i, set())
                self.last |= 0 if facts[1 - i].past & slopes else event
            self.notes = before + [x for x in self.notes if x.parameter not in noted]
            noted |= {note.parameter for note in self.notes[len(before) :]}

    def _entrywise(self, eqn: Eqn, inputs: list[Atom], facts: list[Fact]) -> None:
        """Notes weights that meet activations entry by entry."""
        for i, fact in enumerate(facts):
            is_table = fact.is_weight and self._is_picked(inputs[i])
            self._use("looked up" if is_table else "elementwise", eqn, fact)
            if is_table and eqn.kind is Kind.PRODUCT:
                self._routers.note_mixers(facts[1 - i])

    def _is_picked(self, atom: Atom) -> bool:
        """Whether a weight has entries that indices pick, other ones for each token."""
        if not self._has_picked:
            return False
        if atom not in self._picked:
            self._picked[atom] = any(map(is_lookup, self._eqns_of(atom)))
        return self._picked[atom]

    def _is_mixed_table(self, eqn: Eqn, i: int, other: Fact) -> bool:
        """Whether a router mixes rows that each token picks from several tables.

        Without a router, activations are contracted with a matrix for each index.
        """
        is_row = [len(x) for x in sides_of(eqn, i)] == [1, 1]  # tables, and columns
        if not (is_row and other.is_deep and self._is_picked(eqn.inputs()[i])):
            return False
        return bool(self._routers.note_mixers(other))

    def _carries_and_branches(self, eqn: Eqn) -> None:
        """Notes a parameter that a loop starts with, or that a branch returns."""
        fact_of, first = self._facts.of, eqn.inside[0]
        pairs = [(first.outer[i].atom, first.inputs[i]) for i in first.carried]
        if eqn.name == "cond":
            branches = (zip(x.outputs, eqn.outputs(), strict=True) for x in eqn.inside)
            pairs += itertools.chain(*branches)
        for given, taken in pairs:
            # Other trips or branches make this carry or result from activations.
            if fact_of(given).is_weight and not fact_of(taken).is_weight:
                self._use("elementwise", eqn, fact_of(given))

    def _unknown(self, eqn: Eqn, facts: list[Fact]) -> None:
        """Notes a primitive without a rule, which may do anything."""
        self._use("unknown", eqn, *facts)
        # Attention needs at least a query and a key. An operation on one array is an
        # activation function or a norm; one on an array and data is a mask or a lookup.
        # One on several weights and on data may be a whole model (`jax.export`).
        weights = sum(f.is_weight for f in facts)
        has_both = sum(f.is_deep for f in facts) > 1 or 1 < weights < len(facts)
        if has_both and eqn.kind is Kind.UNKNOWN:
            self.hidden.append(eqn)

    # Products.

    def _product(self, eqn: Eqn, inputs: list[Atom], facts: list[Fact]) -> None:
        a, b = facts[:2]
        out = self._facts.of(eqn.output())
        if out.is_weight:
            self._of_parameters(eqn, inputs)
            return
        i = self._facts.weight_of(eqn) if a.leaves or b.leaves else None
        self._use("elementwise", eqn, *(facts[j] for j in (0, 1) if j != i))
        if i is None:
            i, kernels = self._facts.modulated(eqn)
            if kernels:
                self._modulated(eqn, i, kernels, facts[1 - i])
            else:
                self._routers.note(eqn, facts)
            return
        weight, other = facts[i], facts[1 - i]
        place = inputs[i], eqn.line
        if other.is_onehot:
            # Rows of ones may be tangents, as of `jax.jacfwd`, after the kernel's use.
            is_tangent = any(map(jaxprs.is_differentiated, eqn.eqns))
            if not (is_tangent and place in self._applied):
                self._use("looked up", eqn, weight)
            return
        self._applied.add(place)
        if self._is_mixed_table(eqn, i, other):
            self._use("looked up", eqn, weight)
            return
        self._routers.keep_features(eqn, i, inputs[1 - i], other)
        self._applied_weight(eqn, i, other)

    def _modulated(
        self, eqn: Eqn, i: int, kernels: list[Modulated], other: Fact
    ) -> None:
        """Notes kernels that activations scale or mix before a product."""
        for kernel in kernels:
            leaves = {*members(self._facts.of(kernel.atom).leaves)}
            # The kernel met these activations, but not as a gain or a bias.
            self.notes = [
                note
                for note in self.notes
                if note.eqn is not kernel.eqn or note.parameter not in leaves
            ]
            for fact in self._facts.inputs(kernel.eqn) if kernel.is_mixed else ():
                self._routers.note_mixers(fact)
        self._applied_weight(eqn, i, other, kernels)

    def _applied_weight(
        self, eqn: Eqn, i: int, other: Fact, kernels: Sequence[Modulated] = ()
    ) -> None:
        """Notes a weight, and what it is applied to."""
        self._weight(eqn, i, self._experts(eqn, i, other), kernels)
        self.fed |= other.past
        if other.is_deep and other.only_kernel is not None:
            self.features.add(other.only_kernel)

    def _weight(
        self, eqn: Eqn, i: int, experts: set[int], kernels: Sequence[Modulated] = ()
    ) -> None:
        """Notes the roles of each parameter's axes in the weight of a product."""
        atom, stack, kind = eqn.inputs()[i], eqn.shared, "contracted"
        to, lead = eqn.to[i], atom.lead
        window: set[int] = set()
        if eqn.name == "conv_general_dilated":
            kernel = eqn.inputs()[1]
            _, inp, *dims = eqn.jaxpr_eqn.params["dimension_numbers"].rhs_spec
            window = {*dims} if i == 1 else set()
            if (
                eqn.jaxpr_eqn.params["feature_group_count"] > 1
                and kernel.shape[inp] == 1
            ):
                kind = "depthwise"
            stack = set()
            if i == 0:
                fact = self._facts.of(kernel)
                kind = kind if fact.has_data or fact.leaves else "elementwise"
        elif eqn.name != "dot_general" and i == 1:
            numbers = eqn.jaxpr_eqn.params["ragged_dot_dimension_numbers"]
            experts = {*experts, *numbers.rhs_group_dimensions}

        def role(d: int) -> str:
            if d in experts or to[d] in stack:
                return "stack"
            # A cotangent goes from the outputs of a kernel to its inputs.
            is_back = eqn.is_slope and d not in window
            return "input" if (to[d] is None) != is_back else "output"

        dims = [*range(len(atom.shape))]
        on_devices = any(not x.is_loop for x in atom.frame.lead)
        all_marks = dimensions(atom.rank, atom.shape, lead, on_devices)
        weights, loops = [(atom, all_marks + atom.trips())], len(atom.loops)
        if kernels:
            over, free = sides_of(eqn, i)
            dims, loops = [*over, *free], 0
            weights = [(x.atom, x.all_marks) for x in kernels]
        words = [role(d) for d in dims] + ["stack"] * loops
        for weight, all_marks in weights:
            self._note_weight(eqn, weight, all_marks, words, kind)

    def _note_weight(
        self,
        eqn: Eqn,
        weight: Atom,
        all_marks: AllMarks,
        words: Sequence[str],
        kind: str,
    ) -> None:
        """Notes the parameters of a weight; `words` are the roles of its marks."""
        is_pair = self._facts.of(weight).is_pair
        summands = self._softmaxes.scaling.of(weight, all_marks)
        if is_pair:
            # If no parameter has the dimensions summed over, as in a window that
            # diagonal parameters make, activations are not contracted with one.
            over = [
                k
                for k, (word, marks) in enumerate(zip(words, all_marks, strict=True))
                if word == "input" and is_varied(marks)
            ]
            factors = [f for summand in summands for f in summand.factors]
            if over and not any(varied(f.all_marks[k]) for f in factors for k in over):
                kind = "elementwise"
            if kind == "contracted":
                self._weights |= self._products_in(weight)
        for summand in summands:
            for f in summand.factors:
                roles = tuple(
                    dict.fromkeys(
                        (axis, word)
                        for marks, word in zip(f.all_marks, words, strict=True)
                        for axis in varied(marks)
                    )
                )
                # A factor without both an input and an output axis is a gain of the
                # weight, unless it is part of a product of parameters.
                is_alone = len(summand.factors) == 1 or is_pair
                is_weight = is_alone or {"input", "output"} <= {x for _, x in roles}
                used = kind if is_weight else "elementwise"
                event = self._facts.event(eqn)
                self.notes.append(Note(used, f.parameter, eqn, event, roles))

    def _products_in(self, atom: Atom) -> set[Eqn]:
        """Returns the products of parameters in a weight."""
        return {eqn for eqn in self._eqns_of(atom) if eqn.is_product}

    def _eqns_of(self, atom: Atom) -> list[Eqn]:
        """Returns the equations that made a weight from parameters."""

        def follow(eqn: Eqn, k: int) -> list[int]:
            return [i for i, x in enumerate(self._facts.inputs(eqn)) if x.is_weight]

        return [x.eqn for x in self._graph.walk(atom, atom.whole, follow) if x.eqn]

    def _judged(self, note: Note) -> Note:
        """Returns a note; a factor gets another kind if its product is no weight."""
        if note.kind != "factor" or note.eqn in self._weights:
            return note
        is_table = (note.eqn, note.parameter) in self._tables
        return note._replace(kind="looked up" if is_table else "elementwise")

    def _of_parameters(self, eqn: Eqn, inputs: list[Atom]) -> None:
        """Notes the factors of a product of parameters, a later product's weight."""
        for atom, to, free in zip(inputs, eqn.to, ("input?", "output?"), strict=False):
            if self._is_picked(atom):
                leaves = members(self._facts.of(atom).leaves)
                self._tables |= {(eqn, parameter) for parameter in leaves}
            for summand in self._softmaxes.scaling.of(atom, atom.each()):
                for f in summand.factors:
                    axes = [
                        (axis, to[d] is None)
                        for d, marks in enumerate(f.all_marks)
                        for axis in varied(marks)
                    ]
                    ranks = {axis for axis, is_over in axes if is_over}
                    # Without other evidence, the first has the inputs: x @ (A @ B).
                    others = {axis for axis, _ in axes} - ranks
                    roles = [(axis, "rank") for axis in sorted(ranks)]
                    roles += [(axis, free) for axis in sorted(others)]
                    self.notes.append(
                        Note("factor", f.parameter, eqn, roles=tuple(roles))
                    )

    def _experts(self, eqn: Eqn, i: int, other: Fact) -> set[int]:
        """Notes experts that made an activation; returns the weight's expert axes.

        Entries that go to different matrices are experts. The same holds for entries
        that the softmax of a router weighed, if a product then sums over them and over
        inputs. If it sums over the weighed entries alone, they are inputs, as the
        classes of an expected embedding.
        """
        if eqn.name == "conv_general_dilated" or not other.is_deep:
            return set()
        atom, to = eqn.inputs()[1 - i], list(enumerate(eqn.to[1 - i]))
        stack = {d for d, x in to if x in eqn.shared}
        gone = {d for d, x in to if x is None and atom.shape[d] > 1}
        weighed = self._routers.dims_of(atom) & gone if len(gone) > 1 else set()
        dims = {d for d in stack if atom.shape[d] > 1}
        if gone - weighed:
            dims |= weighed & gone
        if not dims:
            return set()
        for _, parameter, all_marks in self._makers.of(atom, atom.each()):
            dims_of_axis: dict[int, set[int]] = {}
            for d, marks in enumerate(all_marks):
                for axis in varied(marks):
                    dims_of_axis.setdefault(axis, set()).add(d)
            axes = [axis for axis, x in dims_of_axis.items() if x <= dims]
            self.experts |= {(parameter, axis) for axis in axes}
        pairs = {a[1 - i]: a[i] for a in eqn.contracted}
        return {pairs[d] for d in dims if d in pairs}

    def _scales(self, eqn: Eqn, inputs: list[Atom], facts: list[Fact]) -> None:
        """Notes whether outputs scale others, where both are first multiplied."""
        if len(facts) < 2:
            return
        for i in (0, 1):
            kernel, other = facts[i].only_kernel, facts[1 - i]
            if kernel is None or kernel in self.features:
                continue
            if not other.kernels or kernel == other.only_kernel:
                continue
            mine, others = (self._makers.outputs(inputs[j]) for j in (i, 1 - i))
            dims = self._in_result(eqn, i, mine.get(kernel, []))
            others.pop(kernel, None)
            theirs = [self._in_result(eqn, 1 - i, x) for x in others.values() if x]
            if dims and theirs:
                # In every kernel, heads come before their features.
                n = len(dims)
                is_scale = any(n < len(x) and {*dims} == {*x[:n]} for x in theirs)
                (self.scales if is_scale else self.features).add(kernel)

    def _in_result(self, eqn: Eqn, i: int, dims: list[int]) -> list[int]:
        if eqn.kind is Kind.CONTRACTION:
            return [x for d in dims if (x := eqn.to[i][d]) is not None]
        skipped = len(eqn.output().shape) - len(eqn.inputs()[i].shape)
        return [d + skipped for d in dims]

    def _cut(self, eqn: Eqn, atom: Atom, fact: Fact) -> None:
        """Notes slices of one entry along a parameter's axis, perhaps a matrix's.

        `gate, up = jnp.einsum("btd,cdf->cbtf", x, w)` has two matrices in w.
        """
        if not (fact.is_deep and (starts := _one_entry(eqn))):
            return
        for _, parameter, all_marks in self._makers.of(atom, atom.numbered(starts)):
            shape = self._graph.top.inputs[parameter].shape
            for (d, entries), marks in zip(starts.items(), all_marks, strict=True):
                for axis in axes if len(axes := varied(marks)) == 1 else ():
                    if marks.shape[axis] == atom.shape[d] == shape[axis]:
                        self.cuts[parameter, axis] |= union(1 << x for x in entries)


def _one_entry(eqn: Eqn) -> dict[int, list[int]]:
    """Returns the single entries that an equation takes, by their dimension."""
    atom, entries = eqn.inputs()[0], {}
    for k in range(len(eqn.jaxpr_eqn.outvars)):
        # Its rule shows where the entries of a result were taken from.
        (_, move), *_ = moves(eqn, k)
        taken = move(*eqn.output(k).whole)
        for d, n in enumerate(atom.shape):
            line = marks_along(taken, atom.lead + d)
            if n > 1 and len(line) == n and np.count_nonzero(line) == 1:
                entries.setdefault(d, []).append(int(line.argmax()))
    return entries
