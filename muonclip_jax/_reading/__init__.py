"""Reading a model from its trace: what a function does with every parameter.

In: a function and its arguments, as shapes. Out: verdicts, attention layers, logits.
Imports `_attention`, `_model`, `_parameters` (paths, names), and what is below these.

`primitives` is the table of all primitives, with `back` for marks and `values` for
known numbers. `graph` finds the equation that made a variable, through loops and calls,
`numbers` the indices that are known, and `facts` what each is made of. From there marks
are followed back (`marks`): from the softmax to the parameters that scale its logits
(`softmaxes`, `heads_of_products`, `scaling`, `cells`, `parts`, `attention`) and from
every product to the axes of its weight (`uses`). `verdicts` gives each parameter its
label by what was noted. Fused attention is read by its rule (`kernels`). `recorded`
runs the jaxpr again, with the maximum of the logits where they enter the softmax
(`sites`).
"""
