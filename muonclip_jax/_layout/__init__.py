"""Where the leaves of a tree are: on a mesh, as blocks of whole leaves, or at hand.

In: params or updates, what the user says of them (`shardings=`, `axis_name=`).
Out: one `Layout`, which statistics, masks, norms and means ask.
Imports `_parameters` (paths, prefixes) and `_matrices`.
"""
