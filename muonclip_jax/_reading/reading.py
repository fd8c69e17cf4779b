"""`read_model`: how a function uses every parameter."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._model.attention_layers import AttentionLayer
from .._model.bound_layer import BoundLayer
from .._model.shares import scaled_leaves
from .._options import check_flag, shown
from .._parameters import paths
from .._parameters.dimension_numbers import completed
from .._parameters.leaf_rules import ByNames
from .._parameters.verdict import Verdict
from .._tables import aligned, collapsed, leaf_table, Table, totals
from .attention import attention_layers
from .fact import members
from .facts import Facts
from .graph import Graph
from .named_layers import LayerRead, named_layers, NamedLayer
from .softmaxes import Softmaxes
from .suspicion import suspicions
from .traced_call import Call, call_of, check_function
from .uses import Uses
from .verdicts import verdicts


@dataclasses.dataclass(frozen=True, eq=False)
class ModelReading:
    """The uses of every parameter by a function: the result of [`read_model`][].

    Printed, it is a table with the file and line where each leaf is used, and with the
    label that names would give, if it differs. Below are the attention layers, with the
    line of their logits and the leaves that [`qk_clip`][] scales; the number of
    parameters of each label; and the attention that it cannot scale, with the reason.
    As in [`describe`][], repeated layers share a row, and a notebook shows HTML.

    It is a value: it can be pickled, copied, hashed and compared, so that a train step
    which closes over it can be sent to another process.

    **Arguments:**

    - `dimension_numbers`: a tree like the params, of `MuonDimensionNumbers`, or `None`
        for a leaf that holds no matrix.
    - `labels`: a tree like the params, of `"matrix"`, `"embedding"`, `"head"`,
        `"router"`, `"vector"` or `"frozen"`, as from [`param_labels`][].
    - `attention`: the layers that QK-Clip can scale.
    - `layers`: these and those that it cannot scale, with the reason.
    - `unknown`: paths of the leaves whose use could not be read: the function does not
        use them, or passes them to an operation that hides their use. Names decide on
        these. Where they do not either, `labels` has `"vector"`, and the optimizer
        asks.
    - `not_clipped`: attention without a softmax, as by sigmoids, by its path and line.
        QK-Clip does not act on it.
    """

    dimension_numbers: Any
    labels: Any
    attention: tuple[AttentionLayer, ...]
    unknown: tuple[str, ...]
    not_clipped: tuple[str, ...]
    layers: tuple[LayerRead, ...] = dataclasses.field(repr=False)
    # The arrays among the params, as shapes, with the verdict on each; and operations
    # that may hide more attention.
    _tree: paths.PathedTree = dataclasses.field(repr=False)
    _verdicts: tuple[Verdict, ...] = dataclasses.field(repr=False)
    _hidden: tuple[str, ...] = dataclasses.field(repr=False)

    @property
    def _key(self) -> tuple[Any, ...]:
        """All that this says, hashable; labels and axes follow from the verdicts."""
        leaves = self._tree.paths, self._tree.leaves, self._verdicts
        return (*leaves, self.layers, self.not_clipped, self._hidden)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelReading):
            return NotImplemented
        # The nodes of a tree may have no hash.
        one, two = (jax.tree.structure(x.labels) for x in (self, other))
        return self._key == other._key and one == two

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def verdicts(self) -> Mapping[paths.Path, Verdict]:
        """The verdict on each parameter, by its path."""
        return {path: said for path, _, said in self._tree.rows(self._verdicts)}

    @property
    def heads_by_name(self) -> Mapping[paths.Path, Verdict]:
        """The verdicts by the names of all that was read, one matrix for each head."""
        return ByNames(self._tree).verdicts(per_head=True)

    @property
    def shapes(self) -> Mapping[paths.Path, paths.Shape]:
        """The shape of each parameter, by its path."""
        rows = self._tree.rows()
        return {path: tuple(map(int, leaf.shape)) for path, leaf in rows}

    @property
    def refused(self) -> tuple[str, ...]:
        """Attention that QK-Clip cannot scale by this reading: where, and why."""
        layers = (x.said for x in self.layers if x.layer is None)
        return (*layers, *self._hidden)

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """The part of `refused` whose logits are not even known: where, and why."""
        layers = (x.said for x in self.layers if x.shape is None)
        return (*layers, *self._hidden)

    def table(self, *, collapse: bool = True) -> Table:
        """Returns the printed table; `collapse=False` lists every leaf and layer."""
        rows = [["path", "shape", "label", "inputs > outputs", "use", "line"]]
        # The verdict by names, where it differs.
        tree, said = self._tree, ["names say"]
        named = ByNames(tree).verdicts().values()
        own = []
        for path, leaf, v, name in tree.rows(self._verdicts, named):
            axes, by_name = (_axes(x, len(leaf.shape)) for x in (v, name))
            is_guess = not v.is_known or v.source == "unread"
            label, shape = v.label + "?" * is_guess, str(tuple(leaf.shape))
            use = v.use or v.kind
            rows.append([paths.show(path), shape, label, axes, use, v.line or "-"])
            why = f"{by_name} ({name.kind}{name.note})" if name.is_known else "nothing"
            is_same = axes == by_name and name.is_known
            said.append("" if is_same or is_guess else why)
            own.append((label, math.prod(leaf.shape), 1))
        if any(said[1:]):
            rows = [[*row, of] for row, of in zip(rows, said, strict=True)]
        collapse = check_flag("collapse", collapse)
        layers, why = [], []
        try:
            numbered = enumerate(self.attention)
            bound = [BoundLayer(x, tree.by_path(), i, 0) for i, x in numbered]
            scaled = {id(use) for use, _ in scaled_leaves(bound)}
            clipped = (x for x in self.layers if x.layer is not None)
            pairs = zip(clipped, bound, strict=True)
            layers = [_layer_row(read, layer, scaled) for read, layer in pairs]
        except ValueError as error:
            why = [[str(error)]]
        layers = collapsed(layers) if collapse else layers
        attention = [("attention", "heads", "logits", "QK-Clip scales"), *layers]
        labels = sorted({label for label, *_ in own})
        by_label = totals(("label", "leaves"), own, labels, "all")
        blocks = [aligned(attention) if layers else [], by_label, *why]
        return leaf_table(rows, blocks, model=self, collapse=collapse)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


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
    found = {*map(id, jaxpr.invars[: len(call.arrays)])}
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(map(id, eqn.invars)):
            found.update(map(id, eqn.outvars))
    return not found.isdisjoint(map(id, jaxpr.outvars))


def read_call(call: Call) -> tuple[ModelReading, list[NamedLayer], list[str]]:
    """Returns the reading; for the recorder, all layers and what may hide more."""
    tree = call.tree
    own = [(tree.paths[i], tree.leaves[i]) for i in call.arrays]
    shown = tree._replace(
        paths=tuple(path for path, _ in own),
        leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in own),
    )
    shapes = [tuple(map(int, x.shape)) for _, x in own]
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for _, x in own]
    graph = Graph(call.body, is_float)
    tokens: frozenset[int] = frozenset()
    while True:
        # A parameter that is looked up or added to activations is no weight where it
        # meets another parameter: a kernel makes keys from learned queries. The first
        # pass finds such parameters.
        reader = Softmaxes(graph, Facts(graph, tokens))
        layers = attention_layers(reader)
        uses = Uses(reader, tokens)
        found = uses.numbers_of("elementwise", "looked up") & uses.numbers_of("factor")
        found |= {i for layer in layers for i in layer.tokens}
        if found <= tokens:
            break
        tokens |= found
    refused, unclipped = suspicions(reader, layers)
    layers += refused
    frozen = reader.frozen, {*members(reader.facts.choosing)}
    said = verdicts(uses, reader.facts.outputs, shapes, is_float, *frozen)
    said = completed(shown, said)
    by_leaf = dict(zip(call.arrays, said, strict=True))
    every = [by_leaf.get(i) for i in range(len(tree.leaves))]
    named = named_layers(layers, shown.paths, shapes)
    not_clipped = named_layers(unclipped, shown.paths, shapes)
    hidden = list(dict.fromkeys(f"{eqn.name} at {eqn.line}" for eqn in uses.hidden))
    reading = ModelReading(
        tree.unflatten((v and v.is_known and v.numbers) or None for v in every),
        tree.unflatten(v and v.label for v in every),
        tuple(n.layer for n in named if n.layer is not None),
        tuple(paths.show(p) for p, _, v in shown.rows(said) if v.source == "unread"),
        tuple(x.read(shown.paths).where for x in not_clipped),
        tuple(x.read(shown.paths) for x in named),
        # Not the structure, which pickle does not know: labels have it.
        shown._replace(treedef=None, axis_names=dict(shown.axis_names)),
        tuple(said),
        tuple(f"{what}, which may be attention" for what in hidden),
    )
    return reading, named, hidden


# The table.

_ROLES = {"query": "query", "key": "key", "rotary_query": "by the whole"}


def _layer_row(
    read: LayerRead, layer: BoundLayer, scaled: Collection[int]
) -> list[str]:
    roles = []
    for role, name in _ROLES.items():
        uses = [use for use in layer.uses if use.role == role]
        stays = not any(id(use) in scaled for use in uses)
        name = f"the {name} stays:" if stays else name
        leaves = ", ".join(dict.fromkeys(use.leaf.path for use in uses))
        roles += [f"{name} {leaves}"] if uses else []
    roles += read.biases
    lines = ", ".join(read.lines)
    heads = str(read.shape[-1]) if read.shape else "-"
    return [paths.show_module(read.path), heads, lines, "; ".join(roles)]


def _axes(verdict: Verdict, rank: int) -> str:
    numbers = verdict.numbers if verdict.is_known else None
    sides = (numbers.reduction_axis, numbers.output_axis) if numbers else ()
    as_axes = ((x,) if isinstance(x, int) else x for x in sides)
    of_sides = (", ".join(str(i % rank) for i in axes) for axes in as_axes)
    return " > ".join(of_sides) or "-"
