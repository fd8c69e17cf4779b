"""Follows the arrays of a jaxpr, and notes what is done with parameters."""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from . import jaxprs, kernels
from .jaxprs import Axes, Inner
from .pieces import Shape, whole
from .values import (
    CONSTANT,
    constant,
    DATA,
    Factor,
    Kind,
    mixed,
    parameter,
    product_of,
    Source,
    summed,
    Terms,
    UNSCALED,
    Value,
)


#: Where an equation is: its place in the jaxpr, and so on for those inside of it.
Address = tuple[int, ...]


class Note(NamedTuple):
    """One thing that was done, to be judged when all is known.

    With a parameter, `number` by its place among the leaves: `"contracted"`,
    `"depthwise"`, `"looked up"`, `"elementwise"` (added to or multiplied with
    activations), `"factor"` (of a product of two parameters) or `"unknown"`;
    `"... as a product"` if done with such a product. Besides:

    - `"cut"`: of what parameter `number` made along its axis, entries `events` (a bit
        each) went their own way.
    - `"expert"`: entries of parameter `number` along its axis are matrices of experts.
    - `"fed"`: the activation that a weight was applied to came from `events`.
    - `"chosen"`: what `events` made decides where activations go.
    - `"weighed"`: a softmax of logits `number` weighs activations: it is attention.
    - `"hidden"`: activations went through an operation that cannot be read.
    """

    kind: str
    number: int = -1
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


Rule = Callable[["Walk", Any, list[Value]], "Value | list[Value]"]

#: What each primitive does with values, by its name.
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
    """One pass through a jaxpr; `tokens` are parameters to see as activations."""

    def __init__(self, shapes: Sequence[Shape], tokens: frozenset[int] = frozenset()):
        self.shapes = shapes
        self.tokens = tokens
        # The equation at work, by its address and itself.
        self.at: Address = ()
        self.eqns: jaxprs.Eqns = ()
        self.kernels: set[int] = set()
        self.notes: list[Note] = []
        self.softmaxes: list[Softmax] = []
        self.logits: list[Logits] = []
        self.past_of: dict[int, int] = {}
        self.caps: dict[int, Address] = {}  # where products were softcapped
        self.recorded: dict[int, Address] = {}  # where kernels' statistics are named
        self.gates = 0  # products over whose outputs a softmax was taken
        # The negative dimensions that trips of loops and devices of a mesh are.
        self.dims: dict[Address | Axes, int] = {}
        self._events: dict[Address, int] = {}
        self._logits_at: dict[Address, int] = {}

    @property
    def event(self) -> int:
        """The bit of this equation, the same whenever a loop comes by again."""
        return self._event_at(self.at)

    def _event_at(self, address: Address) -> int:
        return self._events.setdefault(address, 1 << len(self._events))

    def dim(self, of: Address | Axes) -> int:
        return self.dims.setdefault(of, -1 - len(self.dims))

    @property
    def devices(self) -> dict[int, Axes]:
        return {dim: of for of, dim in self.dims.items() if isinstance(of, Axes)}

    def note(self, kind: str, number: int = -1, **more: Any) -> None:
        self.notes.append(Note(kind, number, eqns=self.eqns, **more))

    def use(self, kind: str, value: Value) -> None:
        """Notes the same use of all parameters that a value is made of."""
        kind = f"{kind} as a product" if value.is_pair else kind
        for index in sorted({f.source.number for f in value.factors()}):
            self.note(kind, index)

    def as_activation(self, value: Value) -> Value:
        """A parameter that meets activations here otherwise than as their weight."""
        if value.kind != Kind.PARAMETER:
            return value
        self.use("elementwise", value)
        # Before the equation: a kernel that uses it there is the later of the two.
        return self.met(value, self._event_at((*self.at, -1)))

    def met(self, value: Value, event: int | None = None) -> Value:
        """The activation that a parameter becomes in this equation."""
        event = event or self.event
        self.past_of.setdefault(event, event)
        terms = summed(
            tuple(f if f.event else f._replace(event=event) for f in term)
            for term in value.terms
        )
        past, recent = value.past | event, value.recent | event
        return Value(Kind.ACTIVATION, terms, past, recent)

    def product(self, logits: Logits) -> int:
        """The number of a product of two activations."""
        if self.at not in self._logits_at:
            self._logits_at[self.at] = len(self.logits)
            self.logits.append(logits)
        index = self._logits_at[self.at]
        self.logits[index] = logits
        return index

    def run(self, body: Inner, args: Sequence[Value], branch: int = 0) -> list[Value]:
        """The outputs of a jaxpr; its equations are inside the one that is at work."""
        jaxpr, outer, eqns = body.jaxpr, self.at, self.eqns
        env = dict(zip(jaxpr.invars, args, strict=True))
        env |= zip(jaxpr.constvars, map(_known, body.consts), strict=True)

        def read(atom: Any) -> Value:
            return _known(atom.val) if jaxprs.is_literal(atom) else env[atom]

        # Dead code would use parameters that the function does not depend on.
        for i, eqn in jaxprs.live(jaxpr):
            self.at, self.eqns = (*outer, branch, i), (*eqns, eqn)
            outs = self._step(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        self.at, self.eqns = outer, eqns
        return [read(v) for v in jaxpr.outvars]

    def repeat(
        self, body: Inner, loop: int, consts: Any, carry: Any, slices: Any = ()
    ) -> tuple[list[Value], list[Value]]:
        """What a loop hands on in the end, and what its last trip returns besides.

        A trip begins with what the one before may have handed on, until nothing new is
        among it. Only then is it known what each trip does: earlier notes go.
        """
        # It ends: what a value can be only grows, and there are finitely many events,
        # pieces and terms. Two or three trips are usual.
        marks = len(self.notes), len(self.softmaxes)
        carry = list(carry)
        while True:
            begin = [
                _handed_on(v, self._event_at((*self.at, -1 - i)))
                for i, v in enumerate(carry)
            ]
            outs = self.run(body, [*consts, *begin, *slices])
            after = [
                self.either([c, _outside(o, loop, jaxprs.shape_of(x))])
                for c, o, x in zip(carry, outs, body.jaxpr.outvars, strict=False)
            ]
            if after == carry:
                pairs = zip(carry, outs, strict=False)
                handed = [
                    dataclasses.replace(c, recent=c.recent | o.recent) for c, o in pairs
                ]
                return handed, outs[len(carry) :]
            carry = after
            del self.notes[marks[0] :], self.softmaxes[marks[1] :]

    def either(self, values: Sequence[Value]) -> Value:
        """One of several values, no matter which."""
        first, *others = values
        if all(v == first for v in others):
            return first
        # A loop's own counter is one more in every trip, and so another value.
        if first.trip is not None:
            return first
        if any(v.kind == Kind.ACTIVATION for v in values):
            values = [self.as_activation(v) for v in values]
        return mixed(
            values,
            summed(term for v in values for term in v.terms),
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
        elif kernel := kernels.kernel_of(eqn):
            outs = self._attend(kernel, eqn, values)
        else:
            outs = self.unknown(values)
        return [outs] * len(eqn.outvars) if isinstance(outs, Value) else outs

    def _attend(self, kernel: kernels.Kernel, eqn: Any, values: list[Value]) -> Any:
        """A fused kernel: read as the plain attention that it stands for."""
        shapes = [
            jax.ShapeDtypeStruct(eqn.invars[i].aval.shape, eqn.invars[i].aval.dtype)
            for i in kernel.operands
        ]
        body = jaxprs.trace(kernel.plain, *shapes)
        (out,) = self.run(body, [values[i] for i in kernel.operands])
        # The first product of the plain one has the kernel's logits, and its line.
        index = min(
            n for at, n in self._logits_at.items() if at[: len(self.at)] == self.at
        )
        self.logits[index] = self.logits[index]._replace(eqns=self.eqns)
        rest = mixed(values, UNSCALED)
        outs = [out, *[rest] * (len(eqn.outvars) - 1)]
        if kernel.maxima is not None:
            shape = jaxprs.shape_of(eqn.outvars[kernel.maxima])
            maxima = Factor(Source("maxima", index), 0, whole(shape))
            outs[kernel.maxima] = dataclasses.replace(rest, terms=((maxima,),))
        return outs

    def unknown(self, values: list[Value]) -> Value:
        """What a primitive without a rule makes: it may have done anything."""
        for value in values:
            if value.kind == Kind.PARAMETER:
                self.use("unknown", value)
        # Attention needs query and key at least; an operation on one array is an
        # activation or a norm, and that on an array and data a mask or a lookup.
        if sum(v.is_deep for v in values) > 1:
            self.note("hidden")
        values = [self.met(v) if v.kind == Kind.PARAMETER else v for v in values]
        return mixed(values, UNSCALED)


def walked(
    body: Inner, shapes: Sequence[Shape], is_parameter: Sequence[bool]
) -> tuple[Walk, list[Value]]:
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
        data = len(body.jaxpr.invars) - len(args)
        outs = walk.run(body, [*args, *[DATA] * data])
        as_tokens = _noted(walk.notes, ("elementwise", "looked up"))
        found = tokens | (as_tokens & _noted(walk.notes, ("factor",)))
        if found == tokens:
            return walk, outs
        tokens = found


def _noted(notes: Iterable[Note], kinds: Sequence[str]) -> set[int]:
    return {note.number for note in notes if note.kind in kinds}


def _known(value: Any) -> Value:
    """A literal or an array that the function closes over."""
    if getattr(value, "ndim", 0):
        return CONSTANT
    try:
        return constant(value.item() if hasattr(value, "item") else value)
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
