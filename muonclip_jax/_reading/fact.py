"""The facts about one variable, as a value of a few bits; `facts.py` finds them."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Fact(NamedTuple):
    """The facts about one variable; a set is an integer with one bit per member.

    Facts of combined values are joined by `or`; `is_onehot` and `is_counter` are
    cleared.

    An event is an equation in which parameters meet activations. It identifies a use of
    the parameters, which may be used again elsewhere.
    """

    leaves: int = 0  # parameters
    trained: int = 0  # parameters that receive a gradient through this variable
    unstopped: int = 0  # the same, as if comparisons and indices had gradients
    # An activation that depends on parameters. A weight stays a weight if only data was
    # combined with it: a mask, a scale, noise or an average among the arguments.
    is_deep: bool = False
    has_data: bool = False
    # Broadcast along new dimensions, as learned tokens are, so not a weight. The same
    # after data was added (positions), or after an index picked rows.
    is_spread: bool = False
    is_shifted: bool = False
    is_pair: bool = False  # a product of parameters
    events: int = 0  # events since the current trip of the innermost loop began
    past: int = 0  # events since the start of the function
    # Products with parameters that no later product with a parameter followed.
    writers: int = 0
    # The kernels whose outputs these are, possibly after elementwise functions; all
    # bits after a product of two activations.
    kernels: int = 0
    # Products of two values that depend on parameters, of which this is a function
    # entry by entry. `weights` are the products whose exponentials are in it, `sums`
    # those whose exponentials were summed, `normalized` those whose exponentials were
    # divided by their sum, and `mixed` those whose exponentials were multiplied with a
    # parameter. `pairs` are products over which no sum was taken yet.
    products: int = 0
    weights: int = 0
    sums: int = 0
    normalized: int = 0
    mixed: int = 0
    pairs: int = 0
    # `is_onehot`: a comparison with 0, 1, 2, ... `is_counter`: these numbers.
    is_onehot: bool = False
    is_counter: bool = False
    # Made of parameters by the backward pass of a derivative. Outside of that pass it
    # counts as data, as forces do, and the gradient of an inner step.
    is_slope: bool = False

    @property
    def only_kernel(self) -> int | None:
        """The kernel that made it; `None` if several did, or none."""
        is_one = self.kernels > 0 and self.kernels.bit_count() == 1
        return self.kernels.bit_length() - 1 if is_one else None

    @property
    def unnormalized(self) -> int:
        """Products whose exponentials were not yet divided by their sum."""
        return self.weights & ~self.normalized

    @property
    def lone_exponentials(self) -> int:
        """`unnormalized`, but 0 if products without an exponential are in it, too."""
        return 0 if self.products & ~self.weights else self.unnormalized

    @property
    def is_weight(self) -> bool:
        """Whether no activation that depends on parameters is in it, but parameters."""
        return self.leaves != 0 and not self.is_deep

    @property
    def is_token(self) -> bool:
        """Whether this is a parameter that is used as an activation."""
        return self.is_weight and (self.is_spread or self.is_shifted)


DATA = Fact(has_data=True)


def seen(fact: Fact) -> Fact:
    """Returns a fact as it is outside of backward passes."""
    return DATA if fact.is_slope else fact


def union(bits: Iterable[int]) -> int:
    """Returns the bits that are set in any number."""
    return functools.reduce(operator.or_, bits, 0)


def members(bits: int) -> list[int]:
    """Returns the numbers of the bits that are set."""
    # At once: a model of 10,000 leaves has as many bits, and each step of a loop over
    # them would make a new number of that length.
    octets = np.frombuffer(bits.to_bytes(bits.bit_length() // 8 + 1, "little"), "u1")
    return np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()


_OF_PRODUCTS = ["products", "weights", "sums", "normalized", "mixed", "pairs"]
# Logits that made a mask, as an indexer's do, are not the logits that it masks.
NO_LOGITS = dict.fromkeys(_OF_PRODUCTS, 0)


def with_logits_of(operand: Fact, fact: Fact) -> Fact:
    """Returns a fact with the products of one operand alone."""
    return fact._replace(**{name: getattr(operand, name) for name in _OF_PRODUCTS})


def joined(facts: Sequence[Fact]) -> Fact:
    """Returns the fact of several values that are combined."""
    fields = functools.reduce(lambda x, y: map(operator.or_, x, y), facts or [Fact()])
    return Fact._make(fields)._replace(is_onehot=False, is_counter=False)
