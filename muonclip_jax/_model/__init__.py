"""What the leaves of a model mean: matrices, along which axes, and heads of attention.

In: a tree of params, or of statistics. Out: axes and layers, by the path of each leaf.
Imports `_matrices` alone.
"""
