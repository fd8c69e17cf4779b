"""Follows the arrays of a jaxpr, and notes what is done with parameters."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import jaxprs
from .pieces import Shape
from .values import (
    CONSTANT,
    constant,
    DATA,
    Kind,
    mixed,
    parameter,
    product_of,
    summed,
    Terms,
    UNSCALED,
    Value,
)


#: Where an equation is: its place in the jaxpr, and so on for those inside of it.
Address = tuple[int, ...]


class Use(NamedTuple):
    """One thing that is done with a parameter.

    **Arguments:**

    - `kind`: `"contracted"`, `"depthwise"`, `"looked up"`, `"elementwise"` (added to or
        multiplied with activations), `"factor"` (of a product of two parameters) or
        `"unknown"`; `"... as a product"` if it is done with such a product.
    - `parameter`: its place among the leaves.
    - `roles`: axes, each as `"input"`, `"output"`, `"stack"`, `"rank"` (summed over
        between two parameters) or `"entry"` (by which it is looked up).
    - `event`: the product with an activation, if it is one.
    - `eqn`: the equation.
    """

    kind: str
    parameter: int
    roles: tuple[tuple[int, str], ...]
    event: int
    eqn: Any


class Fed(NamedTuple):
    """A product with a parameter, and the events that its activation comes from."""

    event: int
    past: int


class Chosen(NamedTuple):
    """Products that decide where activations go."""

    events: int


class Weighted(NamedTuple):
    """The softmax of these logits weighs other activations: it is attention."""

    logits: int


class Stacked(NamedTuple):
    """An axis of a parameter's outputs whose entries go to matrices of their own."""

    parameter: int
    axis: int


class Hidden(NamedTuple):
    """Activations go through an operation whose inside cannot be read."""

    eqn: Any


class Logits(NamedTuple):
    """A product of two activations, the dimensions it has and those it sums over.

    Both sides are what activations are, in the dimensions `(*shape, *summed)`.
    """

    address: Address
    eqn: Any
    sides: tuple[Terms, Terms]
    shape: Shape
    summed: Shape
    free: tuple[frozenset[int], frozenset[int]]


class Softmax(NamedTuple):
    """Where a softmax takes the maximum, or the sum, of what is linear in logits."""

    address: Address
    eqn: Any
    terms: Terms
    shape: Shape
    axes: tuple[int, ...]


Rule = Callable[["Walk", Any, list[Value]], "Value | list[Value]"]

#: What to do with each primitive, by its name.
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a function as what follows values through some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# What is done with an index before it is one: counted from the front, and clipped.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "lt": operator.lt,
    "ge": operator.ge,
    "max": max,
    "min": min,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, x, high: min(max(x, low), high),
}


class Walk:
    """One pass through a jaxpr.

    **Arguments:**

    - `shapes`: of the parameters.
    - `tokens`: parameters to take for activations from the start.
    """

    def __init__(self, shapes: Sequence[Shape], tokens: frozenset[int] = frozenset()):
        self.shapes = shapes
        self.tokens = tokens
        self.notes: list[Any] = []
        self.logits: list[Logits] = []
        self.past_of: dict[int, int] = {}
        self.caps: dict[int, Address] = {}  # where products were softcapped
        self.gates = 0  # products over whose outputs a softmax was taken
        self._events: dict[Address, int] = {}
        self._logits_at: dict[Address, int] = {}
        self.loops: dict[Address, int] = {}
        self.devices: dict[int, jaxprs.Axes] = {}
        self._at: Address = ()

    # What rules call.

    @property
    def address(self) -> Address:
        return self._at

    @property
    def event(self) -> int:
        """The bit of this equation, the same whenever a loop comes by again."""
        return self._event_at(self._at)

    def _event_at(self, address: Address) -> int:
        return self._events.setdefault(address, 1 << len(self._events))

    def loop(self) -> int:
        """The negative dimension that trips of this loop are."""
        return self.loops.setdefault(self._at, self._new_dimension)

    def device(self, axes: jaxprs.Axes) -> int:
        """The negative dimension that devices along axes of a mesh are."""
        for dim, known in self.devices.items():
            if known == axes:
                return dim
        dim = self._new_dimension
        self.devices[dim] = axes
        return dim

    @property
    def _new_dimension(self) -> int:
        return -1 - len(self.loops) - len(self.devices)

    def note(self, note: Any) -> None:
        self.notes.append(note)

    def use(self, kind: str, value: Value, eqn: Any) -> None:
        """Notes the same use of all parameters that a value is made of."""
        kind = f"{kind} as a product" if value.is_pair else kind
        for index in sorted({f.source.number for f in value.factors()}):
            self.note(Use(kind, index, (), 0, eqn))

    def as_activation(self, value: Value, eqn: Any, kind: str = "elementwise") -> Value:
        """A parameter that meets activations here otherwise than as their weight."""
        if value.kind != Kind.PARAMETER:
            return value
        self.use(kind, value, eqn)
        # Before the equation: a kernel that takes it there is the later of the two.
        return self.met(value, self._event_at((*self._at, -1)))

    def met(self, value: Value, event: int | None = None) -> Value:
        """The activation that a parameter becomes in this equation."""
        event = event or self.event
        self.past_of.setdefault(event, event)
        terms = tuple(
            tuple(f if f.event else f._replace(event=event) for f in term)
            for term in value.terms
        )
        return Value(
            Kind.ACTIVATION, summed(terms), value.past | event, value.recent | event
        )

    def product_of(self, logits: Logits) -> int:
        """The number of a product of two activations."""
        if self._at not in self._logits_at:
            self._logits_at[self._at] = len(self.logits)
            self.logits.append(logits)
        index = self._logits_at[self._at]
        self.logits[index] = logits
        return index

    def run(self, body: jaxprs.Inner, args: Sequence[Value], branch: int = 0):
        """The outputs of a jaxpr; its equations are inside the one that is at work."""
        jaxpr, outer = body.jaxpr, self._at
        env = dict(zip(jaxpr.invars, args, strict=True))
        env |= {
            v: _constant(c) for v, c in zip(jaxpr.constvars, body.consts, strict=True)
        }

        def read(atom: Any) -> Value:
            return _constant(atom.val) if jaxprs.is_literal(atom) else env[atom]

        for i, eqn in jaxprs.live(jaxpr):
            self._at = (*outer, branch, i)
            outs = self._step(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        self._at = outer
        return [read(v) for v in jaxpr.outvars]

    def repeat(
        self, body: jaxprs.Inner, loop: int, consts, carry, taken=()
    ) -> tuple[list[Value], list[Value]]:
        """What a loop hands on in the end, and what its last trip returns besides.

        A trip begins with what the one before may have handed on, until nothing new is
        among it. What was noted then, and only then, is so.
        """
        mark = len(self.notes)
        carry = list(carry)
        while True:
            begin = [
                _handed_on(v, self._event_at((*self._at, -1 - i)))
                for i, v in enumerate(carry)
            ]
            outs = self.run(body, [*consts, *begin, *taken])
            after = [
                self.either([c, _outside(o, loop, jaxprs.shape_of(x))], None)
                for c, o, x in zip(carry, outs, body.jaxpr.outvars, strict=False)
            ]
            if after == carry:
                return [
                    dataclasses.replace(c, recent=c.recent | o.recent)
                    for c, o in zip(carry, outs, strict=False)
                ], outs[len(carry) :]
            carry = after
            del self.notes[mark:]

    def either(self, values: Sequence[Value], eqn: Any) -> Value:
        """One of several values, no matter which."""
        first, *others = values
        if all(v == first for v in others):
            return first
        if any(v.kind == Kind.ACTIVATION for v in values):
            values = [self.as_activation(v, eqn) for v in values]
        return dataclasses.replace(
            mixed(values, summed(term for v in values for term in v.terms)),
            is_onehot=all(v.is_onehot for v in values),
            is_counter=all(v.is_counter for v in values),
        )

    def _step(self, eqn: Any, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        numbers = [v.number for v in values]
        if name in _ON_NUMBERS and None not in numbers:
            return [constant(_ON_NUMBERS[name](*numbers))]
        if name in RULES:
            outs = RULES[name](self, eqn, values)
        elif (body := jaxprs.called(eqn)) is not None:
            outs = self.run(body, values[len(values) - len(body.jaxpr.invars) :])
        else:
            outs = self.unknown(eqn, values)
        if isinstance(outs, Value):
            outs = [outs] * len(eqn.outvars)
        return outs

    def unknown(self, eqn: Any, values: list[Value]) -> Value:
        """What a primitive without a rule makes: it may have done anything."""
        parameters = [v for v in values if v.kind == Kind.PARAMETER]
        for value in parameters:
            self.use("unknown", value, eqn)
        if sum(v.is_deep for v in values) > 1:
            self.note(Hidden(eqn))
        values = [self.met(v) if v.kind == Kind.PARAMETER else v for v in values]
        return mixed(values, UNSCALED)


def walked(fun_jaxpr: jaxprs.Inner, shapes: Sequence[Shape], is_parameter):
    """Walks a jaxpr whose first inputs are parameters; the walk and its outputs.

    A parameter that is looked up or added to activations is no weight where it meets
    another parameter: learned queries are made keys of by a kernel. The first pass
    shows which these are.
    """
    tokens: frozenset[int] = frozenset()
    while True:
        walk = Walk(shapes, tokens)
        args = [
            parameter(i, shape, Kind.ACTIVATION if i in tokens else Kind.PARAMETER)
            if is_parameter[i]
            else CONSTANT
            for i, shape in enumerate(shapes)
        ]
        data = len(fun_jaxpr.jaxpr.invars) - len(args)
        outs = walk.run(fun_jaxpr, [*args, *[DATA] * data])
        kinds: dict[int, set[str]] = {}
        for note in walk.notes:
            if isinstance(note, Use):
                kinds.setdefault(note.parameter, set()).add(note.kind)
        found = tokens | {
            i
            for i, said in kinds.items()
            if "factor" in said and said & {"elementwise", "looked up"}
        }
        if found == tokens:
            return walk, outs
        tokens = found


def _constant(value: Any) -> Value:
    """A literal or an array that the function closes over."""
    if getattr(value, "ndim", 0) or not hasattr(value, "item"):
        is_number = isinstance(value, bool | int | float)
        return constant(value) if is_number else CONSTANT
    try:
        return constant(value.item())
    except Exception:  # a key, or what another trace has
        return CONSTANT


def _outside(value: Value, loop: int, shape: Shape) -> Value:
    """What a loop hands on, made in some trip by parameters of that trip."""
    if value.kind != Kind.ACTIVATION:
        return value
    return value.moved(range(len(shape)), shape, {loop: None})


def _handed_on(value: Value, event: int) -> Value:
    """What a trip of a loop begins with: as if made in one event, before the trip.

    The same equation made it, in the trip before, by other parameters: what comes of
    that equation now has nothing to do with it.
    """
    if value.kind != Kind.ACTIVATION:
        return value
    terms = summed(
        product_of(f._replace(event=event) for f in term if f.is_linear)
        for term in value.terms
    )
    return dataclasses.replace(value, terms=terms, recent=event)
