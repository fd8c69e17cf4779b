"""All functions that were written to mislead a reading, by name."""

import adversaries_attention as adversaries_attention
from pieces_of_cases import CASES as CASES
