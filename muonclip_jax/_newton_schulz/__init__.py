"""Newton-Schulz: a stack of matrices in, orthogonal ones out.

In: `(..., m, n)`, either side longer, and a `Solver`. Out: the same shape.
Imports no other wing. Others make a `Solver` and put it `on_its_platform`.
"""
