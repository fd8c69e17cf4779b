"""The text that the examples of this folder read: Python's language reference."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np


VOCABULARY = 256  # bytes


def batches(steps: int, size: int, context: int) -> Iterator[np.ndarray]:
    """Yields `(size, context + 1)` bytes per step, the same ones in every run."""
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    generator = np.random.default_rng(0)
    for _ in range(steps):
        starts = generator.integers(0, len(text) - context, size)
        yield text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
