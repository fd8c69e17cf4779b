"""Follows the arrays of a jaxpr, and notes what is done with parameters."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from . import jaxprs, kernels
from .jaxprs import Address, Axes, Inner, shape_of
from .pieces import Shape, whole
from .values import (
    ACTIVATION,
    added,
    constant,
    Factor,
    mixed,
    parameter,
    product_of,
    summed,
    Terms,
    union,
    Value,
)


class Note(NamedTuple):
    """One thing that was done, to be judged when all is known.

    With a parameter, `number` by its place among the leaves: `"contracted"`,
    `"depthwise"`, `"looked up"`, `"elementwise"` (added to or multiplied with
    activations), `"factor"` (of a product of two parameters) or `"unknown"`. Besides:

    - `"cut"`: of what parameter `number` made along its axis, entries `events` (a bit
        each) went their own way.
    - `"expert"`: entries of parameter `number` along its axis are matrices of experts.
    - `"scales"`, `"features"`: what the outputs of kernel `number` are; see `rules`.
    - `"fed"`: the activation that a weight was applied to came from `events`.
    - `"chosen"`: what `events` made decides where activations go.
    - `"weighed"`: a softmax of logits `number` weighs activations: it is attention.
    - `"hidden"`: activations went through an operation that cannot be read.
    """

    kind: str
    number: Any = -1
    events: int = 0
    # Axes of the parameter, each as an "input", "output", "stack", "rank" (summed over
    # between two parameters), "expert", "cut".
    roles: tuple[tuple[int, str], ...] = ()
    eqns: jaxprs.Eqns = ()  # see `Walk.eqns`


class Logits(NamedTuple):
    """A product of two activations, which attention may have for logits."""

    eqns: jaxprs.Eqns
    shape: Shape
    # The dimensions that it sums over, and what both sides are in the dimensions
    # `(*shape, *summed)`.
    summed: Shape
    sides: tuple[Terms, Terms]
    # The dimensions of the result that only one side has.
    free: tuple[frozenset[int], frozenset[int]]


class Softmax(NamedTuple):
    """Where a softmax takes the maximum, or the sum, of what is linear in logits."""

    address: Address
    terms: Terms
    shape: Shape
    axes: tuple[int, ...]

    def factors(self, *kinds: str) -> list[Factor]:
        return [f for t in self.terms for f in t if f.kind in kinds]


Rule = Callable[["Walk", Any, list[Value]], "Value | list[Value]"]

#: What each primitive does with values, by its name.
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a function as what follows values through some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# What is done with an index before it is one, counted from the front.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "lt": operator.lt,
    "ge": operator.ge,
    "select_n": lambda which, *cases: cases[int(which)],
}


class Walk:
    """One pass through a jaxpr, and what it has noted so far."""

    def __init__(self, shapes: Sequence[Shape]):
        self.shapes = shapes  # of the parameters
        # The equation at work, by its address and itself.
        self.at: Address = ()
        self.eqns: jaxprs.Eqns = ()
        self.kernels: set[int] = set()
        self.notes: list[Note] = []
        self.softmaxes: list[Softmax] = []
        self.logits: dict[Address, Logits] = {}
        self.past_of: dict[int, int] = {}
        self.caps: dict[Address, Address] = {}  # where products were softcapped
        self.recorded: dict[Address, Address] = {}  # where statistics are named
        self.gates = 0  # products over whose outputs a softmax was taken
        # The negative dimensions that trips of loops and devices of a mesh are.
        self.dims: dict[Address | Axes, int] = {}
        self._events: dict[Address, int] = {}

    def event(self, *before: int) -> int:
        """The bit of this equation, the same whenever a loop comes by again.

        Or, by a negative number, of what came before it: a kernel that is applied to a
        parameter in the same equation is the later of the two.
        """
        return self._events.setdefault((*self.at, *before), 1 << len(self._events))

    def dim(self, of: Address | Axes) -> int:
        return self.dims.setdefault(of, -1 - len(self.dims))

    @property
    def devices(self) -> dict[int, Axes]:
        return {dim: of for of, dim in self.dims.items() if isinstance(of, Axes)}

    def note(self, kind: str, number: Any = -1, **more: Any) -> None:
        self.notes.append(Note(kind, number, eqns=self.eqns, **more))

    def noted(self, *kinds: str) -> list[Note]:
        return [note for note in self.notes if note.kind in kinds]

    def events_of(self, kind: str) -> int:
        """The events of all notes of a kind, a bit each."""
        return union(note.events for note in self.noted(kind))

    def numbers_of(self, *kinds: str) -> set[Any]:
        return {note.number for note in self.noted(*kinds)}

    def use(self, kind: str, value: Value) -> None:
        """Notes the same use of all parameters that a value is made of.

        None of a product of parameters, whose own use is to be its factors.
        """
        numbers = {f.number for f in value.factors()}
        for index in sorted(numbers) if not value.is_pair else ():
            self.note(kind, index)

    def as_activation(self, value: Value) -> Value:
        """A parameter that meets activations here otherwise than as their weight."""
        if not value.is_parameter:
            return value
        self.use("elementwise", value)
        return self.met(value, self.event(-1))

    def together(self, values: Sequence[Value]) -> list[Value]:
        """Operands of one equation: activations, if one is."""
        if any(v.is_activation for v in values):
            return [self.as_activation(v) for v in values]
        return list(values)

    def met(self, value: Value, event: int = 0) -> Value:
        """The activation that a parameter becomes in this equation."""
        event = event or self.event()
        self.past_of.setdefault(event, event)
        terms = summed(
            tuple(f if f.event else f._replace(event=event) for f in term)
            for term in value.terms
        )
        past, recent = value.past | event, value.recent | event
        return Value(ACTIVATION, terms, value.shape, past, recent)

    def run(self, body: Inner, args: Sequence[Value], branch: int = 0) -> list[Value]:
        """The outputs of a jaxpr; its equations are inside the one that is at work."""
        outer, eqns = self.at, self.eqns

        def shaped(values: Sequence[Value], atoms: Sequence[Any]) -> list[Value]:
            pairs = zip(values, map(shape_of, atoms), strict=True)
            return [v if v.shape == n else v._replace(shape=n) for v, n in pairs]

        def step(i: int, eqn: Any, values: list[Value]) -> list[Value]:
            self.at, self.eqns = (*outer, branch, i), (*eqns, eqn)
            outs = self._step(eqn, values)
            outs = [outs] * len(eqn.outvars) if isinstance(outs, Value) else outs
            return shaped(outs, eqn.outvars)

        # Dead code would use parameters that the function does not depend on.
        outs = body.run(shaped(args, body.jaxpr.invars), step, _known, is_live=True)
        self.at, self.eqns = outer, eqns
        return outs

    def _step(self, eqn: Any, values: list[Value]) -> Value | list[Value]:
        name = eqn.primitive.name
        numbers = [v.number for v in values]
        if name in _ON_NUMBERS and None not in numbers:
            return constant(_ON_NUMBERS[name](*numbers))
        if name in RULES:
            return RULES[name](self, eqn, values)
        if (body := jaxprs.called(eqn)) is not None:
            return self.run(body, values[len(values) - len(body.jaxpr.invars) :])
        if kernel := kernels.kernel_of(eqn):
            return self._attend(kernel, eqn, values)
        return self.unknown(values)

    def either(self, values: Sequence[Value]) -> Value:
        """One of several values, no matter which."""
        first, *others = values
        # A loop's own counter is one more in every trip, and so another value.
        if first.trip is not None or all(v == first for v in others):
            return first
        values = self.together(values)
        return mixed(values, added(values))

    def _attend(self, kernel: kernels.Kernel, eqn: Any, values: list[Value]) -> Any:
        """A fused kernel: read as the plain attention that it stands for."""
        avals = [eqn.invars[i].aval for i in kernel.operands]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        body = jaxprs.trace(kernel.plain, *shapes)
        (out,) = self.run(body, [values[i] for i in kernel.operands])
        # The first product of the plain one has the kernel's logits, and its line.
        first = min(at for at in self.logits if at[: len(self.at)] == self.at)
        self.logits[first] = self.logits[first]._replace(eqns=self.eqns)
        rest = mixed(values)
        outs = [out, *[rest] * (len(eqn.outvars) - 1)]
        if kernel.maxima is not None:
            shape = shape_of(eqn.outvars[kernel.maxima])
            maxima = Factor("maxima", first, 0, whole(shape))
            outs[kernel.maxima] = rest._replace(terms=((maxima,),))
        return outs

    def unknown(self, values: list[Value]) -> Value:
        """What a primitive without a rule makes: it may have done anything."""
        for value in values:
            if value.is_parameter:
                self.use("unknown", value)
        # Attention needs query and key at least; an operation on one array is an
        # activation or a norm, and that on an array and data a mask or a lookup.
        if sum(v.is_deep for v in values) > 1:
            self.note("hidden")
        values = [self.met(v) if v.is_parameter else v for v in values]
        return mixed(values)


def walked(
    body: Inner, shapes: Sequence[Shape], is_parameter: Sequence[bool]
) -> tuple[Walk, list[Value]]:
    """Walks a jaxpr whose first inputs are parameters; the walk and its outputs.

    A parameter that is looked up or added to activations is no weight where it meets
    another parameter: learned queries are made keys of by a kernel. The first pass
    shows which these are.
    """
    tokens: set[int] = set()
    while True:
        walk = Walk(shapes)
        args = [
            parameter(i, shape, i in tokens) if is_parameter[i] else Value()
            for i, shape in enumerate(shapes)
        ]
        args += [Value(ACTIVATION)] * (len(body.jaxpr.invars) - len(args))
        outs = walk.run(body, args)
        as_tokens = walk.numbers_of("elementwise", "looked up")
        found = tokens | as_tokens & walk.numbers_of("factor")
        if found == tokens:
            return walk, outs
        tokens = found


def _known(value: Any) -> Value:
    """A literal or an array that the function closes over."""
    if getattr(value, "ndim", 0):
        return Value(shape=tuple(value.shape))
    try:
        return constant(value.item() if hasattr(value, "item") else value)
    except Exception:  # a key, or what another trace has
        return Value()


# The primitives that run a jaxpr, but not once, and what devices exchange.


def _repeated(
    walk: Walk, body: Inner, consts: Any, carry: Any, slices: Any = ()
) -> tuple[list[Value], list[Value]]:
    """What a loop hands on in the end, and what its last trip returns besides.

    A trip begins with what the one before may have handed on, until nothing new is
    among it. Only then is it known what each trip does: earlier notes go.
    """
    # It ends: what a value can be only grows, and there are finitely many events,
    # pieces and terms. Two or three trips are usual.
    trips, carry = walk.dim(walk.at), list(carry)
    marks = len(walk.notes), len(walk.softmaxes)

    def begun(i: int, value: Value) -> Value:
        """What a trip begins with: as if made in one event, before the trip.

        The same equation made it, in the trip before, by other parameters: what comes
        of that equation now has nothing to do with it.
        """
        if not value.is_activation:
            return value
        event = walk.event(-1 - i)
        terms = summed(
            product_of(f._replace(event=event) for f in term if f.is_linear)
            for term in value.terms
        )
        return value._replace(terms=terms, recent=event)

    while True:
        begin = [begun(i, v) for i, v in enumerate(carry)]
        outs = walk.run(body, [*consts, *begin, *slices])
        after = []
        for old, new in zip(carry, outs, strict=False):
            if new.is_activation:  # by parameters of some trip
                new = new.moved(range(len(new.shape)), new.shape, {trips: None})
            after.append(walk.either([old, new]))
        if after == carry:
            pairs = zip(carry, outs, strict=False)
            handed = [c._replace(recent=c.recent | o.recent) for c, o in pairs]
            return handed, outs[len(carry) :]
        carry = after
        del walk.notes[marks[0] :], walk.softmaxes[marks[1] :]


@rule("scan")
def scan(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Each trip has a part of what is stacked: of parameters, a layer's."""
    body, consts, carry = loop = jaxprs.scanned(eqn)
    trips, given = walk.dim(walk.at), list(values)
    for i, (value, atom) in enumerate(zip(values, body.jaxpr.invars, strict=True)):
        shape = shape_of(atom)
        if i >= consts + carry:
            value = value.moved([trips, *range(len(shape))], shape)
            # `scan(f, x, arange(n))` counts as `fori_loop` does, from zero.
            counts = value.is_counter and not shape
            given[i] = value._replace(trip=trips if counts else None)
        elif i >= consts and value.number == 0 and not shape:
            given[i] = Value(trip=trips) if jaxprs.counts_trips(loop, i) else value
    # Parameters that the loop closes over are shared by all trips, and so no stack.
    end = consts + carry
    parts = given[:consts], given[consts:end], given[end:]
    handed, stacked = _repeated(walk, body, *parts)
    for value, atom in zip(stacked, eqn.outvars[carry:], strict=True):
        shape = shape_of(atom)
        handed.append(value.moved(range(1, len(shape)), shape, {trips: 0}))
    return handed


@rule("while")
def while_(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    condition, first, (body, consts, _) = jaxprs.repeated(eqn)
    end = first + consts
    handed, _ = _repeated(walk, body, values[first:end], values[end:])
    # The condition may use parameters, too, such as those of a halting unit.
    walk.run(jaxprs.inner(condition), [*values[:first], *handed], branch=1)
    return handed


@rule("cond")
def cond(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    index, *args = values
    outs = [walk.run(branch, args, i) for i, branch in enumerate(jaxprs.branches(eqn))]
    either = (walk.either(out) for out in zip(*outs, strict=True))
    # Whatever picks the branch has made the result, too: a router, of experts.
    past = {ACTIVATION: index.past}
    return [v._replace(past=v.past | past.get(v.kind, 0)) for v in either]


@rule("psum psum_invariant psum2 pmax pmin all_to_all psum_scatter reduce_scatter")
def collective(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """What devices exchange; where it is afterwards is followed for sums alone."""
    names, outs = {*jaxprs.axes_of(eqn)}, []
    over = {dim: None for dim, axes in walk.devices.items() if names & {*axes.names}}
    for value, atom in zip(values, eqn.outvars, strict=True):
        old, new = value.shape, shape_of(atom)
        is_sum = "sum" in eqn.primitive.name and old == new
        to = range(len(old)) if is_sum else [None] * len(old)
        outs.append(value.moved(to, new, over))
    return outs


@rule("all_gather all_gather_invariant")
def all_gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    axes = Axes(jaxprs.axes_of(eqn), eqn.params["axis_size"])
    value = _blocks_apart(walk, values[0], eqn.params["all_gather_dimension"], axes)
    return value.reshaped(shape_of(eqn.outvars[0])) if eqn.params["tiled"] else value


@rule("shard_map")
def shard_map(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Every device has its block, as every trip of a loop has its part.

    A dimension that mesh axes cut into m blocks of n is reshaped to (m, n), the first
    of which is the device's; afterwards, blocks are put together again.
    """
    body = jaxprs.called(eqn)
    assert body is not None
    inside = []
    for i, value in enumerate(values):
        for dim, axes in jaxprs.mesh_cuts(eqn, "in", i):
            before, (n, *after) = value.shape[:dim], value.shape[dim:]
            value = value.reshaped((*before, axes.size, n // axes.size, *after))
            to = [j - (j > dim) for j in range(len(value.shape))]
            to[dim] = walk.dim(axes)
            value = value.moved(to, (*before, n // axes.size, *after))
        inside.append(value)
    outs = walk.run(body, inside)
    for i, value in enumerate(outs):
        for dim, axes in jaxprs.mesh_cuts(eqn, "out", i):
            before, (n, *after) = value.shape[:dim], value.shape[dim:]
            value = _blocks_apart(walk, value, dim, axes)
            value = value.reshaped((*before, axes.size * n, *after))
        # Along axes that `out_specs` does not name all devices have the same.
        same = dict.fromkeys(walk.devices)
        outs[i] = value.moved(range(len(value.shape)), value.shape, same)
    return outs


def _blocks_apart(walk: Walk, value: Value, dim: int, axes: Axes) -> Value:
    """The blocks of all devices along a dimension before one of theirs."""
    apart = (*value.shape[:dim], axes.size, *value.shape[dim:])
    to = [j + (j >= dim) for j in range(len(value.shape))]
    return value.moved(to, apart, {walk.dim(axes): dim})
