"""Trains the runs that an experiment asks for, once, on every core at a time."""

import concurrent.futures
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from .run import Run
from .texts import text


Result = Mapping[str, Any]
Key = TypeVar("Key")


# Workers keep their memory: fresh pages would cost a third of a step. They have one
# arena, for glibc returns what it maps for others, and huge pages where Linux has them.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "200000000",
}


class Unfinished(Exception):
    """Runs are missing, and this lab trains none."""


class Lab:
    """Results by run, kept as JSON lines in one file for each experiment.

    A line is written as soon as its run ends, so that an interrupted experiment goes on
    where it stopped. Runs that experiments share are trained once, and those in the
    file `known`, another lab's, not at all. A run on a text that has changed since is
    another run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        known: Path | None = None,
        environment: str = "",
        trains: bool = True,
    ):
        self.trains = trains
        self._folder, self._environment = folder, environment
        self._results: dict[str, Result] = {}
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        for file in [*([known] if known else []), *sorted(folder.glob("*.jsonl"))]:
            self._results |= {line["run"]: line for line in _lines(file)}
        self.open("results")

    def open(self, experiment: str) -> None:
        """Further results belong to this experiment."""
        self._experiment = experiment

    def results(self, runs: Iterable[Run], kept_in: str = "") -> list[Result]:
        """Trains what has not been trained; results in the order of the runs.

        New results go to the file of the experiment, or to that of the name given.
        """
        runs, file = list(runs), kept_in or self._experiment
        missing = {run.key: run for run in runs if not self._has(run)}
        if missing and not self.trains:
            raise Unfinished(f"{len(missing)} runs are missing")
        if missing:
            self._train(list(missing.values()), file)
        return [self._results[run.key] for run in runs]

    def gather(self, runs: Mapping[Key, Iterable[Run]]) -> dict[Key, list[Result]]:
        """Returns the results of several lists of runs, all trained together."""
        lists = {key: list(of_key) for key, of_key in runs.items()}
        self.results(run for of_key in lists.values() for run in of_key)
        return {key: self.results(of_key) for key, of_key in lists.items()}

    def tried(self) -> list[tuple[Result, Result]]:
        """The settings and the result of every run that is kept; none is trained."""
        return [
            (json.loads(key), result)
            for key, result in self._results.items()
            if "curve" in result
        ]

    def once(self, name: str, measure: Callable[[], Result]) -> Result:
        """What `measure` returns, kept like the results of runs."""
        if name not in self._results:
            if not self.trains:
                raise Unfinished(f"{name} is missing")
            self._keep(name, measure(), self._experiment)
        return self._results[name]

    def environments(self) -> list[str]:
        """Commits, versions and machines that the results come from."""
        return sorted({r["environment"] for r in self._results.values()})

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _has(self, run: Run) -> bool:
        found = self._results.get(run.key)
        # A task of reinforcement learning reads no text.
        return found is not None and bool(
            run.task or text(run.corpus).was_read(found["text"])
        )

    def _train(self, runs: Sequence[Run], file: str) -> None:
        # The longest first, to end together; neighbors differ in what they compile.
        runs = sorted(runs, key=lambda run: (-run.tokens * run.width, run.seed))
        futures = {self._workers().submit(_work, run): run for run in runs}
        with tqdm(total=len(runs), desc=file, unit="run") as bar:
            for future in concurrent.futures.as_completed(futures):
                result = future.result()
                self._keep(futures[future].key, result, file)
                bar.update()
                bar.set_postfix_str(f"loss {losses([result])[0]:.4f}")

    def _keep(self, key: str, result: Result, file: str) -> None:
        line = {"run": key, **result, "environment": self._environment}
        self._results[key] = line
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{file}.jsonl").open("a+b") as lines:
            lines.seek(max(0, lines.tell() - 1))
            cut_off = lines.read() not in (b"", b"\n")  # by an interruption
            lines.write(b"\n" * cut_off + json.dumps(line).encode() + b"\n")

    def _workers(self) -> concurrent.futures.ProcessPoolExecutor:
        if not self._pool:
            os.environ.update(_ENVIRONMENT)  # which processes read when they start
            context = multiprocessing.get_context("spawn")
            cores = context.Queue()
            count = len(_allowed_cores()) or os.cpu_count() or 1
            for core in range(count):
                cores.put(core)
            self._pool = concurrent.futures.ProcessPoolExecutor(
                count, context, _settle, (cores,)
            )
        return self._pool


def losses(results: Iterable[Result], part: str = "report") -> list[float]:
    """Returns final losses in nats per byte; infinite if a run diverged."""
    place = 1 if part == "tune" else 2
    ends = [result["curve"][-1][place] for result in results]
    return [loss if math.isfinite(loss) else math.inf for loss in ends]


def _settle(cores: Any) -> None:
    """A worker keeps to one core, with one thread: the runs are what is parallel."""
    os.environ["NPROC"] = "1"
    if allowed := _allowed_cores():
        os.sched_setaffinity(0, {allowed[cores.get() % len(allowed)]})


def _allowed_cores() -> list[int]:
    """Those that `taskset` leaves, where the system knows of such."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def _work(run: Run) -> Result:
    from .reinforcement import play
    from .training import train

    return play(run) if run.task else train(run)


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by an interruption
