"""QK-Clip: scales heads by the statistics of their attention.

In: params, updates, the largest logits of all heads. Out: clipped updates, a state.
Imports `_model`, `_layout`, `_parameters` (paths), and `_matrices` to cut a row.
"""
