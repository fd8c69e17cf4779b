"""All functions that were written to mislead a reading, by name."""

import adversaries_alike as adversaries_alike
import adversaries_depth as adversaries_depth
import adversaries_queries as adversaries_queries
import adversaries_softmaxes as adversaries_softmaxes
import adversaries_systems as adversaries_systems
import adversaries_unusual as adversaries_unusual
import adversaries_weights as adversaries_weights
from pieces_of_cases import CASES as CASES
