"""Text as bytes: this Python's own library by default, or any file."""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np


VOCABULARY = 256  # bytes
_PIECE = 1 << 16  # every 16th piece of 64 KiB, or less of a short text, is held out


class Corpus:
    """Training and validation text, and batches that depend on the step alone."""

    def __init__(self, file: Path | None = None):
        text = np.frombuffer(
            file.read_bytes() if file else standard_library(), np.uint8
        )
        self.size = len(text)
        piece = min(_PIECE, -(-len(text) // 16))
        held_out = np.arange(len(text)) // max(piece, 1) % 16 == 15
        self.train, self.validation = text[~held_out], text[held_out]

    def batch(
        self,
        size: int,
        context: int,
        *,
        seed: int,
        step: int,
        rows: slice = slice(None),
    ) -> np.ndarray:
        """Returns `(size, context + 1)` bytes; the same for the same seed and step.

        Of several processes, each asks for its own `rows` of the batch.
        """
        generator = np.random.default_rng((seed, step))
        return self._windows(self.train, size, context, generator, rows)

    def validation_batches(
        self, count: int, size: int, context: int
    ) -> list[np.ndarray]:
        generator = np.random.default_rng(0)
        return [
            self._windows(self.validation, size, context, generator)
            for _ in range(count)
        ]

    def _windows(
        self,
        text: np.ndarray,
        size: int,
        context: int,
        generator,
        rows: slice = slice(None),
    ) -> np.ndarray:
        """Cuts `(size, context + 1)` bytes out of the text at random places."""
        if len(text) < context + 2:
            raise SystemExit(
                f"the text has {self.size} bytes, too few for context {context}: "
                f"{len(self.validation)} of them are held out, and what is trained on "
                f"needs {context + 2}, as does what is held out"
            )
        starts = generator.integers(0, len(text) - context - 1, size)[rows]
        return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def standard_library() -> bytes:
    """The library's sources and the language reference, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not skipped.intersection(file.relative_to(root).parts)
    ]
    reference = [topics[name].encode() for name in sorted(topics)]
    return b"\n".join([file.read_bytes() for file in files] + reference)
