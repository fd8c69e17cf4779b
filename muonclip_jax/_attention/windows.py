"""How far a query sees, and other whole numbers that compiled code is made for."""

import operator
from typing import Any

import numpy as np


#: How many keys a query sees before and after itself; `None` for all.
Window = tuple[int | None, int | None]

# More keys than there are, yet far from the end of 32-bit integers.
_ALL = 1 << 30


def make_window(is_causal: bool, local: Any) -> Window:
    """From one number for both sides, or a pair; any integers will do."""
    pair = tuple(local) if np.iterable(local) else (local, local)
    if len(pair) != 2:
        raise ValueError(f"local_window_size is one number or a pair, not {local}")
    before, after = pair
    after = 0 if is_causal else after
    return _side(before), _side(after)


def _side(keys: Any) -> int | None:
    if keys is None:
        return None
    return min(max(_whole_number("local_window_size", keys), -_ALL), _ALL)


def positive_number(name: str, x: Any) -> int:
    number = _whole_number(name, x)
    if number < 1:
        raise ValueError(f"{name} is {number}, and has to be positive")
    return number


def _whole_number(name: str, x: Any) -> int:
    try:
        return operator.index(x)
    except TypeError:
        raise ValueError(
            f"{name} takes whole numbers known to the compiler, not {x}"
        ) from None
