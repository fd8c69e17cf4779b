"""How close Muon's update stays when its momentum is kept in fewer bits.

    python benchmarks/momentum_in_8_bits.py

The cosine between the update and that of momentum in float32, after some steps of the
same gradients. The synthetic ones keep their singular vectors, and every singular value
is drawn anew at every step: around that of the spectrum, with half of it as standard
deviation. The others are those of a small GPT-2 as it trains.
"""

from collections.abc import Iterator
from typing import Any

import gpt2
import jax
import jax.numpy as jnp
import numpy as np
import spectra
from optax.contrib import MuonDimensionNumbers
from tables import parser, Report
from tqdm import tqdm

import muonclip_jax as mc


DTYPES = ("float32", "bfloat16", "int8")
STEPS = (10, 200, 1000)
AXES = MuonDimensionNumbers(-2, -1)

Matrices = dict[str, jax.Array]


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report(args)
    write_bytes(report)
    columns = {"gradients": "", "momentum": ""} | {f"{n} steps": ".4f" for n in STEPS}
    table = report.table("Cosine to the update of float32", columns)
    for stream in (synthetic(), of_training()):
        for row in cosines(stream):
            table.add(*row)
    report.write()


def write_bytes(report: Report) -> None:
    table = report.table(
        "Bytes a parameter, GPT-2", {"": "", **dict.fromkeys(DTYPES, ".3f")}
    )
    heads = {name: (768, 12, 64) for name in ("query", "key", "value")}
    for name, shapes, numbers in (
        ("72 matrices", gpt2.separate(12), AXES),
        ("in 12 stacks", gpt2.stacked(12), AXES),
        ("one matrix per head", heads, MuonDimensionNumbers(0, 2)),
    ):
        table.add(name, *(held(shapes, numbers, dtype) for dtype in DTYPES))


def held(shapes: gpt2.Shapes, numbers: MuonDimensionNumbers, dtype: Any) -> float:
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    tx = mc.scale_by_muon(mu_dtype=dtype, dimension_numbers=numbers)
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    entries = sum(p.size for p in params.values())
    return sum(x.size * x.dtype.itemsize for x in state) / entries


def synthetic() -> Iterator[Matrices]:
    """All spectra at once, step by step."""
    generator = np.random.default_rng(1)
    factors = {
        name: np.linalg.svd(x.astype(np.float64), full_matrices=False)
        for name, x in spectra.synthetic().items()
    }
    while True:
        gains = 1 + 0.5 * generator.normal(size=spectra.SHAPE[0])
        yield {
            name: jnp.asarray((u * (s * gains)) @ vt, jnp.float32)
            for name, (u, s, vt) in factors.items()
        }


def of_training() -> Iterator[Matrices]:
    """The gradients of three kernels in the second block of a small GPT-2."""
    for gradients in spectra.training(max(STEPS), block=1):
        yield {f"{name} of a model": x for name, x in gradients.items()}


def cosines(stream: Iterator[Matrices]) -> list[list[Any]]:
    """A row for each kind of gradients and each dtype but the first."""
    first = next(stream)
    runs = {dtype: Momentum(dtype, first) for dtype in DTYPES}
    found: dict[tuple[str, str], list[float]] = {}
    for i in tqdm(range(1, max(STEPS) + 1), leave=False):
        for run in runs.values():
            run.step(first)
        if i in STEPS:
            exact, *others = (run.update(first) for run in runs.values())
            for dtype, update in zip(DTYPES[1:], others, strict=True):
                for name, x in update.items():
                    found.setdefault((name, dtype), []).append(cosine(x, exact[name]))
        first = next(stream, first)
    return [[*key, *found[key]] for key in sorted(found)]


class Momentum:
    """Muon's momentum in one dtype, and the update that it would make."""

    def __init__(self, dtype: str, gradients: Matrices):
        options: dict[str, Any] = dict(
            beta=0.95, mu_dtype=dtype, dimension_numbers=AXES
        )
        # One step of Newton-Schulz where only the momentum is asked for.
        quick, whole = (
            mc.scale_by_muon(orthogonalizer=mc.NewtonSchulz(steps=n), **options)
            for n in (1, 5)
        )
        self.state = quick.init(gradients)
        self._advance = jax.jit(lambda g, state: quick.update(g, state)[1])
        self._update = jax.jit(lambda g, state: whole.update(g, state)[0])
        self._before = self.state

    def step(self, gradients: Matrices) -> None:
        self._before = self.state
        self.state = self._advance(gradients, self.state)

    def update(self, gradients: Matrices) -> Matrices:
        return self._update(gradients, self._before)


def cosine(x: jax.Array, y: jax.Array) -> float:
    a, b = (np.asarray(v, np.float64).ravel() for v in (x, y))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


if __name__ == "__main__":
    main()
