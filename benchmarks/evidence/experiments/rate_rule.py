"""One rule from AdamW's learning rate to Muon's, and what it costs where it is wrong.

Nothing is trained: what is read is every walk that the other experiments made.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from pictures import panels
from tables import Table

from ..intervals import interval
from ..lab import Lab, losses, Result, Unfinished
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import CYCLE


FACTOR, MOST = 2, 0.032
KEPT = 0.8  # of what the best rate gains over AdamW
RULE = f"{FACTOR} times AdamW's rate, at most 0.03 ({MOST:g} on the grid)"
# Settings of a model and its training, which a rate is tuned for.
SETTING = ("corpus", "layers", "width", "batch", "steps", "schedule", "start", "rank")
# All that Muon may differ in: other options have rates of their own.
FREE = {*SETTING, "context", "optimizer", "heads", "matrices", "evaluations", "seed"}
FREE |= {"beta", "beta_from", "b2"}
FREE |= {"learning_rate", "adam_learning_rate", "weight_decay"}
ARMS = {
    (0.95, None, "default"): "0.95",
    (0.95, None, "per_head"): "0.95, heads",
    (0.95, 0.85, "default"): "rising",
    (0.95, 0.85, "per_head"): "rising, heads",
    (0.9, None, "default"): "0.9, adapters",
    (0.9, None, "lora_b"): "0.9, b of adapters",
}


def rule(adamw: float) -> float:
    """Muon's learning rate, from that of a tuned AdamW."""
    return min(FACTOR * adamw, MOST)


class Case(NamedTuple):
    """The rates that were tried under one setting; losses on the text to tune on."""

    setting: dict[str, Any]
    goal: str  # what of AdamW was tuned
    arm: str
    one_rate: bool  # for all parameters, else AdamW's keep its own
    adamw: float
    adamw_loss: float
    tried: dict[float, float]

    @property
    def best(self) -> float:
        return min(self.tried, key=self.tried.__getitem__)

    def cost(self, rate: float) -> float:
        """What is lost to the best rate; NaN where that was not tried."""
        return self.tried.get(rate, math.nan) - self.tried[self.best]

    def kept(self, rate: float) -> float:
        """The share of what the best rate gains over AdamW; NaN if that is nothing."""
        gained = self.adamw_loss - self.tried[self.best]
        return (gained - self.cost(rate)) / gained if gained > 0 else math.nan


def experiment(lab: Lab, plan: Plan) -> Section:
    cases = cases_of(lab, plan)
    if not cases:
        raise Unfinished("no walks of other experiments")
    draw(plan, cases)
    factor = interval([math.log2(case.best / case.adamw) for case in cases])
    by_rule, by_adamw = judge(cases, rule), judge(cases, float)
    return Section(
        title="The rate to set",
        claim="Moonlight (arXiv:2502.16982): with updates of AdamW's root mean square, "
        f"AdamW's rate carries over. This report: {RULE}.",
        setting="Every setting under which AdamW's learning rate was tuned, with its "
        "weight decay but in fine-tuning, and at least three rates of a Muon with "
        "weight decay 0.1 (adapters: none), for all parameters or alongside AdamW's "
        "rate for its own. Losses are those of the walks: one seed, on the text to "
        "tune on, factors of 2. Nothing is trained here. Where Muon gains nothing at "
        "its best rate, there is nothing to keep.",
        tables=[summary(cases), case_table(cases)],
        parts={
            "the rule keeps 80% of the gain": by_rule.kept or [False],
            "AdamW's rate keeps 80% of the gain": by_adamw.kept or [False],
        },
        figure="rate_rule.png",
        remarks=f"Over {len(cases)} cases the best rate is {2**factor.mean:.1f} times "
        f"AdamW's ({2**factor.low:.1f} to {2**factor.high:.1f}, a geometric mean)"
        f"{power(cases)}. The rule costs {np.mean(by_rule.costs):.3f} nats on "
        f"average and {max(by_rule.costs):.3f} at most. Its two numbers follow from "
        "the cases on code and prose; those on the third text were known when it was "
        "written.",
    )


class Judged(NamedTuple):
    """One way to choose rates, in the cases where its rate was tried."""

    costs: list[float]
    kept: list[bool]  # enough of what the best rate gains


def judge(cases: list[Case], choose: Callable[[float], float]) -> Judged:
    """`choose` is Muon's rate by AdamW's."""
    rates = [(case, choose(case.adamw)) for case in cases]
    tried = [(case, rate) for case, rate in rates if rate in case.tried]
    costs = [case.cost(rate) for case, rate in tried]
    kept = [case.kept(rate) for case, rate in tried]
    return Judged(costs, [share >= KEPT for share in kept if not math.isnan(share)])


def power(cases: list[Case]) -> str:
    """The regression of one rate on the other, where AdamW's differ."""
    x, y = (np.log2([getattr(case, of) for case in cases]) for of in ("adamw", "best"))
    if not np.ptp(x):
        return ""
    from scipy import stats  # takes a second

    fitted: Any = stats.linregress(x, y)
    half = stats.t.ppf(0.975, len(cases) - 2) * fitted.stderr
    return f" and grows with its power {fitted.slope:.2f} ± {half:.2f}"


def cases_of(lab: Lab, plan: Plan) -> list[Case]:
    defaults = {f.name: f.default for f in dataclasses.fields(Run)}
    adamw: dict[tuple[Any, ...], dict[str, dict[tuple[float, float], float]]] = {}
    muon: dict[tuple[Any, ...], dict[tuple[float, float], float]] = {}
    for changes, result in lab.tried():
        run: dict[str, Any] = defaults | dict(changes)
        if not changes.keys() <= FREE or run["seed"] or run["weight_decay"] is None:
            continue
        setting, loss = tuple(str(run[name]) for name in SETTING), final(result)
        if run["corpus"] not in plan.all_corpora or not math.isfinite(loss):
            continue
        if run["optimizer"] == "adamw":
            # Walks over b1 and b2 name b2; the others leave b1 as it is.
            if run["b2"] is not None or run["beta"] in (None, 0.9):
                goal = "rate and decay" if run["b2"] is None else "b1 and b2 too"
                tried = adamw.setdefault(setting, {}).setdefault(goal, {})
                key = run["learning_rate"], run["weight_decay"]
                tried[key] = min(loss, tried.get(key, loss))
        elif run["weight_decay"] == (0.0 if run["rank"] else 0.1):
            arm = ARMS.get((run["beta"] or 0.95, run["beta_from"], run["matrices"]))
            if arm:
                rates = run["learning_rate"], run["adam_learning_rate"]
                muon.setdefault((*setting, arm), {})[rates] = loss
    found = []
    for (*setting, arm), tried in sorted(muon.items()):
        for goal, baseline in adamw.get(tuple(setting), {}).items():
            (rate, _), loss = min(baseline.items(), key=lambda item: item[1])
            for one_rate in (True, False):
                rates = {
                    a: loss
                    for (a, b), loss in tried.items()
                    if b == (a if one_rate else rate)
                }
                if len(rates) > 2:
                    named: dict[str, Any] = dict(zip(SETTING, setting, strict=True))
                    found.append(Case(named, goal, arm, one_rate, rate, loss, rates))
    return found


def final(result: Result) -> float:
    return losses([result], part="tune")[0]


def summary(cases: list[Case]) -> Table:
    """Of both ways to set the rate of AdamW's parameters, and of the default alone."""
    kinds: Mapping[str, list[Case]] = {
        "all": cases,
        "one rate": [c for c in cases if c.one_rate],
        "AdamW's rate for its parameters": [c for c in cases if not c.one_rate],
        "the default: one rate, rising, heads": [
            c for c in cases if c.one_rate and c.arm == "rising, heads"
        ],
    }
    entries = []
    for kind, of_kind in kinds.items():
        for name, choose in {"the rule": rule, "AdamW's rate": float}.items():
            costs, kept = judge(of_kind, choose)
            if costs:
                shown = [f"{np.mean(costs):.3f}", f"{max(costs):.3f}"]
                entries.append([kind, name, *shown, f"{sum(kept)} of {len(kept)}"])
    columns = ["cases", "", "loss over the best rate's: mean", "most", "80% kept"]
    return Table(columns, entries, "Losses in nats per byte.")


def case_table(cases: list[Case]) -> Table:
    columns = ["corpus", "layers, width", "sequences, steps", "schedule", "after"]
    columns += ["tuned of AdamW", "beta"]
    columns += ["AdamW's parameters", "AdamW's rate", "best rate", "rule's", "its cost"]
    columns += ["cost of AdamW's", "gain kept"]
    entries = []
    for case in cases:
        of = case.setting
        rate = rule(case.adamw)
        cost, of_adamw = case.cost(rate), case.cost(case.adamw)
        entries.append(
            [
                of["corpus"],
                f"{of['layers']}, {of['width']}",
                f"{of['batch']}, {int(of['steps']):,}",
                of["schedule"],
                before(of["start"]),
                case.goal,
                case.arm,
                "the same" if case.one_rate else "AdamW's",
                f"{case.adamw:.2g}",
                f"{case.best:.2g}",
                f"{rate:.2g}",
                "-" if math.isnan(cost) else f"{cost:.3f}",
                "-" if math.isnan(of_adamw) else f"{of_adamw:.3f}",
                "-" if math.isnan(case.kept(rate)) else f"{case.kept(rate):.0%}",
            ]
        )
    return Table(columns, entries, "Loss over that at the best rate, nats per byte.")


def before(start: str) -> str:
    """Which optimizer trained what is fine-tuned."""
    if start == "()":
        return "-"
    return "AdamW" if "adamw" in start else "Muon"


def draw(plan: Plan, cases: list[Case]) -> None:
    file = plan.figures / "rate_rule.png"
    titles = ["one rate for all parameters", "AdamW's rate for its own"]
    with panels(file, titles, xlabel="AdamW's best learning rate") as axes:
        for one, one_rate in zip(axes, (True, False), strict=True):
            of_kind = [case for case in cases if case.one_rate == one_rate]
            for color, arm in zip(CYCLE, ARMS.values(), strict=False):
                points = [(c.adamw, c.best) for c in of_kind if c.arm == arm]
                if points:
                    # Shifted by arm, since the grid puts many on one place.
                    shift = 1.06 ** list(ARMS.values()).index(arm)
                    x, y = np.transpose(points)
                    one.loglog(x * shift, y, "o", color=color, label=f"beta {arm}")
            line = np.geomspace(1e-3, 0.128, 50)
            one.loglog(line, [rule(x) for x in line], color="black", label="the rule")
            one.loglog(line, line, color="black", linestyle=":", label="AdamW's rate")
            one.set_ylabel("best learning rate of Muon")
