"""Times that say how to set the package up: the size of a batch, and its kernels."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from candidates.on_hopper import OnHopper
from gpt2 import gradients, separate, stacked, updates_by
from internals import platform_named, platform_with

import muonclip_jax as mc

from .rounding import normal, platform
from .rows import Parts, Timed
from .times import directions, that_fits, Times


KERNELS: dict[str, Any] = {"ours": OnHopper(), "xla": mc.NewtonSchulz()}


def kernel_parts(times: Times) -> Parts:
    name = "pallas against xla"
    if platform() != "gpu":
        return {name: lambda: [Timed(f"{name}: no kernel here")]}
    by_rows = {
        f"{name}, {rows} rows": functools.partial(by_kernel, times, rows)
        for rows in times.sizes.kernel_rows
    }
    return by_rows | {f"{name}, stage": functools.partial(stage_by_kernel, times)}


def by_kernel(times: Times, rows: int) -> Iterator[Timed]:
    """Matrices twice as wide as high."""
    count = max(1, times.sizes.kernel_entries // (2 * rows**2))
    x = normal(0, count, rows, 2 * rows)
    sides = {
        name: functools.partial(jax.jit(own.orthogonalize), x)
        for name, own in KERNELS.items()
    }
    yield from times.against(f"{count} x ({rows}, {2 * rows}), pallas", sides)


def stage_by_kernel(times: Times) -> Iterator[Timed]:
    """In separate leaves."""
    stage = that_fits(times.sizes.stage)
    shapes = stage.shapes(separate)
    updates = {
        name: directions(shapes, orthogonalizer=own)["ours"]
        for name, own in KERNELS.items()
    }
    name = f"{stage.matrices} x {stage.shape}, separate, pallas"
    yield from times.against(name, updates_by(shapes, updates))


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
