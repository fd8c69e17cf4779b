"""Reading a model from its trace: what a function does with every parameter.

`walk` follows the arrays of a jaxpr by rules for its primitives (`rules`, `products`);
what it notes of each parameter is a verdict (`verdicts`), and of each softmax an
attention layer (`layers`). Fused attention is read by a table (`kernels`). `recorded`
runs the jaxpr again, with the maximum of the logits.
"""

# They register what follows arrays through each primitive.
from . import products as products
from . import rules as rules
