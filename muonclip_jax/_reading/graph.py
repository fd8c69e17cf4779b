"""A jaxpr as a graph: which equation made each variable, through loops and calls.

Every run of a jaxpr is a `Frame`: a function that is called twice has two, and the body
of a loop has one for all its trips. `Graph.origins` returns a variable's inputs, across
function calls: an equation, a parameter or a constant. The first dimensions of an
array's marks are the loops and the axes of a mesh around the frame.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from . import jaxprs, kernels
from .back import shared, sides
from .jaxprs import Address, shape_of
from .marks import (
    full,
    is_empty,
    is_varied,
    key_of,
    Marks,
    numbered,
    only_where,
    small,
    union_along,
)
from .numbers import Lead, number_in, Numbers
from .primitives import Kind, kind_of, Moves, moves, TABLE
from .values import Value


#: Kinds whose results may differ where their operands are copies.
_NO_COPIES = (
    *(Kind.CONTRACTION, Kind.TOTAL, Kind.EXTREME, Kind.MIXED),
    *(Kind.FOLDED, Kind.LOG_TOTAL),
)

#: Marks of one array, which go back together.
AllMarks = tuple[Marks, ...]


class Atom:
    """A variable or a literal in its frame; each has one object."""

    def __init__(self, frame: "Frame", var: Any):
        self.frame, self.var = frame, var
        self.shape = shape_of(var)
        self.lead = len(frame.lead)
        self.rank = self.lead + len(self.shape)  # the dimensions of its marks

    @property
    def value(self) -> Value:
        """Its entries in each trip, if they are known."""
        return self.frame.numbers.of(self)

    @property
    def number(self) -> int | float | None:
        """The value of all its entries in all trips, if it is known."""
        return number_in(self.value)

    def numbered(self, axes: Iterable[int]) -> AllMarks:
        """Returns marks for each given dimension, with a different one along it."""
        return tuple(numbered(self.rank, self.lead + d, self.shape[d]) for d in axes)

    def marked(self, d: int, line: np.ndarray) -> Marks:
        """Returns marks with the given marks along one dimension."""
        return line.reshape([-1 if a == self.lead + d else 1 for a in range(self.rank)])

    @property
    def whole(self) -> AllMarks:
        """The same mark for all entries."""
        return (np.ones([1] * self.rank, np.int64),)

    def each(self) -> AllMarks:
        return self.numbered(range(len(self.shape)))

    @property
    def loops(self) -> list[Lead]:
        """The loops around it that have several trips."""
        return [x for x in self.frame.lead if x.is_loop and x.size > 1]

    def trips(self) -> AllMarks:
        """Returns marks along the lead for each of `loops`: one mark for each trip."""
        return tuple(numbered(self.rank, x.axis, x.size) for x in self.loops)

    @property
    def is_zero(self) -> bool:
        return isinstance(self.var, Literal) and not self.shape and self.var.val == 0


class Outer(NamedTuple):
    """The variable outside a frame that is passed as one of the frame's inputs."""

    atom: Atom
    # "same" in all trips, a "carry" from trip to trip, or a "slice" for each trip.
    how: str = "same"


class Eqn:
    """An equation in its frame; each has one object."""

    def __init__(self, frame: "Frame", i: int):
        self.frame, self.i, self.jaxpr_eqn = frame, i, frame.jaxpr.eqns[i]
        self.name: str = self.jaxpr_eqn.primitive.name
        self.kind = kind_of(self.name)
        self._inputs = [frame.atom(x) for x in self.jaxpr_eqn.invars]
        self._outputs = [frame.atom(x) for x in self.jaxpr_eqn.outvars]
        self.known_moves: dict[int, Moves] = {}  # see `moves`
        # Whether this is of the backward pass of a derivative, as forces are. There
        # kernels are applied to cotangents, from their outputs to their inputs. The
        # part of the network that `jax.checkpoint` computes again is not in it.
        self.is_slope = jaxprs.is_transposed(self.jaxpr_eqn)
        if frame.caller is not None and frame.caller.is_slope:
            self.is_slope |= not jaxprs.is_recomputed(self.jaxpr_eqn)
        # The frames of its jaxprs: one for each branch, or one for a call or loop.
        self.inside = list(_frames_in(self))

    def inputs(self) -> list[Atom]:
        return self._inputs

    def outputs(self) -> list[Atom]:
        return self._outputs

    def output(self, k: int = 0) -> Atom:
        return self._outputs[k]

    @property
    def address(self) -> Address:
        return (*self.frame.address, self.i)

    @property
    def eqns(self) -> jaxprs.Eqns:
        """The calls around the equation, outermost first, then the equation itself.

        An equation in the example of a kernel has the line of the kernel's call, since
        the example itself was written elsewhere.
        """
        caller = self.frame.caller
        outer = caller.eqns if caller else ()
        return outer if self.frame.is_rule else (*outer, self.jaxpr_eqn)

    @functools.cached_property
    def line(self) -> str:
        return jaxprs.line(self.eqns)

    @functools.cached_property
    def to(self) -> list[list[int | None]]:
        """The dimension of the product that each dimension of an operand becomes."""
        return sides(self.jaxpr_eqn)

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """The dimensions of the first operand along which it combines entries."""
        params, rank = self.jaxpr_eqn.params, len(self.inputs()[0].shape)
        return tuple(d % rank for d in TABLE[self.name].axes(params, rank))

    @functools.cached_property
    def shared(self) -> set[int]:
        """The dimensions of a product that both of its operands have."""
        return shared(self.to)

    @functools.cached_property
    def is_product(self) -> bool:
        """Whether this is a product that is not entry by entry.

        An entry-by-entry product sums over nothing, and one operand has only shared
        dimensions: some norms apply their gain by `einsum("...k,k->...k")`.
        """
        if self.name == "dot_general":
            return not any(map(self.shared.issuperset, self.to))
        return self.kind is Kind.CONTRACTION

    @property
    def contracted(self) -> list[tuple[int, int]]:
        """The pairs of dimensions of both operands that a product sums over."""
        if self.name != "dot_general":
            return []
        (a, b), _ = self.jaxpr_eqn.params["dimension_numbers"]
        return list(zip(a, b, strict=True))


class Frame:
    """One run of a jaxpr: a `"call"`, a `"loop"`, a `"mesh"` or a `"kernel"`."""

    def __init__(
        self,
        body: jaxprs.Inner,
        caller: Eqn | None = None,
        kind: str = "call",
        outer: Iterable[Outer] = (),
        lead: Sequence[Lead] = (),
        branch: int = 0,
    ):
        self.jaxpr, self.caller, self.kind = body.jaxpr, caller, kind
        self.outer, self.lead = list(outer), tuple(lead)
        self.numbers: Numbers = caller.frame.numbers if caller else Numbers()
        self.branch = branch
        self.address: Address = (*caller.address, branch) if caller else (branch,)
        # Whether it runs the example of a kernel, or is inside one.
        self.is_rule = kind == "kernel" or bool(caller and caller.frame.is_rule)
        how = [x.how for x in self.outer]
        start = how.count("same")
        # The inputs that go from one trip to the next.
        self.carried = range(start, start + how.count("carry"))
        self.consts = dict(zip(self.jaxpr.constvars, body.consts, strict=True))
        self._atoms: dict[int, Atom] = {}
        self.inputs = [self.atom(var) for var in self.jaxpr.invars]
        self.position = {var: i for i, var in enumerate(self.jaxpr.invars)}
        self.live = [Eqn(self, i) for i in jaxprs.live(self.jaxpr)]
        self.definitions = {
            var: (eqn, k)
            for eqn in self.live
            for k, var in enumerate(eqn.jaxpr_eqn.outvars)
        }
        self.outputs = [self.atom(var) for var in self.jaxpr.outvars]

    def atom(self, var: Any) -> Atom:
        # By identity, since literals have no hash.
        if (atom := self._atoms.get(id(var))) is None:
            atom = self._atoms[id(var)] = Atom(self, var)
        return atom

    def equations(self) -> Iterator[Eqn]:
        """Iterates over all live equations; inner frames follow their caller."""
        for eqn in self.live:
            yield eqn
            for frame in eqn.inside:
                yield from frame.equations()


def _frames_in(eqn: Eqn) -> Iterator[Frame]:
    """Iterates over the frames of the jaxprs that an equation runs."""
    jaxpr_eqn, inputs, lead = eqn.jaxpr_eqn, eqn.inputs(), eqn.frame.lead
    if loop := jaxprs.loop(jaxpr_eqn):
        inputs = inputs[loop.first :]
        how = ["same"] * loop.consts + ["carry"] * loop.carry
        how += ["slice"] * (len(inputs) - len(how))
        size = _most_trips(loop) if loop.trips is None else loop.trips
        inner_lead = (*lead, Lead(len(lead), eqn.address, size))
        yield Frame(loop.body, eqn, "loop", map(Outer, inputs, how), inner_lead)
    elif eqn.name == "cond":
        for i, body in enumerate(jaxprs.branches(jaxpr_eqn)):
            yield Frame(body, eqn, "call", map(Outer, inputs[1:]), lead, i)
    elif rule := kernels.rule_of(jaxpr_eqn):
        yield Frame(rule.body(jaxpr_eqn), eqn, "kernel", map(Outer, inputs), lead)
    elif body := jaxprs.called(jaxpr_eqn):
        outer = map(Outer, inputs[len(inputs) - len(body.jaxpr.invars) :])
        if eqn.name == "shard_map":
            sizes = jaxpr_eqn.params["mesh"].shape
            axes = enumerate(jaxprs.manual_in(jaxpr_eqn), len(lead))
            inner_lead = (*lead, *(Lead(i, name, sizes[name]) for i, name in axes))
            yield Frame(body, eqn, "mesh", outer, inner_lead)
        else:
            yield Frame(body, eqn, "call", outer, lead)


def _most_trips(loop: jaxprs.Loop) -> int:
    """Returns the most trips of a `while`: the longest axis its body picks from."""
    sizes, jaxpr = [1], loop.body.jaxpr
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in ("dynamic_slice", "gather"):
            continue
        if eqn.invars[0] in jaxpr.invars[: loop.consts]:
            shape = shape_of(eqn.invars[0])
            sizes += shape[:1]
            if name == "dynamic_slice":
                cut = zip(shape, eqn.params["slice_sizes"], strict=True)
                sizes += [n for n, size in cut if size == 1]
    return max(sizes)


#: Loop carries that were already followed back, each with its marks.
Seen = frozenset[Any]


class Origin(NamedTuple):
    """The origin of a variable: an equation's result, a parameter, or data."""

    all_marks: AllMarks
    seen: Seen
    eqn: Eqn | None = None
    k: int = 0  # which result of the equation
    parameter: int | None = None
    atom: Atom | None = None  # set if no equation made it


#: A function from an origin to the operands to follow, with a value to carry to each.
Ahead = Callable[[Origin, Any], Iterable[tuple[int, Any]]]


class Graph:
    """All frames of a function whose first inputs are parameters."""

    def __init__(self, body: jaxprs.Inner, is_parameter: Sequence[bool]):
        self.top = Frame(body)
        self.parameters = {i for i, is_one in enumerate(is_parameter) if is_one}
        self._copied: dict[Atom, set[int]] = {}

    def origins(
        self, atom: Atom, all_marks: AllMarks, seen: Seen = frozenset()
    ) -> Iterator[Origin]:
        """Returns the origins of a variable, across function calls and loops."""
        frame, var = atom.frame, atom.var
        # The marks are empty: no entry of this variable contributes, so stop.
        if any(map(is_empty, all_marks)):
            return
        if isinstance(var, Literal) or var in frame.consts:
            yield Origin(all_marks, seen, atom=atom)
        elif var in frame.position:
            yield from self._outside(atom, all_marks, seen)
        else:
            eqn, k = frame.definitions[var]
            if not eqn.inside:
                yield Origin(all_marks, seen, eqn, k)
            for inner in eqn.inside:
                yield from self._inside(inner, k, all_marks, seen)

    def back(
        self, atom: Atom, all_marks: AllMarks, ahead: Ahead, carried: Any = None
    ) -> None:
        """Goes back from an array through the equations that made it.

        At each origin `ahead(origin, carried)` returns the operands to follow and what
        to carry to each. No recursion: a residual stream goes through all layers.
        """
        visited: set[Any] = set()
        pending = [(atom, all_marks, frozenset(), carried)] if all_marks else []
        while pending:
            atom, all_marks, seen, carried = pending.pop()
            for origin in self.origins(atom, all_marks, seen):
                if (eqn := origin.eqn) is None:
                    ahead(origin, carried)
                    continue
                key = eqn, origin.k, *map(key_of, origin.all_marks)
                if key in visited:
                    continue
                visited.add(key)
                followed = dict(ahead(origin, carried))
                for i, move in moves(eqn, origin.k) if followed else ():
                    if i in followed:
                        operand = eqn.inputs()[i], tuple(map(move, origin.all_marks))
                        pending.append((*operand, origin.seen, followed[i]))

    def walk(
        self,
        atom: Atom,
        all_marks: AllMarks,
        follow: Callable[[Eqn, int], Iterable[int]] | None = None,
    ) -> list[Origin]:
        """Goes back from an array and returns all origins on the way.

        `follow(eqn, k)` returns the operands to follow from an equation's `k`-th
        result; without it all are followed.
        """
        origins: list[Origin] = []

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            origins.append(origin)
            if (eqn := origin.eqn) is None:
                return []
            operands = follow(eqn, origin.k) if follow else range(len(eqn.inputs()))
            return [(i, None) for i in operands]

        self.back(atom, all_marks, ahead)
        return origins

    def copied(self, atom: Atom) -> set[int]:
        """Returns the dimensions along which an array is known to be a copy."""
        if atom in self._copied:
            return self._copied[atom]
        dims = range(len(atom.shape))
        not_copied = {d for d, n in enumerate(atom.shape) if n == 1}

        def ahead(origin: Origin, depth: int) -> list[tuple[int, int]]:
            eqn, back = origin.eqn, []
            if eqn and depth < 9 and eqn.kind not in _NO_COPIES:
                back = moves(eqn, origin.k)
            # A dimension that cannot be followed to its end does not count as a copy:
            # callers rely on copies, so these must be certain. Neither does a dimension
            # of a gather's result: each index picks other entries.
            if not back or (eqn and eqn.name == "gather"):
                not_copied.update(d for d in dims if is_varied(origin.all_marks[d]))
            return [(i, depth + 1) for i, _ in back]

        self.back(atom, atom.each(), ahead, 0)
        self._copied[atom] = {*dims} - not_copied
        return self._copied[atom]

    def made_by(self, atom: Atom) -> list[Eqn]:
        """Returns the equations that made an array: several if branches made it."""
        return [x.eqn for x in self.origins(atom, atom.whole) if x.eqn]

    def _inside(
        self, inner: Frame, k: int, all_marks: AllMarks, seen: Seen
    ) -> Iterator[Origin]:
        """Returns the origins of a call's k-th result, in the frame that it runs."""
        eqn = inner.caller
        assert eqn is not None
        if k >= len(inner.outputs):  # a result that the kernel's example does not have
            yield Origin(all_marks, seen, eqn, k)
            return
        lead, inner_marks = len(eqn.frame.lead), all_marks
        if eqn.name == "cond" and (chosen := eqn.inputs()[0].value) is not None:
            # Each branch runs in the trips that choose it.
            is_run = chosen == inner.branch
            inner_marks = tuple(
                only_where(x, is_run.reshape((*is_run.shape, *[1] * (x.ndim - lead))))
                for x in all_marks
            )
        is_carry = k < len(inner.carried)
        if is_carry:
            inner_marks = tuple(np.expand_dims(x, lead) for x in all_marks)
        elif inner.kind == "mesh":
            inner_marks = tuple(_onto_devices(x, inner, k) for x in all_marks)
        yield from self.origins(inner.outputs[k], inner_marks, seen)
        if is_carry:  # a loop without trips returns its initial carry
            start = inner.outer[inner.carried[k]].atom
            yield from self.origins(start, all_marks, seen)

    def _outside(self, atom: Atom, all_marks: AllMarks, seen: Seen) -> Iterator[Origin]:
        """Returns the origins of a frame's input, outside of the frame."""
        frame, i = atom.frame, atom.frame.position[atom.var]
        if frame.caller is None:
            is_one = i in self.parameters
            yield Origin(all_marks, seen, parameter=i if is_one else None, atom=atom)
            return
        outer, how = frame.outer[i]
        lead = outer.lead
        if frame.kind == "mesh":
            all_marks = tuple(_off_devices(x, frame, i) for x in all_marks)
        elif frame.kind == "loop" and how != "slice":
            # The trips of a slice are the first dimension of the array that it slices.
            all_marks = tuple(union_along(x, [lead]).squeeze(lead) for x in all_marks)
        if how == "carry":
            # Another trip back with the same marks brings nothing new. There are
            # finitely many marks, so this ends.
            key = atom, *map(key_of, all_marks)
            if key in seen:
                return
            result = frame.outputs[frame.carried.index(i)]
            trip_marks = tuple(np.expand_dims(x, lead) for x in all_marks)
            yield from self.origins(result, trip_marks, seen | {key})
        yield from self.origins(outer, all_marks, seen)


# Meshes: a dimension that is cut into m blocks of n becomes (m, n), with m for devices.


def _onto_devices(marks: Marks, inner: Frame, k: int) -> Marks:
    """Returns the marks of each device's block, from the marks of the whole result."""
    eqn = inner.caller.jaxpr_eqn  # type: ignore
    lead = len(inner.caller.frame.lead)  # type: ignore
    sizes = {x.name: x.size for x in inner.lead[lead:]}
    cuts = jaxprs.mesh_cuts(eqn, "out", k)
    shape, axis_of, rest = list(marks.shape[:lead]), {}, []
    for d, n in enumerate(shape_of(eqn.outvars[k])):
        size = marks.shape[lead + d]
        if d in cuts and size > 1:
            for name in cuts[d]:
                axis_of[name] = len(shape)
                shape.append(sizes[name])
            size = n // math.prod(sizes[name] for name in cuts[d])
        rest.append(len(shape))
        shape.append(size)
    for name in sizes:
        if name not in axis_of:
            axis_of[name] = len(shape)
            shape.append(1)
    order = [*range(lead), *(axis_of[name] for name in sizes), *rest]
    return small(marks.reshape(shape).transpose(order))


def _off_devices(marks: Marks, frame: Frame, i: int) -> Marks:
    """Returns the marks of a whole input, from the marks of each device's block."""
    lead = frame.outer[i].atom.lead
    devices = {x.name: x for x in frame.lead[lead:]}
    cuts = jaxprs.mesh_cuts(frame.caller.jaxpr_eqn, "in", i)  # type: ignore
    named = {name for names in cuts.values() for name in names}
    others = [x.axis for name, x in devices.items() if name not in named]
    marks = union_along(marks, others)
    order, shape = list(range(lead)), list(marks.shape[:lead])
    for d, n in enumerate(shape_of(frame.jaxpr.invars[i])):
        leads = [devices[name] for name in cuts.get(d, ())]
        axis = len(frame.lead) + d
        axes = [*(x.axis for x in leads), axis]
        if n == 1 and marks.shape[axis] == 2:  # see `dimensions`
            blocks = math.prod(x.size for x in leads)
            marks = np.take(marks, np.arange(blocks) % 2, axis)
            axes = [*(x.axis for x in leads if marks.shape[x.axis] == 1), axis]
        elif leads and any(marks.shape[a] > 1 for a in axes):
            for x in leads:
                marks = full(marks, x.axis, x.size)
            marks = full(marks, axis, n)
        order += axes
        shape.append(math.prod(marks.shape[a] for a in axes))
    order += [a for a in range(marks.ndim) if a not in order]
    return small(marks.transpose(order).reshape(shape))
