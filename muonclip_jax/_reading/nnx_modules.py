"""A module of Flax NNX as a function of its parameters."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Split(NamedTuple):
    """A module, taken apart.

    **Arguments:**

    - `params`: the state of `nnx.Param`.
    - `rest`: all other state: statistics, counters, keys.
    - `merge`: the module again, of both.
    """

    params: Any
    rest: Any
    merge: Callable[[Any, Any], Any]


def split_module(x: Any) -> Split | None:
    """What a module of NNX holds; `None` for anything else.

    Whoever has such a module has imported Flax, so that it need not be imported here.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(x, nnx.Module):
        return None
    graph, params, rest = nnx.split(x, nnx.Param, ...)
    return Split(params, rest, lambda p, r: nnx.merge(graph, p, r))
