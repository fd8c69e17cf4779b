"""The corpora: source code, prose, or any file; to train, to tune and to report on."""

import functools
import hashlib
import lzma
from pathlib import Path

import numpy as np


VOCABULARY = 256  # bytes
CORPORA = {"code": "Python's standard library", "prose": "six novels by Jane Austen"}
# A check of what the others decided: nothing was chosen by its losses.
CHECK = {"drama": "plays by Shakespeare"}
HELD_OUT = dict(tune=7, report=15)
# Files, so that any machine and Python reads what the kept runs read.
_FILES = {
    "code": "python.txt.xz",
    "prose": "austen.txt.xz",
    "drama": "shakespeare.txt.xz",
}
# Runs until November 2026 read the library where it was installed, with the paths of
# that place: in 88 places, where there are others as long now (of 11.5 million bytes).
_AS_INSTALLED = {"2b98afeb4afa": "296700fcd4db"}
_PIECE = 1 << 16  # of 16 pieces of 64 KiB, or less of a short text


class Text:
    """Bytes in parts: what is tuned on one is reported on another.

    Of every 16 pieces, `held_out` names those that are not trained on.
    """

    def __init__(self, corpus: str, **held_out: int):
        content = _read(corpus)
        self.digest = hashlib.sha256(content).hexdigest()[:12]
        text = np.frombuffer(content, np.uint8)
        piece = max(1, min(_PIECE, -(-len(text) // 16)))
        place = np.arange(len(text)) // piece % 16
        self.parts = {name: text[place == i] for name, i in held_out.items()}
        self.train = text[~np.isin(place, list(held_out.values()))]

    def was_read(self, digest: str) -> bool:
        """Whether a run with this digest has read the same text."""
        return _AS_INSTALLED.get(digest, digest) == self.digest

    def batch(self, size: int, context: int, seed: int, step: int) -> np.ndarray:
        """Returns `(size, context + 1)` bytes; the same for the same seed and step."""
        return windows(self.train, size, context, np.random.default_rng((seed, step)))

    def held_out(self, part: str, size: int, context: int) -> np.ndarray:
        """Returns the same windows for every run, so that losses can be paired."""
        return windows(self.parts[part], size, context, np.random.default_rng(0))


@functools.cache
def text(corpus: str) -> Text:
    return Text(corpus, **HELD_OUT)


def windows(
    text: np.ndarray, size: int, context: int, generator: np.random.Generator
) -> np.ndarray:
    """Cuts `(size, context + 1)` bytes out of the text at random places."""
    if len(text) < context + 2:
        raise SystemExit(
            f"the text has {len(text)} bytes, too few for context {context}"
        )
    starts = generator.integers(0, len(text) - context - 1, size)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _read(corpus: str) -> bytes:
    known = Path(__file__).parent / _FILES[corpus] if corpus in _FILES else None
    file = known or Path(corpus)
    content = file.read_bytes()
    return lzma.decompress(content) if file.suffix == ".xz" else content
