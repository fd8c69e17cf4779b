"""The example scripts, run as a user runs them but small."""

import json

import pytest
from corpus import Corpus
from helpers import EXAMPLES, more, run_script
from train_lm_report import summary


SMALL = ["--steps=12", "--batch-size=4", "--context=16", "--eval-every=4"]
SMALL += ["--layers=1", "--width=16", "--heads=2", "--checkpoint-every=1"]


def run(script, *arguments, check=True):
    return run_script(EXAMPLES / script, *arguments, check=check)


def run_changed(change, *arguments):
    """train_lm.py after a change of the modules that it imports."""
    script = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = {["train_lm.py", *map(str, arguments)]!r}
import checkpoints, corpus, train_lm
{change}
train_lm.main()
"""
    return run_script("-c", script, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 3000)
    return file


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("runs") / "compare"
    # A tiny threshold, so that the clip acts in the first steps.
    result = run(
        "train_lm.py", *SMALL, "--data", text, "--threshold", "0.01", "--out", out
    )
    return out, result


@pytest.mark.more
def test_comparison_prints_a_table_and_draws(comparison):
    out, result = comparison
    names = ("AdamW", "Muon ", "MuonClip")
    for word in (*names, "validation loss", "largest logit", "tokens/s"):
        assert word in result.stdout
    words = "Muon (1 of 3)", "MuonClip (2 of 3)", "AdamW (3 of 3)", "left,", "compiling"
    for word in words:
        assert word in result.stderr
    assert "validation loss" in result.stderr and "largest logit" in result.stderr
    assert "Muon updates blocks/*/attention/key/kernel" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80  # of a terminal
    assert result.stdout.startswith("reading ")
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
def test_every_optimizer_starts_alike_and_the_clip_fires(comparison):
    results = json.loads((comparison[0] / "results.json").read_text())
    assert set(results) == {"adamw", "muon", "muonclip"}
    for history in results.values():
        assert [r["step"] for r in history] == [4, 8, 12]
        assert history[-1]["validation_loss"] < history[0]["validation_loss"]
    assert results["muonclip"][-1]["clipped"] > 0 == results["muon"][-1]["clipped"]
    assert results["muonclip"][-1]["max_logit"] < results["muon"][-1]["max_logit"]


CRASHES = {
    "after the checkpoint of step 8": """
batch = corpus.Corpus.batch
def failing(self, *shape, seed, step):
    return os._exit(9) if step == 9 else batch(self, *shape, seed=seed, step=step)
corpus.Corpus.batch = failing
""",
    # Which is written by another thread, while the steps go on.
    "amid that checkpoint": """
save = checkpoints.Checkpoints.save
def killed(self, step, *rest):
    save(self, step, *rest)
    if step == 8:
        os.kill(os.getpid(), 9)
checkpoints.Checkpoints.save = killed
""",
}


@pytest.mark.more
@pytest.mark.parametrize("crash", CRASHES)
def test_resumed_run_has_the_same_losses(comparison, text, tmp_path, crash):
    arguments = [*SMALL, "--data", text, "--threshold", "0.01"]
    arguments += ["--optimizer", "muonclip", "--out", tmp_path / "run"]
    crashed = run_changed(CRASHES[crash], *arguments)
    assert crashed.returncode in (9, -9), crashed.stderr
    assert not (tmp_path / "run" / "results.json").exists()
    run("train_lm.py", *arguments, "--resume")
    resumed = json.loads((tmp_path / "run" / "results.json").read_text())["muonclip"]
    straight = json.loads((comparison[0] / "results.json").read_text())["muonclip"]
    for key in ("step", "loss", "validation_loss", "max_logit", "clipped"):
        assert [r[key] for r in resumed] == [r[key] for r in straight]


@pytest.mark.more
def test_resuming_where_nothing_has_begun_is_refused(tmp_path):
    result = run("train_lm.py", "--out", tmp_path / "no", "--resume", check=False)
    assert result.returncode == 1 and "nothing to resume in" in result.stderr


@pytest.mark.more
def test_resuming_with_other_settings_is_refused(comparison, text):
    arguments = [*SMALL, "--data", text, "--out", comparison[0], "--resume"]
    arguments += ["--threshold", "7"]
    result = run("train_lm.py", *arguments, check=False)
    assert result.returncode and "--threshold was 0.01, is 7.0" in result.stderr


@pytest.mark.more
@pytest.mark.parametrize(
    "content, options, message",
    [
        more(None, [], "no such file"),
        ("short", [], "has 5 bytes, too few for context 16"),
    ],
)
def test_unusable_text_is_refused(tmp_path, content, options, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content)
    arguments = [*SMALL, "--data", file, "--out", tmp_path / "run"]
    result = run("train_lm.py", *arguments, check=False)
    assert result.returncode and message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.more
@pytest.mark.parametrize(
    "step", [6, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 11))]
)
def test_an_interruption_says_what_is_saved(text, tmp_path, step):
    """Muon is done, MuonClip saves at 4, 8 and 12, and AdamW has not begun."""
    arguments = [*SMALL, "--data", text, "--out", tmp_path / "run"]
    change = f"""
batch, calls = corpus.Corpus.batch, []
def interrupted(self, *shape, **at):
    calls.append(at)
    if len(calls) > 12 + {step}:
        raise KeyboardInterrupt
    return batch(self, *shape, **at)
corpus.Corpus.batch = interrupted
"""
    result = run_changed(change, *arguments)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    saved = step // 4 * 4
    place = f"saved at step {saved} of 12" if saved else "nothing is saved"
    said = f"muon: done, muonclip: {place}, adamw: nothing is saved"
    assert f"stopped. {said}. To go on from there: " in result.stderr
    assert f"--out {tmp_path / 'run'} --resume" in result.stderr
    resumed = run("train_lm.py", *arguments, "--resume")
    assert f"going on. {said}\n" in resumed.stdout
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for history in results.values():
        assert [record["step"] for record in history] == [4, 8, 12]


@pytest.mark.more
def test_an_interruption_before_the_first_checkpoint_says_so(text, tmp_path):
    change = """
def interrupted(*_, **__):
    raise KeyboardInterrupt
corpus.Corpus.batch = interrupted
"""
    result = run_changed(change, *SMALL, "--data", text, "--out", tmp_path)
    assert result.returncode == 1 and "--resume" not in result.stderr
    assert "stopped before the first checkpoint: nothing is saved" in result.stderr


def test_arguments_are_answered_before_jax_is_imported():
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = ["train_lm.py", "--stops=3"]
import train_lm
try:
    train_lm.main()
finally:
    assert not {{"jax", "numpy"}} & {{*sys.modules}}
"""
    result = run_script("-c", script, check=False)
    assert result.returncode == 2 and "unrecognized arguments: --stops" in result.stderr


@pytest.mark.more
def test_linen_example():
    result = run("train_lm_linen.py", "--steps", "6", "--batch-size", "4")
    assert "max logit" in result.stdout


@pytest.mark.parametrize("size", [1000, 100_000, 2_000_000])
def test_held_out_text_is_not_trained_on(tmp_path, size):
    (tmp_path / "text").write_bytes(bytes(size))
    corpus = Corpus(tmp_path / "text")
    assert len(corpus.train) + len(corpus.validation) == size
    assert size / 32 < len(corpus.validation) < size / 15  # one piece of 16


def curve(*losses, logit=1.0):
    records = enumerate(losses, 1)
    return [
        {"step": 10 * i, "validation_loss": loss, "max_logit": logit, "clipped": 0}
        for i, loss in records
    ]


def test_the_sentence_says_what_was_won():
    results = {
        "muon": curve(3.0, 2.0, 1.0, logit=14.0),
        "muonclip": curve(3.0, 2.0, 1.0, logit=9.0),
        "adamw": curve(3.0, 2.5, 1.5),
    }
    said = summary(results, threshold=8.0)
    assert "final loss after 25 of 30 steps (83%) and ended 0.50 nats lower" in said
    assert "No attention logit exceeded 8: QK-Clip changed nothing." in said
    results["muonclip"][1]["clipped"] = 4
    said = summary(results, threshold=8.0)
    assert "QK-Clip at 8 scaled heads 4 times" in said
    assert "the largest attention logit was 9.0, without the clip 14.0" in said
    slower = results | {"muon": curve(3.0, 2.9, 2.8)}
    assert "did not reach AdamW's final loss in 30" in summary(slower, threshold=8.0)
    assert summary({"muon": results["muon"]}, threshold=8.0) == ""
