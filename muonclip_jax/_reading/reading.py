"""`read_model`: what a function does with every parameter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from .._model.attention_layers import AttentionLayer, ROLES
from .._parameters import paths
from . import jaxprs
from .head_leaves import named_layers, NamedLayer
from .layers import attention_layers
from .nnx_modules import split_module
from .pieces import Shape
from .verdicts import Verdict, verdicts
from .walk import Walk, walked


@dataclasses.dataclass(frozen=True)
class ModelReading:
    """What a function does with every parameter: the result of [`read_model`][].

    Printed, it is a table with the file and line where each leaf is used, and below it
    the attention layers: where their logits are, and what [`qk_clip`][] can scale.

    **Arguments:**

    - `dimension_numbers`: a tree like the params of `MuonDimensionNumbers`, or `None`
        for a leaf that holds no matrix.
    - `labels`: a tree like the params of `"matrix"`, `"embedding"`, `"head"`,
        `"router"` or `"vector"`.
    - `attention`: the layers that QK-Clip can scale.
    - `unknown`: paths of the leaves of which the function tells nothing: it does not
        use them, or an operation hides what it does with them.
    """

    dimension_numbers: Any
    labels: Any
    attention: tuple[AttentionLayer, ...]
    unknown: tuple[str, ...]
    _rows: tuple[tuple[str, Shape, Verdict], ...] = dataclasses.field(repr=False)
    _layers: tuple[NamedLayer, ...] = dataclasses.field(repr=False)
    _hidden: tuple[str, ...] = dataclasses.field(repr=False)

    @property
    def refused(self) -> tuple[str, ...]:
        """Attention that QK-Clip cannot scale by this reading: where, and why."""
        layers = [
            f"{paths.show_module(named.path)} at {named.found[0].line}: {named.refusal}"
            for named in self._layers
            if named.layer is None
        ]
        hidden = [f"{what}, which may be attention" for what in self._hidden]
        return (*layers, *hidden)

    def __str__(self) -> str:
        rows = [("path", "shape", "label", "inputs > outputs", "use", "line")]
        for path, shape, verdict in self._rows:
            mark = "" if verdict.is_known else "?"
            rows.append(
                (
                    path,
                    str(shape),
                    verdict.label + mark,
                    _axes(verdict.numbers),
                    verdict.use,
                    verdict.line or "-",
                )
            )
        lines = _aligned(rows)
        if self._layers:
            lines += ["", *_aligned([_LAYER_COLUMNS, *map(_layer_row, self._layers)])]
        hidden = [
            f"{what}: what it does with activations cannot be read; if it is "
            "attention, its logits are unknown"
            for what in self._hidden
        ]
        return "\n".join(lines + ([""] if hidden else []) + hidden)


def read_model(
    fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any
) -> ModelReading:
    """Reads off a function's trace what it does with every parameter.

    The function is traced on shapes alone: nothing runs, and no memory is needed. What
    activations are contracted with is a matrix; contracted axes are its inputs, free
    ones its outputs, and batch, scanned and indexed axes a stack. What is looked up is
    an embedding, what picks experts a router, what nothing but the output takes a head,
    and what is added or multiplied elementwise a vector. Attention is a product of two
    activations, both made by parameters, whose softmax weighs others.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, a loss or any function that runs the
        forward pass, with whatever it returns.
    - `params`: a pytree of arrays or `jax.ShapeDtypeStruct`, or a module of NNX or
        Equinox; leaves that are no arrays stay as they are.
    - `args`, `kwargs`: of the function. Arrays and shapes are traced, all else is
        handed over as it is.

    **Returns:** a [`ModelReading`][].

    **Raises:** what the function raises on such shapes. What cannot be read is no
    error here but `unknown` or `refused`, which say where it is.

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
    module = split_module(params)
    if module is not None:
        fun, params, args = module.of_parts(fun), module.params, (module.rest, *args)
    return read_call(call_of(fun, params, args, kwargs)).reading


class Call(NamedTuple):
    """A function as the jaxpr of the arrays among its arguments, parameters first.

    **Arguments:**

    - `tree`: the parameters, and `arrays`, which of its leaves are arrays.
    - `body`: the jaxpr.
    - `values`: what to run it on.
    - `outputs`: what the function returns, of the jaxpr's outputs.
    """

    tree: paths.PathedTree
    arrays: list[int]
    body: jaxprs.Inner
    values: list[Any]
    outputs: Callable[[Sequence[Any]], Any]


class Read(NamedTuple):
    """A reading, the walk that it is of, its attention layers, and what may be one."""

    reading: ModelReading
    walk: Walk
    layers: tuple[NamedLayer, ...]
    hidden: tuple[str, ...]


def call_of(fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Call:
    """Traces a function; what is no array among its arguments stays as it is."""
    tree = paths.flatten(params)
    arrays = [i for i, x in enumerate(tree.leaves) if paths.is_array(x)]
    others, treedef = jax.tree.flatten((args, kwargs))
    data = [i for i, x in enumerate(others) if paths.is_array(x)]
    returned: list[Any] = []

    def of_arrays(*flat: Any) -> Any:
        own, rest = list(tree.leaves), list(others)
        for i, x in zip(arrays, flat[: len(arrays)], strict=True):
            own[i] = x
        for i, x in zip(data, flat[len(arrays) :], strict=True):
            rest[i] = x
        args, kwargs = treedef.unflatten(rest)
        out, structure = jax.tree.flatten(fun(tree.unflatten(own), *args, **kwargs))
        made = [i for i, x in enumerate(out) if paths.is_array(x)]
        returned.append(
            (structure, made, [None if i in made else x for i, x in enumerate(out)])
        )
        return [out[i] for i in made]

    def outputs(made_now: Sequence[Any]) -> Any:
        structure, made, out = returned[-1]
        for i, x in zip(made, made_now, strict=True):
            out[i] = x
        return structure.unflatten(out)

    values = [tree.leaves[i] for i in arrays] + [others[i] for i in data]
    body = jaxprs.trace(of_arrays, *values)
    return Call(tree, arrays, body, values, outputs)


def read_call(call: Call) -> Read:
    tree, arrays = call.tree, call.arrays
    leaves = [tree.leaves[i] for i in arrays]
    leaf_paths = [tree.paths[i] for i in arrays]
    shapes = [tuple(map(int, x.shape)) for x in leaves]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    walk, outs = walked(call.body, shapes, is_float)
    layers = attention_layers(walk)
    heads_at = set().union(*(layer.axes for layer in layers))
    found = verdicts(walk, outs, is_float, heads_at)
    numbers: list[Any] = [None] * len(tree.leaves)
    labels: list[Any] = [None] * len(tree.leaves)
    for i, verdict in zip(arrays, found, strict=True):
        numbers[i], labels[i] = verdict.numbers, verdict.label
    named = tuple(named_layers(layers, leaf_paths, shapes))
    shown = [paths.show(path) for path in leaf_paths]
    hidden = dict.fromkeys(
        f"{n.eqns[-1].primitive.name} at {jaxprs.line(n.eqns)}"
        for n in walk.notes
        if n.kind == "hidden"
    )
    reading = ModelReading(
        tree.unflatten(numbers),
        tree.unflatten(labels),
        tuple(n.layer for n in named if n.layer is not None),
        tuple(p for p, v in zip(shown, found, strict=True) if not v.is_known),
        tuple(zip(shown, shapes, found, strict=True)),
        named,
        tuple(hidden),
    )
    return Read(reading, walk, named, tuple(hidden))


_LAYER_COLUMNS = ("attention", "heads", "logits", "QK-Clip scales")


def _layer_row(named: NamedLayer) -> tuple[str, str, str, str]:
    lines = ", ".join(dict.fromkeys(layer.line for layer in named.found))
    if named.layer is None:
        scaled = f"nothing: {named.refusal}"
    else:
        scaled = "; ".join(
            f"{role.replace('_', ' ')} "
            + ", ".join(dict.fromkeys(leaf.path for leaf in getattr(named.layer, role)))
            for role in ROLES
            if getattr(named.layer, role)
        )
    return paths.show_module(named.path), str(named.heads), lines, scaled


def _axes(numbers: MuonDimensionNumbers | None) -> str:
    if numbers is None:
        return "-"
    sides = (numbers.reduction_axis, numbers.output_axis)
    return " > ".join(
        str(s) if isinstance(s, int) else ", ".join(map(str, s)) for s in sides
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
