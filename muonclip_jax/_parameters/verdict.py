"""The verdict on one parameter, by its name and shape, a reading, or the user."""

from typing import Any, Literal, NamedTuple

from optax.contrib import MuonDimensionNumbers


#: Who decided. An "unread" leaf is judged by its name: the reading shows no use of it.
Source = Literal["named", "read", "unread", "given", "hidden"]


class UnknownDirection(MuonDimensionNumbers):
    """Dimension numbers of either direction: a mask hides the bias that decides."""


class Verdict(NamedTuple):
    """The verdict on one parameter. Only `why` is for print."""

    label: str  # "matrix", "embedding", "head", "router", "vector" or "frozen"
    numbers: Any  # of a matrix: `MuonDimensionNumbers`, or `MatrixAxes` as given
    kind: str  # the rule that fired, or the use that a trace shows; code compares it
    source: Source = "named"
    is_known: bool = True  # else `numbers` are a guess, which the user is asked about
    is_sure: bool = True  # else there is little evidence
    line: str = ""  # file and line of the use, where a trace shows it
    note: str = ""  # more to print than the kind
    use: str = ""  # of an unread leaf: why the reading does not show its use

    @property
    def why(self) -> str:
        """Says in words what decided, with a "?" at the end if evidence is weak."""
        reason = f"{self.kind}{self.note}" + "?" * (not self.is_sure)
        if self.source == "unread":
            return f"not traced: {reason}"
        if self.source == "read":
            return f"traced{self.note}" if self.is_known else reason
        return reason if self.source == "named" else self.source
