"""Muon: gradients to momentum to update.

In: gradients, state, options. Out: updates.
Imports `_mesh`, `_newton_schulz`, `_layout`, `_model`, `_parameters` and `_matrices`.
"""
