"""Checkpoints of model, optimizer and history with Orbax."""

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx


class Checkpoints:
    """The newest checkpoint of one run, and the settings it was made with.

    A run that is not resumed starts afresh; what lay in its folder is moved aside.
    """

    def __init__(self, folder: Path, settings: dict[str, str], *, resume: bool):
        self._settings = settings
        if folder.exists() and not resume:
            _move_aside(folder)
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    def save(
        self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, history
    ) -> None:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_pure(model, optimizer)),
            log=ocp.args.JsonSave({"settings": self._settings, "history": history}),
        )
        self._manager.save(step, args=arguments)

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[int, list]:
        """Loads the newest checkpoint in place; returns its step and history."""
        step = self._manager.latest_step()
        if step is None:
            return 0, []
        log = self._restore(step, log=ocp.args.JsonRestore())["log"]
        _check_same(log["settings"], self._settings)
        wanted = ocp.args.StandardRestore(_pure(model, optimizer))
        state = self._restore(step, state=wanted)["state"]
        nnx.update(model, state["model"])
        nnx.update(optimizer, state["optimizer"])
        return step, log["history"]

    def _restore(self, step: int, **items: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))


def _pure(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    return {
        "model": nnx.to_pure_dict(nnx.state(model)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }


def _check_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
    differing = [
        f"--{name.replace('_', '-')} was {saved.get(name)}, is {value}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if differing:
        raise SystemExit("cannot resume with other settings: " + "; ".join(differing))


def _move_aside(folder: Path) -> None:
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    shutil.move(folder, target)
