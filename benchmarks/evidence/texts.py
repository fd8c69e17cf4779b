"""The corpora: source code, prose, or any file; to train, to tune and to report on."""

import functools
import hashlib
import lzma
from pathlib import Path

import numpy as np
from corpus import existing_file as existing_file
from corpus import standard_library, windows


CORPORA = {"code": "Python's standard library", "prose": "six novels by Jane Austen"}
_PROSE = Path(__file__).parent / "austen.txt.xz"  # in the public domain
_PIECE = 1 << 16  # of 16 pieces of 64 KiB, or less of a short text, two are held out


class Text:
    """Bytes in three parts: what is tuned on one is reported on another."""

    def __init__(self, corpus: str):
        content = _read(corpus)
        self.digest = hashlib.sha256(content).hexdigest()[:12]
        text = np.frombuffer(content, np.uint8)
        piece = max(1, min(_PIECE, -(-len(text) // 16)))
        place = np.arange(len(text)) // piece % 16
        self.tune, self.report = text[place == 7], text[place == 15]
        self.train = text[(place != 7) & (place != 15)]

    def batch(self, size: int, context: int, seed: int, step: int) -> np.ndarray:
        """Returns `(size, context + 1)` bytes; the same for the same seed and step."""
        return windows(self.train, size, context, np.random.default_rng((seed, step)))

    def held_out(self, part: str, size: int, context: int) -> np.ndarray:
        """The same windows for every run, so that losses can be paired."""
        generator = np.random.default_rng(0)
        return windows(getattr(self, part), size, context, generator)


@functools.cache
def text(corpus: str) -> Text:
    return Text(corpus)


def _read(corpus: str) -> bytes:
    if corpus == "code":
        return standard_library()
    if corpus == "prose":
        return lzma.decompress(_PROSE.read_bytes())
    return Path(corpus).read_bytes()
