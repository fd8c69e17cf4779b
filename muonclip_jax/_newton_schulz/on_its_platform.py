"""The choice of the platform, which only the compiler knows."""

from collections.abc import Callable
from typing import Any

import jax

from .platforms import Platform
from .solver import Solver


def on_its_platform(
    function: Callable[..., Any], solver: Solver, *arguments: Any
) -> Any:
    """Calls `function(solver, *arguments)` with the solver of the platform.

    The platform a program is compiled for need not be the default backend, so it is
    known only to the compiler.
    """

    def on(platform: Platform) -> Callable[..., Any]:
        return lambda solver, *rest: function(solver.on(platform), *rest)

    return jax.lax.platform_dependent(
        solver, *arguments, cpu=on("cpu"), tpu=on("tpu"), default=on("gpu")
    )
