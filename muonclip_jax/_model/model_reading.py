"""A reading: what the trace of a function shows of its parameters, as a value."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax

from .._options import check_flag
from .._parameters import paths
from .._parameters.leaf_rules import ByNames
from .._parameters.verdict import Verdict
from .._tables import aligned, collapsed, leaf_table, Table, totals
from .attention_layers import AttentionLayer
from .bound_layer import BoundLayer
from .shares import scaled_leaves


class LayerRead(NamedTuple):
    """An attention layer as a reading keeps it: a value, without its equations."""

    path: paths.Path
    layer: AttentionLayer | None
    refusal: str
    shape: tuple[int, ...] | None  # of its statistic, `(*stack, heads)`, if it has one
    lines: tuple[str, ...]  # of its calls
    biases: tuple[str, ...]  # in words
    makers: tuple[paths.Path, ...]  # all parameters that made query and key

    @property
    def where(self) -> str:
        """The layer's path, and the line of its first call."""
        return f"{paths.show_module(self.path)} at {self.lines[0]}"

    @property
    def full_refusal(self) -> str:
        """Where it is, and why it cannot be scaled."""
        return f"{self.where}: {self.refusal}"


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
    - `not_clipped`: attention without a softmax, as by sigmoids, or whose query and key
        are frozen, by its path and line. QK-Clip does not act on it.
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
        return {path: verdict for path, _, verdict in self._tree.rows(self._verdicts)}

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
        layers = (x.full_refusal for x in self.layers if x.layer is None)
        return (*layers, *self._hidden)

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """The part of `refused` whose logits are not even known: where, and why."""
        layers = (x.full_refusal for x in self.layers if x.shape is None)
        return (*layers, *self._hidden)

    def table(self, *, collapse: bool = True) -> Table:
        """Returns the printed table; `collapse=False` lists every leaf and layer."""
        rows = [["path", "shape", "label", "inputs > outputs", "use", "line"]]
        # The verdict by names, where it differs.
        tree, names_say = self._tree, ["names say"]
        named = ByNames(tree).verdicts().values()
        sizes = []
        for path, leaf, verdict, by_name in tree.rows(self._verdicts, named):
            axes, named_axes = (_axes(x, len(leaf.shape)) for x in (verdict, by_name))
            is_guess = not verdict.is_known or verdict.source == "unread"
            label, shape = verdict.label + "?" * is_guess, str(tuple(leaf.shape))
            use, line = verdict.use or verdict.kind, verdict.line or "-"
            rows.append([paths.show(path), shape, label, axes, use, line])
            why = f"{named_axes} ({by_name.kind}{by_name.note})"
            cell = why if by_name.is_known else "nothing"
            is_same = axes == named_axes and by_name.is_known
            names_say.append("" if is_same or is_guess else cell)
            sizes.append((label, math.prod(leaf.shape), 1))
        if any(names_say[1:]):
            rows = [[*row, cell] for row, cell in zip(rows, names_say, strict=True)]
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
        labels = sorted({label for label, *_ in sizes})
        by_label = totals(("label", "leaves"), sizes, labels, "all")
        blocks = [aligned(attention) if layers else [], by_label, *why]
        return leaf_table(rows, blocks, model=self, collapse=collapse)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_ROLE_TEXTS = {"query": "query", "key": "key", "rotary_query": "by the whole"}


def _layer_row(
    read: LayerRead, layer: BoundLayer, scaled: Collection[int]
) -> list[str]:
    roles = []
    for role, name in _ROLE_TEXTS.items():
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
