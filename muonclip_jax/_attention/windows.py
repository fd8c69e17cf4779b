"""How far a query sees: whole numbers that compiled code is made for."""

from typing import Any

import numpy as np

from .._options import flag, whole_number


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
    after = 0 if flag("is_causal", is_causal) else after
    return _side(before), _side(after)


def _side(keys: Any) -> int | None:
    if keys is None:
        return None
    return min(max(whole_number("local_window_size", keys), -_ALL), _ALL)
