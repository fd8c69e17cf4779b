"""All functions that were written to mislead a reading, by name."""

import adversaries_attention as adversaries_attention
import adversaries_kernels as adversaries_kernels
from pieces_of_cases import CASES as CASES
