"""Times against Muon of torch, on its GPU."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from gpt2 import BLOCK, separate, Shapes, updates_by
from models import Stage

from .rounding import platform
from .rows import Timed
from .times import directions, newton_schulz_flops, Times


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
