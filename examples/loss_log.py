"""The losses of a run, one line of JSON per step."""

import json
import os
from pathlib import Path
from typing import Any

import jax


class LossLog:
    """Appends to a file, of which the first `steps` lines stay.

    A run that was killed has logged steps that its last checkpoint has not seen, the
    last line perhaps in part. Resumed, it logs them again. Of several processes, the
    first writes.
    """

    def __init__(self, file: Path, steps: int):
        self._file = file
        if jax.process_index() == 0:
            self._cut(steps)

    def _cut(self, steps: int) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        lines = self._file.read_bytes().splitlines(keepends=True)
        os.truncate(self._file, sum(map(len, lines[:steps])))

    def append(self, records: list[dict[str, Any]]) -> None:
        if jax.process_index() > 0:
            return
        with self._file.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
