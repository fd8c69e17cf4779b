"""One experiment as the report shows it."""

import dataclasses
from collections.abc import Iterable, Sequence

from tables import Table


@dataclasses.dataclass(frozen=True)
class Section:
    """What was claimed, by whom, what was done here and what came out."""

    title: str
    claim: str
    setting: str
    tables: Sequence[Table]
    verdict: str
    figure: str  # file name
    remarks: str = ""

    def markdown(self, figures: str, command: str) -> str:
        parts = [
            f"## {self.title}",
            command,
            f"**Claim.** {self.claim}",
            f"**Setting.** {self.setting}",
            *(table.markdown() for table in self.tables),
            f"![{self.title}]({figures}/{self.figure})",
            f"**Verdict: {self.verdict}.** {self.remarks}".rstrip(),
        ]
        return "\n\n".join(parts)


def verdict(holds: Iterable[bool]) -> str:
    """Sums up whether each part of the claim held."""
    parts = list(holds)
    if all(parts):
        return "reproduced"
    return "reproduced in part" if any(parts) else "not reproduced"
