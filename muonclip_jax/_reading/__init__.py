"""Reading a model from its trace: what a function does with every parameter.

`walk` follows the arrays of a jaxpr by the `rules` of its primitives; what it notes of
each parameter is a verdict in `uses`, of each softmax an attention layer in `layers`.
"""
