"""Errors of calls with arguments that a function does not have, or has elsewhere."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar


P = ParamSpec("P")
R = TypeVar("R")


def is_reading(x: Any) -> bool:
    """Checks for what `read_model` returns, by fields that cost nothing to ask for."""
    return all(hasattr(x, name) for name in ("dimension_numbers", "labels", "unknown"))


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a public function name the likely mistake where Python would not.

    It names an argument that is spelled much like an unknown one, of this function or
    else of others of the package, and says where a reading belongs.

    **Raises:** `TypeError` for an unknown argument; `ValueError` for a reading given by
    position.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in parameters]
        if unknown and not takes_any:
            name = function.__name__
            raise TypeError(
                f"{name}() has no argument '{unknown[0]}'"
                f"{_likely(name, unknown[0], [*parameters])}"
            )
        # Params that are a reading get an error of their own, where they are read.
        first = next(iter(parameters))
        for i, value in enumerate(args):
            if is_reading(value) and (i or first != "params"):
                raise ValueError(
                    f"{function.__name__}() got a reading by position: pass it as "
                    "model=reading"
                )
        return function(*args, **kwargs)

    return call


def _likely(function: str, unknown: str, arguments: list[str]) -> str:
    if close := difflib.get_close_matches(unknown, arguments, 1):
        return f"; did you mean '{close[0]}'?"
    every = {name: [*of] for name, of in _public() if name != function}
    if takers := [name for name, names in every.items() if unknown in names]:
        return f"; it is one of {', '.join(takers)}"
    others = {x: name for name, names in every.items() for x in names}
    if close := difflib.get_close_matches(unknown, others, 1, 0.75):
        return f"; did you mean '{close[0]}' of {others[close[0]]}?"
    return f"; it has {', '.join(arguments)}"


def _public() -> Iterator[tuple[str, Any]]:
    """Iterates over the public functions and classes, with their parameters."""
    package = sys.modules[__name__.partition(".")[0]]
    for name, value in vars(package).items():
        if name in package.__all__ and callable(value):
            yield name, inspect.signature(value).parameters
