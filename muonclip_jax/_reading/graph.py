"""A jaxpr as a graph: which equation made each variable, through loops and calls.

Every run of a jaxpr is a `Frame`: that of a function which is called twice has two, and
the body of a loop has one for all its trips. `Graph.origins` is one step back from a
variable to the equation, parameter or constant that it is, through whatever frames are
between; a label goes along, with a dimension in its lead for every loop and every axis
of a mesh that the frame is in.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from . import jaxprs, kernels
from .jaxprs import Address, shape_of
from .labels import full, is_varied, joined, key_of, Label, marks, nothing, small
from .primitives import moves, PRODUCTS, shared, sides


#: Labels of one array, which go back together.
Labels = tuple[Label, ...]


class Lead(NamedTuple):
    """A dimension in front of labels: trips of a loop, or devices along a mesh axis."""

    axis: int  # its place in the lead
    of: Address | str  # of the loop's equation, or the name of the mesh axis
    size: int

    @property
    def is_loop(self) -> bool:
        return not isinstance(self.of, str)


class Outer(NamedTuple):
    """The variable outside of a frame that an input of it is."""

    atom: Any
    # "same" in all trips, "carry" from one to the next, or a "slice" for each.
    how: str = "same"


class Eqn(NamedTuple):
    """An equation in its frame."""

    frame: "Frame"
    i: int

    @property
    def eqn(self) -> Any:
        return self.frame.jaxpr.eqns[self.i]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def at(self) -> Address:
        return (*self.frame.at, self.i)

    @property
    def eqns(self) -> jaxprs.Eqns:
        """The equation, after those that it is inside of.

        What a kernel stands for was written elsewhere: its line is that of its call.
        """
        return self.frame.eqns if self.frame.is_rule else (*self.frame.eqns, self.eqn)

    @property
    def line(self) -> str:
        return jaxprs.line(self.eqns)

    @property
    def to(self) -> list[list[int | None]]:
        """Of a product, the dimension of it that each of its operands' becomes."""
        return sides(self.eqn)

    @property
    def shared(self) -> set[int]:
        """Of a product, the dimensions that both of its operands have."""
        return shared(self.to)

    def key(self) -> tuple[int, int]:
        return id(self.frame), self.i

    def inputs(self) -> list["Atom"]:
        return [Atom(self.frame, x) for x in self.eqn.invars]

    def output(self, k: int = 0) -> "Atom":
        return Atom(self.frame, self.eqn.outvars[k])


class Atom(NamedTuple):
    """A variable or a literal in its frame."""

    frame: "Frame"
    var: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.var)

    @property
    def lead(self) -> int:
        return len(self.frame.lead)

    @property
    def rank(self) -> int:
        """The length of its labels."""
        return self.lead + len(self.shape)

    @property
    def number(self) -> Any:
        return self.frame.number(self.var)

    def marks(self, axes: Iterable[int]) -> Labels:
        """A label for each of some dimensions, with marks along it."""
        return tuple(marks(self.rank, self.lead + d, self.shape[d]) for d in axes)

    @property
    def whole(self) -> Labels:
        """A label with the same mark for all entries."""
        return (np.ones([1] * self.rank, np.int64),)

    def each(self) -> Labels:
        return self.marks(range(len(self.shape)))

    @property
    def is_zero(self) -> bool:
        value = self.var.val if isinstance(self.var, Literal) else None
        return value is not None and np.ndim(value) == 0 and value == 0

    def key(self) -> tuple[int, int]:
        return id(self.frame), id(self.var)


class Frame:
    """One run of a jaxpr."""

    def __init__(
        self,
        body: jaxprs.Inner,
        at: Address,
        parent: "Frame | None" = None,
        eqn: Any = None,
        kind: str = "call",
        outer: Sequence[Outer] = (),
        lead: Sequence[Lead] = (),
        first: int = 0,
    ):
        self.jaxpr, self.at, self.parent, self.eqn = body.jaxpr, at, parent, eqn
        self.kind, self.outer, self.lead = kind, tuple(outer), tuple(lead)
        self.first = first  # where the carry begins among the inputs
        self.eqns: jaxprs.Eqns = (*parent.eqns, eqn) if parent else ()
        self.is_rule = kind == "kernel"  # it has what a kernel stands for
        if parent and parent.is_rule:
            self.eqns, self.is_rule = parent.eqns, True
        self.consts = dict(zip(self.jaxpr.constvars, body.consts, strict=True))
        self.live = [i for i, _ in jaxprs.live(self.jaxpr)]
        self.made: dict[Any, tuple[int, int]] = {}
        for i in self.live:
            for k, var in enumerate(self.jaxpr.eqns[i].outvars):
                self.made[var] = i, k
        self.place = {var: i for i, var in enumerate(self.jaxpr.invars)}
        self.inside: dict[int, list[Frame]] = {}
        for i in self.live:
            if frames := list(_frames_in(Eqn(self, i))):
                self.inside[i] = frames

    @property
    def carries(self) -> int:
        return sum(o.how == "carry" for o in self.outer)

    def equations(self) -> Iterator[Eqn]:
        """All equations that are live, those of inner frames after their own."""
        for i in self.live:
            yield Eqn(self, i)
            for frame in self.inside.get(i, ()):
                yield from frame.equations()

    def number(self, atom: Any) -> Any:
        """The value that all entries have: a number, trips of a loop, or `None`."""
        return _number(self, atom)


def _frames_in(at: Eqn) -> Iterator[Frame]:
    """The frames of the jaxprs that an equation runs."""
    frame, eqn, name, lead = at.frame, at.eqn, at.name, at.frame.lead
    if name == "scan":
        body, consts, carry = jaxprs.scanned(eqn)
        slices = len(eqn.invars) - consts - carry
        how = ["same"] * consts + ["carry"] * carry + ["slice"] * slices
        outer = map(Outer, eqn.invars, how)
        trips = Lead(len(lead), at.at, int(eqn.params["length"]))
        own = (*lead, trips)
        yield Frame(body, (*at.at, 0), frame, eqn, "scan", [*outer], own, consts)
    elif name == "while":
        _, first, (body, consts, carry) = jaxprs.repeated(eqn)
        how = ["same"] * consts + ["carry"] * carry
        outer = list(map(Outer, eqn.invars[first:], how))
        trips = Lead(len(lead), at.at, _most_trips(body, consts))
        own = (*lead, trips)
        yield Frame(body, (*at.at, 0), frame, eqn, "while", outer, own, consts)
    elif name == "cond":
        outer = [Outer(x) for x in eqn.invars[1:]]
        for i, body in enumerate(jaxprs.branches(eqn)):
            yield Frame(body, (*at.at, i), frame, eqn, "call", outer, lead)
    elif rule := kernels.rule_of(eqn):
        outer = [Outer(x) for x in eqn.invars]
        yield Frame(rule.body(eqn), (*at.at, 0), frame, eqn, "kernel", outer, lead)
    elif (body := jaxprs.called(eqn)) is not None:
        given = eqn.invars[len(eqn.invars) - len(body.jaxpr.invars) :]
        outer = [Outer(x) for x in given]
        if name == "shard_map":
            sizes = eqn.params["mesh"].shape
            names = enumerate(jaxprs.manual_in(eqn))
            devices = [Lead(len(lead) + j, axis, sizes[axis]) for j, axis in names]
            own = (*lead, *devices)
            yield Frame(body, (*at.at, 0), frame, eqn, "mesh", outer, own)
        else:
            yield Frame(body, (*at.at, 0), frame, eqn, "call", outer, lead)


def _most_trips(body: jaxprs.Inner, consts: int) -> int:
    """The size of what a `while` loop's body picks entries from: its trips, at most."""
    sizes = [1]
    for eqn in body.jaxpr.eqns:
        if eqn.primitive.name in ("dynamic_slice", "gather") and (
            eqn.invars[0] in body.jaxpr.invars[:consts]
        ):
            sizes += shape_of(eqn.invars[0])[:1]
            if eqn.primitive.name == "dynamic_slice":
                pairs = zip(
                    shape_of(eqn.invars[0]), eqn.params["slice_sizes"], strict=True
                )
                sizes += [n for n, size in pairs if size == 1]
    return max(sizes)


class Origin(NamedTuple):
    """The origin of a variable: an equation's result, a parameter, or else data."""

    labels: Labels
    at: Eqn | None = None
    k: int = 0  # which result of the equation
    parameter: int | None = None
    atom: Atom | None = None  # where it is neither


#: By which operands to go on from an origin, and what to carry there.
Ahead = Callable[[Origin, Any], Iterable[tuple[int, Any]]]


class Graph:
    """All frames of a function whose first inputs are parameters."""

    def __init__(self, body: jaxprs.Inner, is_parameter: Sequence[bool]):
        self.top = Frame(body, (0,))
        self.is_parameter = is_parameter
        self.shapes = [shape_of(x) for x in self.top.jaxpr.invars]

    def origins(
        self, atom: Atom, labels: Labels, seen: frozenset[Any] = frozenset()
    ) -> Iterator[tuple[Origin, frozenset[Any]]]:
        """The origin of a variable, after frames are entered and left."""
        frame, var = atom
        if any((x == nothing(x)).all() for x in labels):
            return
        if isinstance(var, Literal) or var in frame.consts:
            yield Origin(labels, atom=atom), seen
        elif var in frame.place:
            yield from self._outside(atom, labels, seen)
        else:
            i, k = frame.made[var]
            inner = frame.inside.get(i, ())
            if not inner:
                yield Origin(labels, Eqn(frame, i), k), seen
            for one in inner:
                yield from self._inside(one, k, atom, labels, seen)

    def back(
        self, atom: Atom, labels: Labels, ahead: Ahead, carried: Any = None
    ) -> None:
        """Goes back from an array through the equations that made it.

        At each origin `ahead(origin, carried)` says by which operands to go on, and
        what to carry there. No recursion: a residual stream goes through all layers.
        """
        known: set[Any] = set()
        places = [(atom, labels, frozenset(), carried)] if labels else []
        while places:
            atom, labels, seen, carried = places.pop()
            for origin, after in self.origins(atom, labels, seen):
                if (at := origin.at) is None:
                    ahead(origin, carried)
                    continue
                key = at.key(), origin.k, tuple(map(key_of, origin.labels))
                if key in known:
                    continue
                known.add(key)
                by = dict(ahead(origin, carried))
                for i, move in moves(at, origin.k) if by else ():
                    if i in by:
                        own = tuple(map(move, origin.labels))
                        places.append((at.inputs()[i], own, after, by[i]))

    def copied(self, atom: Atom) -> set[int]:
        """The dimensions along which an array is a copy, as far as its making shows."""
        dims = range(len(atom.shape))
        own = {d for d, n in enumerate(atom.shape) if n == 1}

        def ahead(origin: Origin, depth: int) -> list[tuple[int, int]]:
            at, back = origin.at, []
            if at and depth < 9 and at.name not in PRODUCTS:
                back = [] if at.name.startswith("reduce_") else moves(at, origin.k)
            if not back:
                own.update(d for d in dims if is_varied(origin.labels[d]))
            return [(i, depth + 1) for i, _ in back]

        self.back(atom, atom.each(), ahead, 0)
        return {*dims} - own

    def made_by(self, atom: Atom) -> list[Eqn]:
        """The equations that made an array: one, or several where it is of a branch."""
        return [x.at for x, _ in self.origins(atom, atom.whole) if x.at is not None]

    def _inside(self, inner: Frame, k: int, atom: Atom, labels: Labels, seen: Any):
        """The k-th result of a call, in the frame that it runs."""
        lead = atom.lead
        if k >= len(inner.jaxpr.outvars):  # what a kernel returns besides
            yield Origin(labels, Eqn(atom.frame, atom.frame.made[atom.var][0]), k), seen
            return
        is_carry = inner.kind == "while" or (inner.kind == "scan" and k < inner.carries)
        own = labels
        if is_carry:
            own = tuple(np.expand_dims(x, lead) for x in labels)
        elif inner.kind == "mesh":
            own = tuple(_onto_devices(x, inner, k) for x in labels)
        yield from self.origins(Atom(inner, inner.jaxpr.outvars[k]), own, seen)
        if is_carry:  # a loop without trips returns what it began with
            start = Atom(atom.frame, inner.outer[inner.first + k].atom)
            yield from self.origins(start, labels, seen)

    def _outside(self, atom: Atom, labels: Labels, seen: Any):
        """An input of a frame, as what it is outside."""
        frame, i = atom.frame, atom.frame.place[atom.var]
        if frame.parent is None:
            is_one = i < len(self.is_parameter) and self.is_parameter[i]
            yield (
                (Origin(labels, parameter=i) if is_one else Origin(labels, atom=atom)),
                seen,
            )
            return
        outer, lead = frame.outer[i], len(frame.parent.lead)
        if frame.kind == "mesh":
            labels = tuple(_off_devices(x, frame, i) for x in labels)
        elif frame.kind in ("scan", "while") and outer.how != "slice":
            # The trips' dimension of a slice is the first of what it is a slice of.
            labels = tuple(joined(x, [lead]).squeeze(lead) for x in labels)
        if outer.how == "carry":
            key = (*atom.key(), *map(key_of, labels))
            if key in seen:
                return
            made = frame.jaxpr.outvars[i - frame.first]
            before = tuple(np.expand_dims(x, lead) for x in labels)
            yield from self.origins(Atom(frame, made), before, seen | {key})
        yield from self.origins(Atom(frame.parent, outer.atom), labels, seen)


# Meshes: a dimension that axes cut into m blocks of n is of shape (m, n), the first of
# which is the device's.


def _onto_devices(label: Label, inner: Frame, k: int) -> Label:
    """The label of a result of `shard_map`, as of each device's block of it."""
    lead = len(inner.parent.lead)  # type: ignore
    devices = inner.lead[lead:]
    cuts = dict(jaxprs.mesh_cuts(inner.eqn, "out", k))
    view, at, rest = list(label.shape[:lead]), {}, []
    for d, n in enumerate(shape_of(inner.eqn.outvars[k])):
        own = cuts.get(d)
        size = label.shape[lead + d]
        if own and size > 1:
            for name in own.names:
                at[name] = len(view)
                view.append(next(x.size for x in devices if x.of == name))
            size = n // own.size
        rest.append(len(view))
        view.append(size)
    for device in devices:
        if device.of not in at:
            at[device.of] = len(view)
            view.append(1)
    order = [*range(lead), *(at[x.of] for x in devices), *rest]
    return small(label.reshape(view).transpose(order))


def _off_devices(label: Label, frame: Frame, i: int) -> Label:
    """The label of each device's block of an input, as of the whole of it."""
    lead = len(frame.parent.lead)  # type: ignore
    devices = {x.of: x for x in frame.lead[lead:]}
    cuts = dict(jaxprs.mesh_cuts(frame.eqn, "in", i))
    named = {name for own in cuts.values() for name in own.names}
    label = joined(label, [x.axis for of, x in devices.items() if of not in named])
    order, view = list(range(lead)), list(label.shape[:lead])
    for d, n in enumerate(shape_of(frame.jaxpr.invars[i])):
        own = (
            [devices[name] for name in cuts[d].names if name in devices]
            if d in cuts
            else []
        )
        axis = len(frame.lead) + d
        axes = [*(x.axis for x in own), axis]
        if n == 1 and label.shape[axis] == 2:  # see `dimensions`
            label = np.take(
                label, np.arange(math.prod(x.size for x in own) or 1) % 2, axis
            )
            axes = [*(x.axis for x in own if label.shape[x.axis] == 1), axis]
        elif own and any(label.shape[a] > 1 for a in axes):
            for x in own:
                label = full(label, x.axis, x.size)
            label = full(label, axis, n)
        order += axes
        view.append(int(np.prod([label.shape[a] for a in axes])))
    order += [a for a in range(label.ndim) if a not in order]
    return small(label.transpose(order).reshape(view))


# Numbers that are known when the function is traced, as many indices are.

_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / b if b else None,
    "lt": operator.lt,
    "ge": operator.ge,
    "max": max,
    "min": min,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, x, high: min(max(x, low), high),
}
_AS_IT_IS = ["convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"]


def _number(frame: Frame, atom: Any) -> int | float | Lead | None:
    if isinstance(atom, Literal) or atom in frame.consts:
        value = atom.val if isinstance(atom, Literal) else frame.consts[atom]
        try:
            value = value.item() if hasattr(value, "item") else value
        except Exception:  # an array, a key, or what another trace has
            return None
        return value if isinstance(value, int | float) else None
    if atom in frame.place:
        return _number_outside(frame, frame.place[atom])
    i, k = frame.made[atom]
    eqn, name = frame.jaxpr.eqns[i], frame.jaxpr.eqns[i].primitive.name
    if name in _AS_IT_IS:
        return _number(frame, eqn.invars[0])
    if inner := frame.inside.get(i):
        (one, *others) = inner
        if one.kind == "call" and not others:
            return _number(one, one.jaxpr.outvars[k])
        return None
    if name not in _ON_NUMBERS:
        return None
    values = [_number(frame, x) for x in eqn.invars]
    if name in ("select_n", "clamp", "max", "min"):
        # `where(i < 0, i + n, i)` is what an index becomes before it is used.
        trips = [x for x in values if isinstance(x, Lead)]
        if trips:
            return trips[0]
    if any(not isinstance(x, int | float) for x in values):
        return None
    return _ON_NUMBERS[name](*values)


def _number_outside(frame: Frame, i: int) -> int | float | Lead | None:
    if frame.parent is None:
        return None
    outer = frame.outer[i]
    if outer.how == "same":
        return _number(frame.parent, outer.atom)
    if shape_of(frame.jaxpr.invars[i]):
        return None
    trips = frame.lead[-1]
    if outer.how == "carry":
        # `fori_loop` counts from zero.
        loop = jaxprs.Loop(jaxprs.Inner(frame.jaxpr, ()), frame.first, frame.carries)
        counts = jaxprs.counts_trips(loop, i) and _number(frame.parent, outer.atom) == 0
        return trips if counts else None
    # `scan(f, x, arange(n))` does, too.
    made = frame.parent.made.get(outer.atom)
    while made is not None:
        eqn = frame.parent.jaxpr.eqns[made[0]]
        if eqn.primitive.name == "iota":
            return trips
        is_same = eqn.primitive.name in _AS_IT_IS
        made = frame.parent.made.get(eqn.invars[0]) if is_same else None
    value = (
        frame.parent.consts.get(outer.atom)
        if not isinstance(outer.atom, Literal)
        else None
    )
    if value is not None and np.array_equal(np.asarray(value), np.arange(trips.size)):
        return trips
    return None
