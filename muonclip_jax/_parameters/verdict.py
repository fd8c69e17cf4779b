"""The verdict on one parameter, by its name and shape, a reading, or the user."""

from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """The verdict on one parameter.

    A verdict that is not known is a guess, which the user is asked about.
    """

    label: str  # "matrix", "embedding", "head", "router", "vector" or "frozen"
    numbers: Any  # of a matrix: `MuonDimensionNumbers`, or `MatrixAxes` as given
    why: str  # what says so, in words; with a "?" at the end where evidence is weak
    line: str = ""  # file and line of the use, where a trace shows it
    is_known: bool = True
