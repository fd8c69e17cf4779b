"""`read_model`: how a function uses every parameter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._model.model_reading import ModelReading
from .._options import shown
from .._parameters import paths
from .._parameters.dimension_numbers import completed
from .attention import attention_layers
from .fact import members
from .facts import Facts
from .graph import Graph
from .named_layers import named_layers, NamedLayer
from .softmaxes import Softmaxes
from .suspicion import suspicions
from .traced_call import Call, call_of, check_function
from .uses import Uses
from .verdicts import doubted, verdicts


def read_model(
    fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any
) -> ModelReading:
    """Traces a function and finds how it uses every parameter.

    The function is traced on shapes alone: nothing runs, and no memory is needed. A
    parameter is a matrix if activations are contracted with it; contracted axes are its
    inputs, free axes its outputs, and batch, scanned and indexed axes a stack. It is an
    embedding if it is looked up, a router if it picks experts, a head if only the
    output depends on its products, and a vector if it is added or multiplied
    elementwise. Attention is a product of two activations that depend on parameters,
    whose softmax weighs other activations.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, a loss or any function that runs the
        forward pass, with whatever it returns.
    - `params`: a pytree of arrays or `jax.ShapeDtypeStruct`, or a module of NNX or
        Equinox; leaves that are no arrays stay as they are.
    - `args`, `kwargs`: of the function. Arrays and shapes are traced; other arguments
        are passed unchanged. Dimensions may be symbolic, as
        `jax.export.symbolic_shape` makes them.

    **Returns:** a [`ModelReading`][].

    **Raises:** what the function raises on these shapes. Anything that cannot be read
    is not an error but listed in `unknown` or `refused`, with file and line.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> def loss(params, tokens):
        ...     x = params["embed"][tokens]
        ...     return jnp.mean(jax.nn.relu(x @ params["up"]) @ params["down"])
        >>> shapes = {"embed": (100, 8), "up": (8, 32), "down": (32, 8)}
        >>> params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
        >>> reading = mc.read_model(loss, params, jnp.zeros((2, 5), int))
        >>> reading.labels
        {'down': 'head', 'embed': 'embedding', 'up': 'matrix'}
        >>> reading.dimension_numbers["up"]
        MuonDimensionNumbers(reduction_axis=0, output_axis=1)
    """
    check_function(fun)
    given = jax.tree.leaves(paths.params_of(params))
    arrays = filter(paths.is_array, given)
    if given and not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        raise ValueError(
            f"read_model needs params that are floats, got {shown(params)}: call "
            "read_model(loss, params, *batch)"
        )
    with call_of(fun, params, *args, **kwargs) as call:
        if call.arrays and not _is_of_params(call):
            raise ValueError(
                "nothing that the function returns depends on its params: it must use "
                "the params that it is given, and return the loss"
            )
        reading, *others = (
            read_call(call._replace(body=body))[0]
            for body in [twin.body for twin in call.twins] or [call.body]
        )
    if any(other != reading for other in others):
        raise ValueError(
            "the function is read in two ways at two sizes of its symbolic dimensions: "
            "read it at the size that it runs at"
        )
    return reading


def _is_of_params(call: Call) -> bool:
    """Whether anything that the function returns depends on its parameters."""
    jaxpr = call.original.jaxpr
    dependent = {*map(id, jaxpr.invars[: len(call.arrays)])}
    for eqn in jaxpr.eqns:
        if not dependent.isdisjoint(map(id, eqn.invars)):
            dependent.update(map(id, eqn.outvars))
    return not dependent.isdisjoint(map(id, jaxpr.outvars))


def read_call(call: Call) -> tuple[ModelReading, list[NamedLayer], list[str]]:
    """Returns the reading; for the recorder, all layers and what may hide more."""
    tree = call.tree
    arrays = [(tree.paths[i], tree.leaves[i]) for i in call.arrays]
    shown = tree._replace(
        paths=tuple(path for path, _ in arrays),
        leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in arrays),
    )
    shapes = [tuple(map(int, x.shape)) for _, x in arrays]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for _, x in arrays]
    graph = Graph(call.body, is_float)
    tokens: frozenset[int] = frozenset()
    while True:
        # A parameter that is looked up or added to activations is no weight where it
        # meets another parameter: a kernel makes keys from learned queries. The first
        # pass finds such parameters.
        softmaxes = Softmaxes(graph, Facts(graph, tokens))
        layers, frozen_layers = attention_layers(softmaxes)
        uses = Uses(softmaxes, tokens)
        found_tokens = uses.parameters_of("elementwise", "looked up")
        found_tokens &= uses.parameters_of("factor")
        found_tokens |= {i for layer in layers for i in layer.tokens}
        if found_tokens <= tokens:
            break
        tokens |= found_tokens
    refused, unclipped = suspicions(softmaxes, [*layers, *frozen_layers])
    layers += refused
    frozen = softmaxes.frozen, {*members(softmaxes.facts.choosing)}
    leaf_verdicts = verdicts(uses, softmaxes.facts.outputs, shapes, is_float, *frozen)
    leaf_verdicts = doubted(shown.paths, shapes, completed(shown, leaf_verdicts))
    by_leaf = dict(zip(call.arrays, leaf_verdicts, strict=True))
    tree_verdicts = [by_leaf.get(i) for i in range(len(tree.leaves))]
    named = named_layers(layers, shown.paths, shapes)
    not_clipped = named_layers([*frozen_layers, *unclipped], shown.paths, shapes)
    hidden = list(dict.fromkeys(f"{eqn.name} at {eqn.line}" for eqn in uses.hidden))
    unread = [p for p, _, v in shown.rows(leaf_verdicts) if v.source == "unread"]
    reading = ModelReading(
        tree.unflatten((v and v.is_known and v.numbers) or None for v in tree_verdicts),
        tree.unflatten(v and v.label for v in tree_verdicts),
        tuple(n.layer for n in named if n.layer is not None),
        tuple(map(paths.show, unread)),
        tuple(x.read(shown.paths).where for x in not_clipped),
        tuple(x.read(shown.paths) for x in named),
        # Without the structure, which cannot be pickled; the labels have it.
        shown._replace(treedef=None, axis_names=dict(shown.axis_names)),
        tuple(leaf_verdicts),
        tuple(f"{what}, which may be attention" for what in hidden),
    )
    return reading, named, hidden
