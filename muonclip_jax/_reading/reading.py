"""`read_model`: what a function does with every parameter."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from .._model.attention_layers import AttentionLayer
from .._options import flag
from .._parameters import paths
from .._parameters.dimension_numbers import resolve_verdicts
from .._parameters.verdict import Verdict
from .._tables import aligned, collapsed, Table, totals
from . import jaxprs
from .layers import attention_layers, named_layers, NamedLayer
from .verdicts import verdicts
from .walk import Walk, walked


@dataclasses.dataclass(frozen=True)
class ModelReading:
    """What a function does with every parameter: the result of [`read_model`][].

    Printed, it is a table with the file and line where each leaf is used, and what
    names would say of it where that is something else. Below are the attention layers:
    where their logits are, and what [`qk_clip`][] can scale; then the parameters of
    each label. Repeated layers share a row, and a notebook shows HTML, as of
    [`describe`][].

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
    def verdicts(self) -> Mapping[paths.Path, Verdict]:
        """What was found of each parameter, by its path."""
        return dict(zip(self._tree.paths, self._verdicts, strict=True))

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

    def table(self, *, collapse: bool = True) -> Table:
        """The table that is printed; `collapse=False` lists every leaf and layer."""
        rows = [["path", "shape", "label", "inputs > outputs", "use", "line"]]
        # What names say where that is something else. Leaves that they leave open are
        # described: by the reading.
        tree, said = self._tree, ["names say"]
        named = resolve_verdicts(None, tree, described=tree.paths)
        own = []
        for path, leaf, v, name in zip(
            tree.paths, tree.leaves, self._verdicts, named, strict=True
        ):
            axes, by_name = (_axes(x.numbers, len(leaf.shape)) for x in (v, name))
            label, shape = v.label + ("" if v.is_known else "?"), str(tuple(leaf.shape))
            rows.append([paths.show(path), shape, label, axes, v.why, v.line or "-"])
            why = name.why.removesuffix("?")
            why = f"{by_name} ({why})" if name.is_known else "nothing"
            is_same = axes == by_name and name.is_known
            said.append("" if is_same or not v.is_known else why)
            own.append((label, math.prod(leaf.shape), 1))
        if any(said[1:]):
            rows = [[*row, of] for row, of in zip(rows, said, strict=True)]
        shown = collapsed if flag("collapse", collapse) else list
        layers = shown([_layer_row(layer) for layer in self._layers])
        attention = [("attention", "heads", "logits", "QK-Clip scales"), *layers]
        hidden = [
            f"{what}: what it does with activations cannot be read; if it is "
            "attention, its logits are unknown"
            for what in self._hidden
        ]
        labels = sorted({label for label, *_ in own})
        by_label = totals(("label", "leaves"), own, labels, "all")
        blocks = [aligned(attention) if layers else [], by_label, hidden]
        return Table.of([rows[0], *shown(rows[1:])], blocks)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


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
    return read_call(call_of(fun, params, args, kwargs))[0]


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
    others, treedef = jax.tree.flatten((args, kwargs))
    given, end = [*tree.leaves, *others], len(tree.leaves)
    at = [i for i, x in enumerate(given) if paths.is_array(x)]
    returned: list[Any] = []

    def of_arrays(*arrays: Any) -> Any:
        flat = list(given)
        for i, x in zip(at, arrays, strict=True):
            flat[i] = x
        args, kwargs = treedef.unflatten(flat[end:])
        out = fun(tree.unflatten(flat[:end]), *args, **kwargs)
        out, structure = jax.tree.flatten(out)
        made = [i for i, x in enumerate(out) if paths.is_array(x)]
        # No tracer is kept: it would outlive its trace.
        kept = [None if i in made else x for i, x in enumerate(out)]
        returned[:] = structure, made, kept
        return [out[i] for i in made]

    def outputs(values: Sequence[Any]) -> Any:
        structure, made, out = returned
        for i, x in zip(made, values, strict=True):
            out[i] = x
        return structure.unflatten(out)

    values = [given[i] for i in at]
    body = jaxprs.trace(of_arrays, *values)
    return Call(tree, [i for i in at if i < end], body, values, outputs)


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


def read_call(call: Call) -> tuple[ModelReading, Walk, list[NamedLayer], list[str]]:
    """A reading, its walk, its attention layers, and operations that may be one."""
    tree = call.tree
    own = [(tree.paths[i], tree.leaves[i]) for i in call.arrays]
    shown = tree._replace(
        paths=tuple(path for path, _ in own),
        leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in own),
    )
    shapes = [tuple(map(int, x.shape)) for _, x in own]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for _, x in own]
    walk, outs = walked(call.body, shapes, is_float)
    layers = attention_layers(walk)
    heads_at = set().union(*(layer.axes for layer in layers))
    found = verdicts(walk, outs, is_float, heads_at)
    by_leaf = dict(zip(call.arrays, found, strict=True))
    every = [by_leaf.get(i) for i in range(len(tree.leaves))]
    named = named_layers(layers, shown.paths, shapes)
    hidden = [
        f"{n.eqns[-1].primitive.name} at {jaxprs.line(n.eqns)}"
        for n in walk.noted("hidden")
    ]
    hidden = list(dict.fromkeys(hidden))
    unknown = zip(shown.paths, found, strict=True)
    reading = ModelReading(
        tree.unflatten(v and v.numbers for v in every),
        tree.unflatten(v and v.label for v in every),
        tuple(n.layer for n in named if n.layer is not None),
        tuple(paths.show(path) for path, v in unknown if not v.is_known),
        shown,
        tuple(found),
        tuple(named),
        tuple(hidden),
    )
    return reading, walk, named, hidden


# The table.


def _layer_row(named: NamedLayer) -> list[str]:
    found, layer = named.found[0], named.layer
    lines = ", ".join(dict.fromkeys(layer.line for layer in named.found))
    scaled = f"nothing: {named.refusal}"
    if layer is not None:
        # Keys that heads share are a key to QK-Clip, which leaves them alone.
        key = "key" if found.key else "the key stays:"
        roles = {
            "query": layer.query,
            key: layer.key,
            "by the whole": layer.rotary_query,
        }
        scaled = "; ".join(
            f"{role} {', '.join(dict.fromkeys(leaf.path for leaf in leaves))}"
            for role, leaves in roles.items()
            if leaves
        )
    return [paths.show_module(named.path), str(found.heads), lines, scaled]


def _axes(numbers: MuonDimensionNumbers | None, rank: int) -> str:
    sides = (numbers.reduction_axis, numbers.output_axis) if numbers else ()
    as_axes = ((x,) if isinstance(x, int) else x for x in sides)
    of_sides = (", ".join(str(i % rank) for i in axes) for axes in as_axes)
    return " > ".join(of_sides) or "-"
