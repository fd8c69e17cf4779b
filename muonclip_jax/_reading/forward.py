"""Computes a value for each variable of a graph, in one pass over its frames."""

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from .graph import Atom, Eqn, Frame


T = TypeVar("T")


class Forward(abc.ABC, Generic[T]):
    """A forward pass; subclasses define `primitive` and `either`."""

    def __init__(self, nothing: T):
        self._nothing = nothing
        self._of: dict[Atom, T] = {}

    @abc.abstractmethod
    def primitive(self, eqn: Eqn) -> T:
        """Returns the value of an equation's results."""

    @abc.abstractmethod
    def either(self, values: Sequence[T]) -> T:
        """Returns the value of a variable that may have any of these values."""

    def result(self, eqn: Eqn, atom: Atom, value: T) -> T:
        """Returns the value of one result, from that of its equation."""
        return value

    def begun(self, value: T) -> T:
        """Returns the value of a loop's carry at the beginning of a trip."""
        return value

    def more(self, eqn: Eqn) -> T:
        """Returns the value of a kernel's outputs that its plain function lacks."""
        return self.either(self.inputs(eqn))

    def of(self, atom: Atom) -> T:
        return self.value(atom)

    def value(self, atom: Atom) -> T:
        """Returns the value of a variable, as its own frame sees it."""
        return self._of.get(atom, self._nothing)

    def inputs(self, eqn: Eqn) -> list[T]:
        """Returns the values of an equation's operands."""
        return [self._of.get(atom, self._nothing) for atom in eqn.inputs()]

    def run(self, frame: Frame, inputs: Sequence[T]) -> list[T]:
        self._of |= zip(frame.inputs, inputs, strict=True)
        for eqn in frame.live:
            atoms = eqn.outputs()
            inside = (
                self.called(eqn) if eqn.inside else [self.primitive(eqn)] * len(atoms)
            )
            for atom, value in zip(atoms, inside, strict=True):
                self._of[atom] = self.result(eqn, atom, value)
        return [self.value(atom) for atom in frame.outputs]

    def called(self, eqn: Eqn) -> list[T]:
        """Returns the values of the results of an equation with inner jaxprs."""
        runs: Any = [self._inside(inner) for inner in eqn.inside]
        outs = [self.either(values) for values in zip(*runs, strict=True)]
        n = len(eqn.jaxpr_eqn.outvars)
        return [*outs[:n], *[self.more(eqn)] * (n - len(outs))]

    def _inside(self, inner: Frame) -> list[T]:
        """Returns the values of a frame's results, for a loop after all trips.

        The iteration ends because values only grow.
        """
        values = [self.value(x.atom) for x in inner.outer]
        while True:
            begin = list(values)
            for i in inner.carried:
                begin[i] = self.begun(values[i])
            outs, after = self.run(inner, begin), list(values)
            for k, i in enumerate(inner.carried):
                after[i] = outs[k] = self.either([values[i], outs[k]])
            if after == values:
                return outs
            values = after
