"""All functions that were written to mislead a reading, by name."""

import adversaries_attention as adversaries_attention
import adversaries_kernels as adversaries_kernels
import adversaries_layers as adversaries_layers
import adversaries_places as adversaries_places
from pieces_of_cases import CASES as CASES
