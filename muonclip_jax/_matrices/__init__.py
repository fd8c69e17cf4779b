"""Leaves as stacks of matrices, and back.

In: leaves and the axes of their matrices. Out: stacks `(count, m, n)`, by a plan.
Imports no other wing.
"""
