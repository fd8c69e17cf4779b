"""What Newton-Schulz makes of singular values, and how exactly, by preset and spectrum.

    python benchmarks/spectra.py --json benchmarks/results/spectra.json

"Coefficients" bounds the outputs of each preset. In exact arithmetic the bounds are
certified: the range of one step over an interval is attained at its ends or at the
extrema in it, and so is known exactly. Intervals that cover the whole range are pushed
through step by step; many short ones together lose almost nothing over the range of
the whole composition. In bfloat16 every number of the range is taken, rounded after
each step; products of matrices round more than that.

"Relative error" compares each form and dtype with the composed polynomial itself,
through an SVD in float64 of the same float32 matrix.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from evidence.texts import text
from language_models import drawn, gpt2
from tables import parser, Report
from tqdm import tqdm

import muonclip_jax as mc


Triple = tuple[float, float, float]
Intervals = tuple[np.ndarray, np.ndarray]  # their lower and their upper ends

SHAPE = (256, 1024)
_INDICES = np.arange(1, SHAPE[0] + 1)
SINGULAR_VALUES = {
    "power law 1/k": 1 / _INDICES,
    "1 to 1e-4": np.geomspace(1, 1e-4, SHAPE[0]),
    "1 to 1e-8": np.geomspace(1, 1e-8, SHAPE[0]),
    "rank 1": np.ones(1),
    "rank 10": np.ones(10),
}
FORMS: Sequence[tuple[Any, Any]] = (
    ("standard", "float32"),
    ("gram", "float32"),
    ("standard", "bfloat16"),
    ("gram", "bfloat16"),
    ("gram", "float16"),
)
PIECES = 2**16
COLUMNS = {
    "preset": "",
    "steps": "d",
    "p'(0)": ".0f",
    "least on [1e-3, 1]": ".4f",
    "most": ".4f",
    "least on [1e-2, 1]": ".4f",
    "most there": ".4f",
    "abs(p - 1) there": ".4f",
    "at least 0.5 from": ".1e",
    "at least 0.7 from": ".1e",
    "in (0, 2] up to": ".4f",
}


class Ranges(NamedTuple):
    """Consecutive ranges of singular values, and bounds on what becomes of each."""

    start: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    table = report.table("Coefficients", COLUMNS)
    for name, schedule in mc.NS_COEFFS.items():
        for suffix, ranges in (("", certified), (", bfloat16", rounded)):
            gain = float(np.prod([a for a, _, _ in schedule]))
            table.add(name + suffix, len(schedule), gain, *figures(ranges, schedule))
    columns = {"spectrum": "", "preset": ""} | {" ".join(form): ".1e" for form in FORMS}
    table = report.table("Relative error, Frobenius norm", columns)
    for spectrum, x in tqdm((synthetic() | momentum()).items(), leave=False):
        for preset in mc.NS_COEFFS:
            table.add(spectrum, preset, *relative_errors(x, preset))
    report.write()


def synthetic() -> dict[str, np.ndarray]:
    """Matrices of given singular values."""
    generator = np.random.default_rng(0)
    matrices = {"Gaussian": generator.normal(size=SHAPE)}
    for name, values in SINGULAR_VALUES.items():
        left, right = (
            np.linalg.qr(generator.normal(size=(size, len(values))))[0]
            for size in SHAPE
        )
        matrices[name] = left * values @ right.T
    return {name: x.astype(np.float32) for name, x in matrices.items()}


def momentum(steps: int = 30) -> dict[str, np.ndarray]:
    """The momentum of a model's first block after some steps."""
    total: dict[str, Any] = {}
    for gradients in training(steps, block=0):
        total = {k: 0.95 * total.get(k, 0) + g for k, g in gradients.items()}
    return {f"{k} after {steps} steps": np.asarray(x) for k, x in total.items()}


def training(steps: int, block: int) -> Iterator[dict[str, jax.Array]]:
    """Gradients of three kernels of a small GPT-2, as Muon trains it on source code."""
    width, length, batch = 128, 64, 32
    shapes, loss = gpt2(width, layers=4, heads=4, words=256, length=length)
    params = drawn(shapes)
    batches = (text("code").batch(batch, length - 1, 0, i) for i in range(steps))
    reading = mc.read_model(loss, params, jnp.zeros((batch, length), jnp.int32))
    tx = mc.muon(1e-2, beta=0.95, model=reading)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        gradients = jax.grad(loss)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return gradients[f"h{block}"], optax.apply_updates(params, updates), state

    for tokens in batches:
        gradients, params, state = step(params, state, jnp.asarray(tokens))
        query = gradients["qkv"][:, :width]
        yield {"query": query, "up": gradients["up"], "down": gradients["down"]}


def relative_errors(x: np.ndarray, preset: Any) -> list[float]:
    """The relative error of each form, in the Frobenius norm."""
    case = Case(x, preset)
    outputs = (
        mc.newton_schulz(jnp.asarray(x), preset, method=method, dtype=dtype)
        for method, dtype in FORMS
    )
    return [case.relative_error(y) for y in outputs]


class Case:
    """A matrix and a preset, with the exact answer."""

    def __init__(self, x: np.ndarray, preset: str):
        left, self.singular, right = np.linalg.svd(
            x.astype(np.float64), full_matrices=False
        )
        shares = self.singular / np.linalg.norm(self.singular)
        self.values = composed(shares, mc.NS_COEFFS[preset])
        self.exact = left * self.values @ right

    def relative_error(self, y: Any) -> float:
        """NaN or infinite where `y` is not finite."""
        error = np.linalg.norm(np.asarray(y, np.float64) - self.exact)
        return float(error / np.linalg.norm(self.exact))


def composed(x: np.ndarray, schedule: Iterable[Triple]) -> np.ndarray:
    """All steps, on singular values."""
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


def figures(
    ranges: Callable[..., Ranges], schedule: Sequence[Triple]
) -> list[float | None]:
    wide, narrow = (ranges(start, 1, schedule) for start in (1e-3, 1e-2))
    least, most = float(narrow.low.min()), float(narrow.high.max())
    return [
        float(wide.low.min()),
        float(wide.high.max()),
        least,
        most,
        max(abs(least - 1), abs(most - 1)),
        kept_from(ranges(1e-6, 1, schedule), 0.5),
        kept_from(ranges(1e-6, 1, schedule), 0.7),
        safe_up_to(ranges(1, 4, schedule)),
    ]


def kept_from(ranges: Ranges, least: float) -> float | None:
    """From where on no output is below `least`; None if the last one is."""
    kept = np.logical_and.accumulate((ranges.low >= least)[::-1])[::-1]
    return float(ranges.start[kept][0]) if kept.any() else None


def safe_up_to(ranges: Ranges) -> float | None:
    """How far all outputs are in (0, 2]; None if the first is not."""
    safe = np.logical_and.accumulate((ranges.low > 0) & (ranges.high <= 2))
    return float(ranges.end[safe][-1]) if safe.any() else None


def certified(start: float, end: float, schedule: Sequence[Triple]) -> Ranges:
    edges = np.geomspace(start, end, PIECES + 1)
    return Ranges(edges[:-1], edges[1:], *image((edges[:-1], edges[1:]), schedule))


def rounded(start: float, end: float, schedule: Sequence[Triple]) -> Ranges:
    """Every bfloat16 number between, each a range of its own."""
    finite = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    numbers = finite.astype(np.float64)
    numbers = values = numbers[(numbers >= start) & (numbers <= end)]
    with np.errstate(over="ignore", invalid="ignore"):
        for step in schedule:
            values = composed(values, [step])
            values = values.astype(ml_dtypes.bfloat16).astype(np.float64)
    return Ranges(numbers, numbers, values, values)


def image(intervals: Intervals, schedule: Iterable[Triple]) -> Intervals:
    """Encloses the values of the composed polynomial on every interval."""
    # What grows beyond float64 becomes inf or nan, which no comparison calls small.
    with np.errstate(over="ignore", invalid="ignore"):
        for step in schedule:
            intervals = _step_image(intervals, step)
    return intervals


def _step_image(intervals: Intervals, step: Triple) -> Intervals:
    a, b, c = step
    low, high = intervals
    # An extremum outside moves to the nearer end, which is a candidate anyway.
    candidates = [low, high] + [np.clip(x, low, high) for x in _extrema(step)]
    values = np.stack([composed(x, [step]) for x in candidates])
    x = np.maximum(np.abs(low), np.abs(high))
    terms = abs(a) * x + abs(b) * x**3 + abs(c) * x**5
    rounding = 8 * np.finfo(np.float64).eps * terms
    return values.min(axis=0) - rounding, values.max(axis=0) + rounding


def _extrema(step: Triple) -> list[float]:
    """The roots of the derivative `a + 3 b x^2 + 5 c x^4`.

    Where they are complex their real parts take their place: any point of an interval
    may be a candidate.
    """
    a, b, c = step
    roots = [np.sqrt(abs(square.real)) for square in np.roots([5 * c, 3 * b, a])]
    return roots + [-root for root in roots]


if __name__ == "__main__":
    main()
