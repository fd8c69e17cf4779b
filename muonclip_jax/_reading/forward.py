"""Forward over all frames of a graph, once: a value for each variable."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Literal

from .graph import Atom, Eqn, Frame


Value = TypeVar("Value")


class Forward(Generic[Value]):
    """Subclasses say what a primitive makes, and what one of several values is."""

    def __init__(self, nothing: Value):
        self._nothing = nothing
        self._of: dict[Atom, Value] = {}

    def primitive(self, at: Eqn) -> Value:
        """The value of an equation's results."""
        raise NotImplementedError

    def either(self, values: Sequence[Value]) -> Value:
        """One of several, no matter which."""
        raise NotImplementedError

    def result(self, at: Eqn, atom: Atom, value: Value) -> Value:
        """The value of one result."""
        return value

    def begun(self, value: Value) -> Value:
        """What a loop carries, as its trip begins."""
        return value

    def more(self, at: Eqn) -> Value:
        """The value of what a kernel returns besides what its example does."""
        return self.either(self.inputs(at))

    def of(self, atom: Atom) -> Value:
        is_literal = isinstance(atom.var, Literal)
        return self._nothing if is_literal else self._of.get(atom, self._nothing)

    def inputs(self, at: Eqn) -> list[Value]:
        """The values of what an equation is of."""
        return [self.of(atom) for atom in at.inputs()]

    def run(self, frame: Frame, inputs: Sequence[Value]) -> list[Value]:
        self._of |= zip(frame.inputs, inputs, strict=True)
        for at in frame.live:
            atoms = at.outputs()
            inside = self.called(at) if at.inside else [self.primitive(at)] * len(atoms)
            for atom, value in zip(atoms, inside, strict=True):
                self._of[atom] = self.result(at, atom, value)
        return [self.of(atom) for atom in frame.outputs]

    def called(self, at: Eqn) -> list[Value]:
        """The values of the results of an equation with jaxprs in it."""
        runs: Any = [self._inside(inner) for inner in at.inside]
        outs = [self.either(values) for values in zip(*runs, strict=True)]
        n = len(at.eqn.outvars)
        return [*outs[:n], *[self.more(at)] * (n - len(outs))]

    def _inside(self, inner: Frame) -> list[Value]:
        """The results of a run, those of all trips if it is a loop's.

        That ends: what a value can be made of only grows.
        """
        own = [self.of(x.atom) for x in inner.outer]
        while True:
            begin = list(own)
            for i in inner.carried:
                begin[i] = self.begun(own[i])
            outs, after = self.run(inner, begin), list(own)
            for k, i in enumerate(inner.carried):
                after[i] = outs[k] = self.either([own[i], outs[k]])
            if after == own:
                return outs
            own = after
