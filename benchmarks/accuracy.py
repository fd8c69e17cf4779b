"""How exact each form of Newton-Schulz is, by spectrum and preset.

    python benchmarks/accuracy.py

The first tables compare with the composed polynomial itself, through an SVD in float64
of the same float32 matrix. The last two compare with the polar factor, on the singular
vectors whose singular value is a given share of the largest or more; their column
"polynomial" is what exact arithmetic leaves.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import spectra
from tables import parser, Report
from tqdm import tqdm

import muonclip_jax as mc


FORMS = (
    ("standard", "float32"),
    ("gram", "float32"),
    ("standard", "bfloat16"),
    ("gram", "bfloat16"),
    ("gram", "float16"),
)
FORM_NAMES = [" ".join(form) for form in FORMS]
ERROR_TABLES = {
    "Relative error, Frobenius norm": ("relative", ".1e"),
    "Largest error of an element": ("largest", ".1e"),
    "Spectral norm of the output": ("norm", ".4f"),
}
SHARES = (1e-2, 1e-3)

Key = tuple[str, str]  # spectrum, preset


class Errors(NamedTuple):
    """Of one result."""

    relative: float
    largest: float
    norm: float
    distances: tuple[float, ...]  # one for each of SHARES


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report(args)
    cases = {
        (spectrum, preset): Case(x, preset)
        for spectrum, x in (spectra.synthetic() | spectra.momentum()).items()
        for preset in mc.NS_COEFFS
    }
    errors = {key: case.errors() for key, case in tqdm(cases.items(), leave=False)}
    write_errors(report, errors)
    write_distances(report, cases, errors)
    report.write()


class Case:
    """A matrix and a preset, with the exact answer."""

    def __init__(self, x: np.ndarray, preset: str):
        self.x, self.preset, self.schedule = x, preset, mc.NS_COEFFS[preset]
        self.left, self.singular, self.right = np.linalg.svd(
            x.astype(np.float64), full_matrices=False
        )
        self.values = polynomial(self.singular, self.schedule)
        self.exact = self.left * self.values @ self.right

    def errors(self) -> list[Errors]:
        return [self.errors_of(self._run(*form)) for form in FORMS]

    def polynomial_distances(self) -> list[float]:
        return [
            float(np.abs(self.values[: self._count(share)] - 1).max())
            for share in SHARES
        ]

    def _run(self, method, dtype: str) -> np.ndarray:
        y = mc.newton_schulz(
            jnp.asarray(self.x),
            self.preset,
            method=method,
            dtype=dtype,
        )
        return np.asarray(y, np.float64)

    def errors_of(self, y: np.ndarray) -> Errors:
        if not np.isfinite(y).all():
            return Errors(math.nan, math.nan, math.nan, (math.nan,) * len(SHARES))
        error = y - self.exact
        return Errors(
            float(np.linalg.norm(error) / np.linalg.norm(self.exact)),
            float(np.abs(error).max()),
            float(np.linalg.norm(y, 2)),
            tuple(self._distance(y, share) for share in SHARES),
        )

    def _distance(self, y: np.ndarray, share: float) -> float:
        """From the polar factor, in the spectral norm."""
        k = self._count(share)
        between = self.left[:, :k].T @ y @ self.right[:k].T
        return float(np.linalg.norm(between - np.eye(k), 2))

    def _count(self, share: float) -> int:
        return int((self.singular >= share * self.singular[0]).sum())


def polynomial(singular_values: np.ndarray, schedule) -> np.ndarray:
    """All steps on the singular values, after division by the Frobenius norm."""
    s = singular_values / np.linalg.norm(singular_values)
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return s


def write_errors(report: Report, errors: Mapping[Key, list[Errors]]) -> None:
    for title, (field, form) in ERROR_TABLES.items():
        table = report.table(title, columns(FORM_NAMES, form))
        for key, results in errors.items():
            table.add(*key, *[getattr(result, field) for result in results])


def write_distances(
    report: Report, cases: Mapping[Key, Case], errors: Mapping[Key, list[Errors]]
) -> None:
    for i, share in enumerate(SHARES):
        title = f"Distance from the polar factor, {share:g} of the largest or more"
        table = report.table(title, columns(["polynomial", *FORM_NAMES], ".4f"))
        for key, results in errors.items():
            exact = cases[key].polynomial_distances()[i]
            table.add(*key, exact, *[result.distances[i] for result in results])


def columns(names: list[str], form: str) -> dict[str, str]:
    return {"spectrum": "", "preset": ""} | dict.fromkeys(names, form)


if __name__ == "__main__":
    main()
