"""Times against Muon of torch and the Gram Newton-Schulz of the Dao lab, on its GPU."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
from gpt2 import BLOCK, separate, Shapes, updates_by
from models import Stage

import muonclip_jax as mc

from .rounding import normal, platform
from .rows import Timed
from .times import directions, newton_schulz_flops, Times


STACK = 8  # matrices that the Dao lab's function gets at once


def torch_muon(times: Times) -> Iterator[Timed]:
    """Separate leaves, as many as JAX has left room for; torch iterates in bfloat16."""
    if reason := missing("torch"):
        yield Timed(f"torch.optim.Muon: {reason}")
        return
    import torch  # pyright: ignore[reportMissingImports]

    most, (m, n) = times.sizes.stage
    free, _ = torch.cuda.mem_get_info()
    count = max(1, min(most, int(0.8 * free / (4 * 4 * m * n))))
    stage = Stage(count, (m, n)).shapes(separate)
    yield from against_torch(times, f"{count} x {(m, n)}, separate", stage)
    gpt2 = separate(times.sizes.layers, times.smaller(BLOCK))
    yield from against_torch(times, f"GPT-2's {len(gpt2)} matrices, separate", gpt2)


def against_torch(times: Times, name: str, shapes: Shapes) -> Iterator[Timed]:
    import torch  # pyright: ignore[reportMissingImports]

    params = [
        torch.nn.Parameter(torch.randn(shape, device="cuda"))
        for shape in shapes.values()
    ]
    for param in params:
        param.grad = torch.randn_like(param)
    theirs = torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    ours = updates_by(shapes, {"ours": directions(shapes)["ours"]})
    sides = ours | {f"torch.optim.Muon {torch.__version__}": finished(theirs.step)}
    yield from times.against(name, sides, newton_schulz_flops(shapes))


def gram_newton_schulz(times: Times) -> Iterator[Timed]:
    """The iteration alone, in both forms of theirs; both iterate in float16."""
    if reason := missing("torch") or missing("gram_newton_schulz"):
        yield Timed(f"gram_newton_schulz of the Dao lab: {reason}")
        return
    import torch  # pyright: ignore[reportMissingImports]
    from gram_newton_schulz import (  # pyright: ignore[reportMissingImports]
        GramNewtonSchulz,
    )

    shape = (STACK, *times.sizes.stage.shape)
    x = normal(0, *shape).astype("bfloat16")
    y = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    triples = [list(triple) for triple in mc.NS_COEFFS["keller"]]
    sides: dict[str, Callable[[], Any]] = {
        "ours": functools.partial(jax.jit(mc.newton_schulz), x)
    }
    for form, gram in (("gram", True), ("standard", False)):
        iterate = GramNewtonSchulz(ns_coefficients=triples, use_gram_newton_schulz=gram)
        sides[f"the Dao lab's, {form}"] = finished(functools.partial(iterate, y))
    flops = newton_schulz_flops({"stack": shape})
    yield from times.against(f"newton_schulz of {shape}", sides, flops)


def missing(package: str) -> str | None:
    if platform() != "gpu":
        return "no GPU here"
    if importlib.util.find_spec(package) is None:
        return "not installed"
    return None


def finished(run: Callable[[], Any]) -> Callable[[], None]:
    """Waits, as `alternate` does for JAX."""
    import torch  # pyright: ignore[reportMissingImports]

    def run_to_the_end() -> None:
        run()
        torch.cuda.synchronize()

    return run_to_the_end
