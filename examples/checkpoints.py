"""Checkpoints of a training state and its history with Orbax."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices


class Checkpoint(NamedTuple):
    step: int
    state: Any
    history: list


class Checkpoints:
    """The newest checkpoints of one run, and the settings it was made with.

    A run that is not resumed starts from scratch; what was in its folder is moved
    aside. Of several processes, all call every method.
    """

    def __init__(
        self, folder: Path, settings: dict[str, str], *, resume: bool, keep: int = 1
    ):
        self._settings = settings
        if not resume:
            move_aside(folder)
        # A run that was killed may leave an unfinished checkpoint. A new one has none,
        # and Orbax's thread that looks for them complains if the process ends at once.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=resume
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        # Closing waits for all processes to finish a save; after an error some may not.
        if error_type is None or jax.process_count() == 1:
            self._manager.close()

    def save(self, step: int, state: Any, history: Sequence = ()) -> None:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            log=ocp.args.JsonSave(
                {"settings": self._settings, "history": list(history)}
            ),
        )
        self._manager.save(step, args=arguments)

    def restore(self, like: Any) -> Checkpoint | None:
        """Loads the newest checkpoint, if there is one.

        `like` is a state with the shapes, dtypes and shardings to restore to; those
        need not be the shardings it was saved from.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        log = self._restore(step, log=ocp.args.JsonRestore())["log"]
        _check_same(log["settings"], self._settings)
        state = self._restore(step, state=ocp.args.StandardRestore(like))["state"]
        return Checkpoint(step, state, log["history"])

    def _restore(self, step: int, **items: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))


def saved_step(folder: Path) -> int:
    """Returns the step of the newest finished checkpoint, 0 if there is none."""
    steps = ocp.utils.checkpoint_steps(folder.absolute()) if folder.exists() else []
    return max(steps, default=0)


def _check_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
    differing = [
        f"--{name.replace('_', '-')} was {saved.get(name)}, is {value}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if differing:
        raise SystemExit("cannot resume with other settings: " + "; ".join(differing))


def move_aside(path: Path) -> None:
    """Renames what an earlier run left: `run.1`, `picture.1.png`."""
    if path.exists() and jax.process_index() == 0:
        number = 1
        name = f"{path.stem}.{{}}{path.suffix}"
        while (target := path.with_name(name.format(number))).exists():
            number += 1
        shutil.move(path, target)
    sync_global_devices(f"moved {path}")
