"""Means over seeds and their 95 % intervals, by Student's t."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean and the half width of its interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def show(self, form: str = ".3f") -> str:
        return f"{self.mean:{form}} ± {self.half:{form.lstrip('+')}}"

    def difference(self) -> str:
        return f"{self.mean:+.4f} ({self.span()})"

    def span(self, form: str = "+.4f") -> str:
        return f"{self.low:{form}} to {self.high:{form}}"


Values = Sequence[float] | np.ndarray


def interval(values: Values) -> Interval:
    """Interval of the mean of independent values; one value has no width."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Interval(float(x.mean()), float("nan"))
    from scipy import stats  # takes a second

    half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
    return Interval(float(x.mean()), float(half))


def paired(values: Values, baseline: Values) -> Interval:
    """Interval of the mean difference from the baseline with the same seed."""
    return interval(np.subtract(values, baseline))
