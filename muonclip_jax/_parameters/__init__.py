"""Leaves of a parameter tree read by their paths, shapes and axis names.

In: a tree of params. Out: dimension numbers. On the way: paths, one layer of each
stack, Flax's words and order of axes, one verdict by the first rule that applies.
Imports `_matrices` alone.
"""
