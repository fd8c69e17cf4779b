"""Sizes that stand in for the symbolic dimensions of `jax.export` while reading.

The reading works on integers. It reads a jaxpr with symbolic dimensions as a `Twin`,
which has the same equations at the same places and a size for each symbol. The recorder
runs the original. A few of the facts that it needs may be sizes themselves, such as the
place where a sink follows the keys. Two twins, with other sizes each, show which
expression of the symbols such a number is.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax._src.core import jaxprs_in_params  # public from JAX 0.9 on
from jax.extend.core import Literal, Var

from . import jaxprs


#: A size for each symbol, by its name.
Sizes = Mapping[str, int]

# The largest size of a symbol; how many of its sizes are tried, with how many to choose
# from; and how many combinations of the sizes of all symbols. The first
# combination is nearly always good.
_LARGEST, _TRIED, _CHOICE, _COMBINATIONS = 1 << 14, 256, 32, 1 << 12


class Twin(NamedTuple):
    """A jaxpr with sizes in the place of symbols."""

    body: jaxprs.Inner
    sizes: Sizes
    dims: Sequence[Any]  # all symbolic dimensions of the original's arrays


def is_symbolic(dim: Any) -> bool:
    return hasattr(dim, "dimension_as_value")


def symbols_in(x: Any) -> list[str]:
    """Returns the symbolic dimensions of an array, as they are written."""
    return [str(n) for n in getattr(x, "shape", ()) if is_symbolic(n)]


def twins_of(body: jaxprs.Inner) -> tuple[Twin, ...]:
    """Returns two twins of a jaxpr; none if all its dimensions are integers.

    **Raises:** `ValueError` if no sizes were found that satisfy all constraints.
    """
    if not any(symbols_in(x.aval) for x in (*body.jaxpr.invars, *body.jaxpr.constvars)):
        return ()
    all_dims = [*dict.fromkeys(_dims_in(body.jaxpr, set()))]
    dims = [dim for dim in all_dims if is_symbolic(dim)]
    choice = _SizeChoice(dims, {dim for dim in all_dims if not is_symbolic(dim)})
    first = choice.sizes()
    return tuple(
        Twin(body._replace(jaxpr=_Sized(sizes).value(body.jaxpr)), sizes, dims)
        for sizes in (first, choice.sizes(first))
    )


def size_of(dim: Any, sizes: Sizes) -> int:
    """Returns the size of a dimension."""
    return int(dim._evaluate(sizes)) if is_symbolic(dim) else dim


def written(twins: Sequence[Twin], numbers: Iterable[int]) -> Any:
    """Returns the dimension that has the given size in each twin, or `None`."""
    first, *others = numbers = tuple(numbers)
    if all(n == first for n in others):
        return first
    for dim in twins[0].dims:
        if numbers == tuple(size_of(dim, twin.sizes) for twin in twins):
            return dim
    return None


class _SizeChoice:
    """Chooses sizes for the symbols of some dimensions.

    An axis of 1 is broadcast, and one as long as a parameter's may be taken for it.
    Each dimension therefore gets a size of its own, as far as that is possible.
    """

    def __init__(self, dims: Sequence[Any], fixed: set[Any]):
        self._dims, self._fixed = dims, fixed
        scopes = dict.fromkeys(dim.scope for dim in dims)
        rules = (rule for scope in scopes for rule in scope._explicit_constraints)
        self._rules = [rule for rule in rules if is_symbolic(rule.diff)]
        all_dims = (*dims, *(rule.diff for rule in self._rules))
        self._names = sorted({name for dim in all_dims for name in dim._get_vars()})
        self._choices = {name: self._of_one(name) for name in self._names}

    def sizes(self, before: Sizes | None = None) -> Sizes:
        """Returns sizes that satisfy all constraints, and other ones than `before`."""
        choices = [
            [n for n in self._choices[name] if not before or n != before[name]]
            or self._choices[name]
            for name in self._names
        ]
        combinations = itertools.islice(itertools.product(*choices), _COMBINATIONS)
        named = (dict(zip(self._names, sizes, strict=True)) for sizes in combinations)
        best: tuple[int, Sizes] | None = None
        for sizes in filter(self._is_allowed, named):
            count = self._misleading(sizes, before)
            if best is None or count < best[0]:
                best = count, sizes
            if not count:
                break
        if best is None:
            raise ValueError(
                f"no sizes of {', '.join(self._names)} below {_LARGEST:,} were found "
                f"for {', '.join(rule.debug_str for rule in self._rules)}"
            )
        return best[1]

    def _of_one(self, name: str) -> list[int]:
        """Returns sizes of one symbol, the ones that mislead least first."""
        rated: list[tuple[int, int]] = []
        good = 0
        for n in range(2, _LARGEST):
            if self._is_allowed({name: n}):
                count = self._misleading({name: n})
                rated.append((count, n))
                good += not count
            if good == _CHOICE or len(rated) == _TRIED:
                break
        return [n for _, n in sorted(rated)[:_CHOICE]] or [1]

    def _is_allowed(self, sizes: Sizes) -> bool:
        """Whether no constraint on these symbols alone is violated."""
        for rule in self._rules:
            if rule.diff._get_vars() <= sizes.keys():
                difference = size_of(rule.diff, sizes)
                if difference < 0 or (rule.cmp.name == "EQ" and difference):
                    return False
        return True

    def _misleading(self, sizes: Sizes, before: Sizes | None = None) -> int:
        """Returns how many dimensions of these symbols alone have a bad size."""
        dims = [dim for dim in self._dims if dim._get_vars() <= sizes.keys()]
        values = [size_of(dim, sizes) for dim in dims]
        good = {n for n in values if n > 1 and n not in self._fixed}
        earlier = [size_of(dim, before) for dim in dims] if before else []
        return len(dims) - len(good) + sum(map(operator.eq, values, earlier))


def _dims_in(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    """Iterates over the dimensions of all arrays in a jaxpr."""
    outvars = (x for eqn in jaxpr.eqns for x in eqn.outvars)
    for x in (*jaxpr.invars, *jaxpr.constvars, *outvars):
        yield from getattr(x.aval, "shape", ())
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _dims_in(inner, seen)


class _Sized:
    """Puts sizes in the place of symbols, in arrays and in parameters of equations.

    Objects and functions among the parameters stay: the reading asks them for no size.
    """

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, x: Any) -> Any:
        """Returns a dimension, a jaxpr, or a parameter with some of these."""
        if is_symbolic(x):
            return size_of(x, self._sizes)
        if isinstance(x, tuple | list):
            parts = [self.value(part) for part in x]
            if all(map(operator.is_, parts, x)):
                return x
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if hasattr(getattr(x, "jaxpr", x), "eqns"):
            # Several equations may run one jaxpr. The key keeps it alive, so that no
            # other one gets its id.
            if id(x) not in self._done:
                is_closed = hasattr(x, "consts")
                sized = self._jaxpr(x.jaxpr if is_closed else x)
                self._done[id(x)] = x, x.replace(jaxpr=sized) if is_closed else sized
            return self._done[id(x)][1]
        return x

    def _jaxpr(self, jaxpr: Any) -> Any:
        variables: dict[Any, Any] = {}

        def atom(x: Any) -> Any:
            if isinstance(x, Literal):
                return x
            if x not in variables:
                aval = self._aval(x.aval)
                variables[x] = x if aval is x.aval else Var(aval)
            return variables[x]

        def eqn(x: Any) -> Any:
            params = {name: self.value(value) for name, value in x.params.items()}
            ins, outs = ([*map(atom, xs)] for xs in (x.invars, x.outvars))
            if x.primitive.name == "reshape":
                _check_reshape(x, ins[0].aval.shape, outs[0].aval.shape)
            return x.replace(invars=ins, outvars=outs, params=params)

        return jaxpr.replace(
            constvars=[*map(atom, jaxpr.constvars)],
            invars=[*map(atom, jaxpr.invars)],
            eqns=[*map(eqn, jaxpr.eqns)],
            outvars=[*map(atom, jaxpr.outvars)],
        )

    def _aval(self, aval: Any) -> Any:
        if hasattr(aval, "inner_aval"):  # of a reference
            inner = self._aval(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        shape = getattr(aval, "shape", ())
        sized = self.value(shape)
        return aval if sized is shape else aval.update(shape=sized)


def _check_reshape(eqn: Any, old: Sequence[int], new: Sequence[int]) -> None:
    """Raises for a reshape that suits one size only, which JAX notices in a run."""
    if math.prod(old) != math.prod(new):
        shapes = (
            f"({', '.join(map(str, x.aval.shape))})"
            for x in (eqn.invars[0], eqn.outvars[0])
        )
        raise ValueError(
            f"the reshape at {jaxprs.line((eqn,))} of {' to '.join(shapes)} is not "
            "possible for every size: compute the new shape from the old one, or give "
            'jax.export.symbolic_shape a constraint, such as "mod(length, 128) == 0"'
        )
