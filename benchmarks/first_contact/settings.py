"""Times that say how to set the package up: sizes of a batch, dtypes, forms."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from gpt2 import gradients, stacked
from internals import platform_named, platform_with

import muonclip_jax as mc

from .rounding import platform
from .rows import Timed
from .times import directions, that_fits, Times


def by_setting(times: Times) -> Iterator[Timed]:
    """The stacked stage by constants of the platform and by settings of a user's."""
    stage = that_fits(times.sizes.stage)
    shapes = stage.shapes(stacked)
    grads = gradients(shapes)
    usual = platform_named(platform()).batch_entries
    constants: dict[str, dict[str, float]] = {"ours": {}}
    for share in times.sizes.batches:
        entries = int(share * usual)
        if entries >= math.prod(stage.shape):
            name = f"batches of {power_of_2(entries)}, not {power_of_2(usual)}"
            constants[name] = {"batch_entries": entries}
    rows = times.sizes.half_rows
    constants[f"halves of {rows} rows or more"] = {"block_rows": rows}

    def update(**settings: Any) -> tuple[Any, ...]:
        tx = directions(shapes, orthogonalizer=mc.NewtonSchulz(**settings))["ours"]
        return tx.update, grads, tx.init(grads)

    default = update()
    sides = {k: with_constant(*default, **given) for k, given in constants.items()}
    for settings in ({"dtype": "bfloat16"}, {"method": "standard"}):
        [value] = settings.values()
        sides[value] = with_constant(*update(**settings))
    yield from times.against(f"{stage.matrices} x {stage.shape}, stacked,", sides)


def power_of_2(entries: float) -> str:
    return f"2^{math.log2(entries):.4g}"


def with_constant(
    function: Callable[..., Any], *arguments: Any, **constants: float
) -> Callable[[], Any]:
    """A call with other constants of the platform, compiled when it runs first."""

    @functools.cache
    def program() -> Any:
        with platform_with(platform(), **constants):
            return jax.jit(function).lower(*arguments).compile()

    return lambda: program()(*arguments)
