"""Muon: gradients to momentum to update.

In: gradients, state, options. Out: updates.
Imports `_parameters`, `_layout`, `_matrices`, `_mesh` and `_newton_schulz`.
"""
