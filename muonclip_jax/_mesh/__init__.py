"""The owner of each matrix on a mesh, and the exchanges there and back.

In: leaves sharded over a mesh, their specs, a solver. Out: the same leaves, orthogonal.
Imports `_layout`, `_matrices`, and of `_newton_schulz` the solver.
"""
