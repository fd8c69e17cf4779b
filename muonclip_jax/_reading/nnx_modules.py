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
    - `rest_of`: the other state of a module, and `update`, which gives it to one.
    """

    params: Any
    rest: Any
    merge: Callable[[Any, Any], Any]
    rest_of: Callable[[Any], Any]
    update: Callable[[Any, Any], None]

    def of_parts(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(module, ...)` as a function of parts that returns the new rest, too."""

        def of_parts(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
            module = self.merge(params, rest)
            out = fun(module, *args, **kwargs)
            return out, self.rest_of(module)

        return of_parts


def split_module(x: Any) -> Split | None:
    """What a module of NNX holds; `None` for anything else.

    Whoever has such a module has imported Flax, so that it need not be imported here.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(x, nnx.Module):
        return None
    graph, params, rest = nnx.split(x, nnx.Param, ...)
    return Split(
        params,
        rest,
        lambda p, r: nnx.merge(graph, p, r),
        lambda module: nnx.split(module, nnx.Param, ...)[2],
        nnx.update,
    )
