"""What each leaf of a parameter tree is: paths, names, shapes, and what they tell.

In: a tree of params. Out: dimension numbers. On the way: paths, one layer of each
stack, Flax's words and order of axes, one verdict by the first rule that applies.
Imports `_matrices` alone.
"""
