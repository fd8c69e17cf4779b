"""What `reproduce.py` measures: experiments, and what they need to train models.

run -> training -> lab -> one module per experiment -> section -> report.
"""

import sys
from pathlib import Path


# The text, the batches and the miniature of Kimi K2 are those of the examples.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
