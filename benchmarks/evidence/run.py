"""The setting of one training run: all that its result depends on."""

import dataclasses
import json
import math
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; runs that are equal have the same result."""

    corpus: str = "code"  # "prose", or the path of a file
    seed: int = 0  # of the initial weights and the batches
    start: tuple[tuple[str, Any], ...] = ()  # settings of the run `before`, if any
    rank: int = 0  # of LoRA's adapters of all matrices, which alone are trained
    steps: int = 400
    batch: int = 16
    context: int = 64

    task: str = ""  # of reinforcement learning, in place of the corpus
    model: str = "transformer"  # or "kimi_k2", with a task "attention" or "mlp"
    layers: int = 3
    width: int = 64
    heads: int = 4
    normalized: bool = False  # QK-norm
    fused: bool = False  # query, key and value in one kernel
    statistics: bool = True  # whether attention records its largest logits

    optimizer: str = "muon"  # or "adamw"
    learning_rate: float = 1e-2  # that of the hidden matrices, or of all with AdamW
    adam_learning_rate: float = 1e-2  # that of the rest with Muon
    weight_decay: float = 0.1
    beta: float | None = None  # momentum's; by default 0.95, and AdamW's 0.9
    b2: float | None = None  # AdamW's where it is alone, by default 0.95
    beta_from: float | None = None  # where it begins, if it rises over 300 steps
    schedule: str = "cosine"  # or "linear", or "constant"
    warm_up: float = 0.05  # share of the steps over which the rate rises
    threshold: float = math.inf  # of QK-Clip
    matrices: str = "default"  # or another of `MATRICES` of optimizers.py
    muon: tuple[tuple[str, Any], ...] = ()  # further arguments of mc.muon
    candidate: str = ""  # in place of mc.muon, one of `CANDIDATES`

    evaluations: int = 1  # over the run, the last at its end
    probe: str = ""  # "steps" keeps every step, "losses" less

    @property
    def before(self) -> Self | None:
        """The run that trained the weights it begins with; else they are drawn."""
        return type(self)(**dict(self.start), seed=self.seed) if self.start else None

    def but(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.context

    @property
    def matrix_parameters(self) -> int:
        """Entries of the hidden matrices, in layers without experts."""
        return 12 * self.layers * self.width**2

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from the defaults."""
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        return {f.name: values[f.name] for f in fields if values[f.name] != f.default}

    @property
    def key(self) -> str:
        """Names the run among the results; new fields leave old keys as they are."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def program(self) -> Self:
        """The run with all that one compiled program takes as arguments left out."""
        names = ["corpus", "seed", "start", "steps", "schedule", "warm_up", "probe"]
        names += ["learning_rate", "adam_learning_rate", "weight_decay", "evaluations"]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changes = {name: defaults[name] for name in names}
        return self.but(
            **changes,
            beta_from=_if_given(self.beta_from),
            threshold=1.0 if self.clips else math.inf,
        )

    @property
    def clips(self) -> bool:
        return math.isfinite(self.threshold)


def _if_given(value: float | None) -> float | None:
    return None if value is None else 1.0
