"""What every experiment makes of its runs: where the claims hold, and where not."""

import importlib
import math
import re
import shutil

import numpy as np
import pytest
from evidence.lab import Lab
from evidence.page import anchor, QUESTIONS
from evidence.plan import Plan
from evidence.report import write_report
from evidence.run import Run
from helpers import few, ROOT
from reproduce import EXPERIMENTS


class World:
    """A lab that has trained everything, with results by a formula.

    In a good world every claim holds; in a bad one none does. Seeds move a loss by a
    little, the same for every setting.
    """

    def __init__(self, good: bool):
        self.good = good

    def open(self, experiment):
        pass

    def environments(self):
        return ["nowhere"]

    def results(self, runs, kept_in=""):
        return [self.result(run) for run in runs]

    def gather(self, runs):
        return {key: self.results(of_key) for key, of_key in runs.items()}

    def tried(self):
        """A walk of AdamW and of Muon on every text."""
        rates = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
        small = dict(layers=2, width=32, heads=2)
        runs = [
            Run(corpus=corpus, optimizer=optimizer, learning_rate=rate, **small).but(
                adam_learning_rate=rate if optimizer == "muon" else 1e-2
            )
            for corpus in ("code", "prose", "drama")
            for optimizer in ("adamw", "muon")
            for rate in rates
        ]
        return [(run.settings, self.result(run)) for run in runs]

    def once(self, name, measure):
        added = 0.01 if self.good else 9.0
        sides = ("Muon", "Muon, statistics", "MuonClip")
        quartiles = [1 + 0.9 * added, 1 + added, 1 + 1.1 * added]
        shape = {"width": 64, "tokens": 512, "adamw_ms": 5.0, "bound": 0.3}
        return shape | dict.fromkeys(sides, quartiles)

    def result(self, run):
        losses = self.losses(run)
        logits = self.logits(run)
        ends = range(run.steps // run.evaluations, run.steps + 1)[
            :: max(1, run.steps // run.evaluations)
        ]
        return {
            "curve": [[step, losses[step - 1], losses[step - 1]] for step in ends],
            "losses": losses.tolist(),
            "logits": logits.tolist(),
            "peak": float(logits.max()),
            "fired": int((logits > run.threshold).sum()),
            "forgotten": [2.0, 2.1],
        }

    def losses(self, run):
        """Muon needs half of AdamW's tokens, or no fewer."""
        steps = np.arange(1, run.steps + 1)
        tokens = steps * run.batch * self.times_as_good(run)
        if not self.good and run.optimizer == "adamw":
            tokens = tokens * (1 + run.batch / 256)
        best = 3.2e-2 if self.good else 1.6e-2 * run.width / 32
        best = best / 8 if run.layers == 8 and not self.good else best
        best = best / 8 if run.width == 256 else best  # a round from where walks begin
        scale = 2.0 if "consistent_rms" in dict(run.muon) else 1.0
        off_rate = math.log(run.learning_rate / (scale * best)) ** 2
        noise = 0.05 * np.random.default_rng(run.seed).standard_normal()
        spikes = 9.0 * (steps % 100 == 99) * (not self.good and run.clips)
        level = 6 + 0.05 * off_rate + noise + self.cost(run)
        return level - 0.3 * np.log(tokens) + spikes + self.stress(run, steps)

    def times_as_good(self, run):
        """Each of Muon's tokens, in a good world less the more there are, and no better
        where it goes on with what AdamW trained."""
        if run.optimizer != "muon":
            return 1
        if run.task:  # worse in the good world alone, unless it is a high-pass
            return 1 if run.candidate else 0.5 if self.good else 2
        after_adamw = dict(run.start).get("optimizer") == "adamw"
        times = 2 if self.good != after_adamw else 1 - 0.2 * self.good
        return times * (run.tokens / 409_600) ** (-0.01 if self.good else 0.01)

    def stress(self, run, steps):
        """Single steps that no other run shares, fewer the more is done about them."""
        if run.probe != "losses":
            return 0.0
        more = run.clips or dict(run.muon).get("ns_steps", 0)
        count = 2 * (1 + (run.optimizer == "muon") + bool(more))
        step = sum(map(ord, run.key)) % 7 + 20 * np.arange(
            8 - count if self.good else count
        )
        return 1.0 * np.isin(steps, 300 + step)

    def cost(self, run):
        """Of a choice, or of clipping."""
        worse = run.fused or run.matrices == "adam_experts"
        worse = worse or dict(run.muon).get("nesterov") is False
        harm = run.clips or run.muon or run.matrices == "per_head"
        if not self.good and dict(run.muon).get("ns_steps", 0) > 5:
            return -0.1
        if not self.good and "ns_coeffs" in dict(run.muon):
            return 0.2
        if not self.good and run.warm_up != 0.05:
            return -0.1
        if not self.good and run.beta == 0.95 and run.optimizer == "muon":
            return 0.1
        if self.good and self.parts_of_the_recipe(run):
            return -0.01 * self.parts_of_the_recipe(run)
        return 0.1 if (worse if self.good else harm and not worse) else 0.0

    def parts_of_the_recipe(self, run):
        told = dict(run.muon)
        parts = {"neuron_b2", "cautious_weight_decay"} & told.keys()
        is_even = told.get("preconditioning") == "equilibrated"
        rises = run.beta_from is not None
        others = (rises, run.matrices == "per_head", run.candidate != "")
        return len(parts) + is_even + sum(others)

    def logits(self, run):
        share = np.arange(run.steps) / run.steps
        free = 3000 * share if run.schedule == "constant" else 300 * share * (1 - share)
        if not self.good:
            grown = free if run.weight_decay else free / 4
            return grown if not run.clips else grown + 50 * run.threshold
        if run.normalized or (run.weight_decay and run.schedule == "constant"):
            free = free / 300
        return np.minimum(free, 1.05 * run.threshold)


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("name", few(EXPERIMENTS, *EXPERIMENTS[::6]))
def test_verdict_is_that_of_the_world(name, good, tmp_path):
    module = importlib.import_module(f"evidence.experiments.{name}")
    plan = Plan(["code", "prose"] if good else ["code"], tmp_path)
    section = module.experiment(World(good), plan)
    text = section.markdown("figures", name)
    assert (tmp_path / section.figure).read_bytes().startswith(b"\x89PNG")
    assert not good or not re.search(r"\bnan\b", text)
    assert section.verdict == ("reproduced" if good else "not reproduced"), text


@pytest.mark.more
def test_quick_plans_are_rendered_too(tmp_path):
    write_report(
        tmp_path / "new" / "report.md",
        tmp_path / "new" / "experiments.md",
        EXPERIMENTS,
        World(True),
        Plan(["code"], tmp_path / "new", quick=True),
    )
    report = (tmp_path / "new" / "experiments.md").read_text()
    assert "failed" not in report and "not finished" not in report
    assert report.count("**Verdict: ") == len(EXPERIMENTS)


@pytest.mark.slow
def test_the_page_answers_every_question_in_five_minutes(tmp_path):
    """Of a world in which every claim holds, and read at 230 words a minute."""
    file, details = tmp_path / "report.md", tmp_path / "all" / "experiments.md"
    plan = Plan(["code", "prose"], tmp_path / "results")
    write_report(file, details, EXPERIMENTS, World(True), plan)
    page, headings = file.read_text(), details.read_text()
    assert page.count("**What this does not show.**") == len(QUESTIONS) == 8
    assert len(page.split()) < 1300
    assert not re.search(r"\bnan\b|not finished", page, re.IGNORECASE)
    for figure in re.findall(r"!\[[^]]+\]\((results/[^)]+)\)", page):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    names = {anchor(line[3:]) for line in headings.splitlines() if line[:3] == "## "}
    links = re.findall(r"\(all/experiments\.md#([^)]+)\)", page)
    assert links and set(links) <= names


@pytest.mark.more
def test_an_experiment_that_fails_does_not_take_the_others_along(tmp_path):
    world = World(True)
    world.once = lambda name, measure: {}
    names = ["overhead", "no_harm"]
    details = tmp_path / "experiments.md"
    plan = Plan(["code"], tmp_path)
    write_report(tmp_path / "report.md", details, names, world, plan)
    report = details.read_text()
    assert "| overhead | failed: KeyError('width') |" in report
    assert "## No harm" in report


@pytest.mark.more
def test_the_committed_pages_are_those_of_the_committed_runs(tmp_path):
    """`python benchmarks/reproduce.py` writes them."""
    results = tmp_path / "evidence" / "results"
    results.mkdir(parents=True)
    for file in (ROOT / "benchmarks" / "evidence" / "results").glob("*.jsonl"):
        shutil.copy(file, results)
    pages = "report.md", "evidence/experiments.md"
    lab = Lab(results, trains=False)
    files = [tmp_path / page for page in pages]
    write_report(*files, EXPERIMENTS, lab, Plan(figures=results))
    for page, file in zip(pages, files, strict=True):
        assert file.read_text() == (ROOT / "benchmarks" / page).read_text()
