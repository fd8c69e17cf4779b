"""One experiment as the report shows it."""

import dataclasses
from collections.abc import Mapping, Sequence

from tables import Table


@dataclasses.dataclass(frozen=True)
class Section:
    """What was claimed, by whom, what was done here and what came out."""

    title: str
    claim: str
    setting: str
    tables: Sequence[Table]
    parts: Mapping[str, Sequence[bool]]  # of the claim, and where each held
    figure: str  # file name
    remarks: str = ""
    answer: str = ""  # to what the page asks, if it asks for this experiment
    limits: str = ""  # what the answer does not show

    @property
    def verdict(self) -> str:
        """Sums up whether each part of the claim held."""
        holds = [one for of_part in self.parts.values() for one in of_part]
        if all(holds):
            return "reproduced"
        return "reproduced in part" if any(holds) else "not reproduced"

    @property
    def summary(self) -> str:
        """What was reproduced and what was not, part by part."""
        kinds: dict[str, list[str]] = {"yes": [], "not everywhere": [], "no": []}
        for name, holds in self.parts.items():
            kind = "yes" if all(holds) else "not everywhere" if any(holds) else "no"
            kinds[kind].append(name)
        said = (f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
        return "; ".join(said)

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
