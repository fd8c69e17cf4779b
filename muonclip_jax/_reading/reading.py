"""`read_model`: what a function does with every parameter."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from .._model.attention_layers import AttentionLayer
from .._parameters import paths
from .._parameters.dimension_numbers import resolve_verdicts
from . import jaxprs
from .head_leaves import named_layers, NamedLayer
from .layers import attention_layers
from .verdicts import Verdict, verdicts
from .walk import Walk, walked


@dataclasses.dataclass(frozen=True)
class ModelReading:
    """What a function does with every parameter: the result of [`read_model`][].

    Printed, it is a table with the file and line where each leaf is used, and what
    names would say of it where that is something else. Below are the attention layers:
    where their logits are, and what [`qk_clip`][] can scale.

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
    # The arrays among the params, as shapes, and what was found of each; of attention,
    # what can be scaled and what cannot; and operations that may hide more of it.
    _tree: paths.PathedTree = dataclasses.field(repr=False)
    _verdicts: tuple[Verdict, ...] = dataclasses.field(repr=False)
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
        rows = [["path", "shape", "label", "inputs > outputs", "use", "line"]]
        for path, leaf, v in zip(
            self._tree.paths, self._tree.leaves, self._verdicts, strict=True
        ):
            label, line = v.label + ("" if v.is_known else "?"), v.line or "-"
            shape, axes = tuple(leaf.shape), _axes(v.numbers, len(leaf.shape))
            rows.append([paths.show(path), str(shape), label, axes, v.use, line])
        if any(by_name := self._by_name()):
            for row, said in zip(rows, ["names say", *by_name], strict=True):
                row.append(said)
        lines = _aligned(rows)
        if self._layers:
            columns = ["attention", "heads", "logits", "QK-Clip scales"]
            lines += ["", *_aligned([columns, *map(_layer_row, self._layers)])]
        hidden = [
            f"{what}: what it does with activations cannot be read; if it is "
            "attention, its logits are unknown"
            for what in self._hidden
        ]
        return "\n".join(lines + ([""] if hidden else []) + hidden)

    def _by_name(self) -> list[str]:
        """What the names of each leaf say of it, where that is something else."""
        # Leaves that names leave open are described: by the reading.
        tree = self._tree
        named = resolve_verdicts(None, tree, described=tree.paths)
        found = []
        for leaf, read, name in zip(tree.leaves, self._verdicts, named, strict=True):
            axes = [_axes(v.numbers, len(leaf.shape)) for v in (read, name)]
            said = "nothing" if name.is_open else f"{axes[1]} ({name.why})"
            is_same = axes[0] == axes[1] and not name.is_open
            found.append("" if is_same or not read.is_known else said)
        return found


def read_model(
    fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any
) -> ModelReading:
    """Reads off a function's trace what it does with every parameter.

    The function is traced on shapes alone: nothing runs, and no memory is needed. What
    activations are contracted with is a matrix; contracted axes are its inputs, free
    ones its outputs, and batch, scanned and indexed axes a stack. What is looked up is
    an embedding, what picks experts a router, what makes nothing but the output a head,
    and what is added or multiplied elementwise a vector. Attention is a product of two
    activations, both made by parameters, whose softmax weighs others.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, a loss or any function that runs the
        forward pass, with whatever it returns.
    - `params`: a pytree of arrays or `jax.ShapeDtypeStruct`, or a module of NNX or
        Equinox; leaves that are no arrays stay as they are.
    - `args`, `kwargs`: of the function. Arrays and shapes are traced, all else is
        passed as it is.

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
    return read_call(call_of(fun, params, args, kwargs)).reading


class Call(NamedTuple):
    """A function as the jaxpr of the arrays among its arguments, parameters first."""

    tree: paths.PathedTree  # the parameters
    arrays: list[int]  # which of its leaves are arrays
    body: jaxprs.Inner
    values: list[Any]  # what to run it on
    # What the function returns, of the jaxpr's outputs.
    outputs: Callable[[Sequence[Any]], Any]


def call_of(fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Call:
    """Traces a function; what is no array among its arguments stays as it is."""
    # Whoever has a module of NNX has imported Flax: nobody else needs it.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module):
        return _call_of_module(nnx, fun, params, args, kwargs)
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
        # No tracer is kept: it would outlive its trace.
        returned[:] = (
            structure,
            made,
            [None if i in made else x for i, x in enumerate(out)],
        )
        return [out[i] for i in made]

    def outputs(values: Sequence[Any]) -> Any:
        structure, made, out = returned
        for i, x in zip(made, values, strict=True):
            out[i] = x
        return structure.unflatten(out)

    values = [tree.leaves[i] for i in arrays] + [others[i] for i in data]
    body = jaxprs.trace(of_arrays, *values)
    return Call(tree, arrays, body, values, outputs)


def _call_of_module(nnx: Any, fun: Any, module: Any, args: Any, kwargs: Any) -> Call:
    """As a function of its parameters that returns all other state of it, too.

    Statistics, counters and keys that the function changes are given to the module.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def of_parts(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        merged = nnx.merge(graph, params, rest)
        out = fun(merged, *args, **kwargs)
        return out, nnx.split(merged, nnx.Param, ...)[2]

    call = call_of(of_parts, params, (rest, *args), kwargs)

    def outputs(values: Sequence[Any]) -> Any:
        out, rest = call.outputs(values)
        nnx.update(module, rest)
        return out

    return call._replace(outputs=outputs)


class Read(NamedTuple):
    """A reading, the walk that it is of, its attention layers, and what may be one."""

    reading: ModelReading
    walk: Walk
    layers: tuple[NamedLayer, ...]
    hidden: tuple[str, ...]


def read_call(call: Call) -> Read:
    tree = call.tree
    shown = tree._replace(
        paths=tuple(tree.paths[i] for i in call.arrays),
        leaves=tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in (tree.leaves[i] for i in call.arrays)
        ),
    )
    shapes = [tuple(map(int, x.shape)) for x in shown.leaves]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in shown.leaves]
    walk, outs = walked(call.body, shapes, is_float)
    layers = attention_layers(walk)
    heads_at = set().union(*(layer.axes for layer in layers))
    found = verdicts(walk, outs, is_float, heads_at)
    numbers: list[Any] = [None] * len(tree.leaves)
    labels: list[Any] = [None] * len(tree.leaves)
    for i, verdict in zip(call.arrays, found, strict=True):
        numbers[i], labels[i] = verdict.numbers, verdict.label
    named = tuple(named_layers(layers, shown.paths, shapes))
    hidden = dict.fromkeys(
        f"{n.eqns[-1].primitive.name} at {jaxprs.line(n.eqns)}"
        for n in walk.notes
        if n.kind == "hidden"
    )
    unknown = zip(shown.paths, found, strict=True)
    reading = ModelReading(
        tree.unflatten(numbers),
        tree.unflatten(labels),
        tuple(n.layer for n in named if n.layer is not None),
        tuple(paths.show(path) for path, v in unknown if not v.is_known),
        shown,
        tuple(found),
        named,
        tuple(hidden),
    )
    return Read(reading, walk, named, tuple(hidden))


# The table.


def _layer_row(named: NamedLayer) -> list[str]:
    found = named.found[0]
    lines = ", ".join(dict.fromkeys(layer.line for layer in named.found))
    scaled = f"nothing: {named.refusal}"
    if layer := named.layer:
        # Keys that heads share are a key to QK-Clip, which leaves them alone.
        key = "key" if found.key else "the key stays:"
        roles = [
            ("query", layer.query),
            (key, layer.key),
            ("by the whole", layer.rotary_query),
        ]
        scaled = "; ".join(
            f"{role} {', '.join(dict.fromkeys(leaf.path for leaf in leaves))}"
            for role, leaves in roles
            if leaves
        )
    return [paths.show_module(named.path), str(named.heads), lines, scaled]


def _axes(numbers: MuonDimensionNumbers | None, rank: int) -> str:
    if numbers is None:
        return "-"
    sides = (numbers.reduction_axis, numbers.output_axis)
    as_axes = ((x,) if isinstance(x, int) else x for x in sides)
    return " > ".join(", ".join(str(i % rank) for i in axes) for axes in as_axes)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
