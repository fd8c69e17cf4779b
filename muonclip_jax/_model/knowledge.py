"""The knowledge of a model: by its reading or by names, and by the user's arguments.

The arguments `model`, `attention`, `dimension_numbers` and `per_head` become one
`Knowledge`, which answers every question about a tree of params: which leaves are
matrices, along which axes, what each leaf is called, and which layers have its heads.
"""

from typing import NamedTuple

import jax
import numpy as np
from optax import MaskedNode

from .._calls import is_reading
from .._options import check_flag
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers, FROZEN, resolve_verdicts
from .._parameters.leaf_rules import ByNames
from .._parameters.verdict import Verdict
from .attention_layers import Attention, AttentionLayer, find_layers
from .model_reading import ModelReading
from .owned_leaf import OwnedLeaf
from .per_head import split_heads


class Knowledge(NamedTuple):
    """The user's arguments about a model; they determine what is said of any tree."""

    model: ModelReading | None  # without one, names and shapes decide
    attention: Attention | None  # layers in place of those of the model
    dimension_numbers: DimensionNumbers | None
    per_head: bool | None

    def read(self, tree: paths.PathedTree) -> dict[paths.Path, Verdict]:
        """Returns the verdicts by the reading, or by names, before the user's word."""
        if self.model is None:
            # Names show which axes are heads in stock layers, if nothing else does.
            is_cut = self.per_head is not False and self.attention is None
            return ByNames(tree).verdicts(is_cut)
        _check_read(self.model, tree)
        # By path, since a mask hides leaves, and NNX's optimizer gives plain dicts.
        hidden, read = Verdict("vector", None, "hidden", "hidden"), self.model.verdicts
        return {
            path: hidden if paths.is_masked(leaf) else read[path]
            for path, leaf in tree.by_path().items()
        }

    def verdicts(self, tree: paths.PathedTree) -> list[Verdict]:
        """Returns the verdict on each leaf, with one matrix per head where wanted.

        As in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5 (arXiv:2602.15763).
        """
        numbers, must = self.dimension_numbers, bool(self.per_head)
        is_by_names = self.model is None and self.attention is None
        if is_by_names or self.per_head is False:
            return resolve_verdicts(numbers, tree, self.read, is_named_per_head=must)
        described: dict[paths.Path, list[tuple[bool, OwnedLeaf]]] = {}
        layers, leaf_at = self.layers(tree)
        for layer in layers:
            for leaf in layer.leaves:
                path = layer.path_of(leaf)
                descriptions = described.setdefault(path, [])
                is_hidden = paths.is_masked(leaf_at[path])
                # If a leaf does not fit, QK-Clip's `init` says why.
                if not is_hidden and (owned := leaf.owned(tuple(leaf_at[path].shape))):
                    # The parts of a query with and without a rotary embedding are one
                    # head, so `query` and `rotary_query` are not distinguished.
                    descriptions.append((leaf in layer.key, owned))
        verdicts = resolve_verdicts(numbers, tree, self.read, described=described)
        # From all params that were read, since a mask may hide what shows the heads.
        named = self.model.heads_by_name if self.model is not None else {}
        return split_heads(tree, verdicts, described, named, must)

    def labels(self, tree: paths.PathedTree) -> list[str]:
        """Returns the label of each leaf, as for [`param_labels`][]."""
        read, labels = self.read(tree), []
        verdicts = resolve_verdicts(self.dimension_numbers, tree, lambda _: read)
        for path, _, verdict in tree.rows(verdicts):
            # A leaf that the user gives to AdamW may be a table or a head all the same.
            prior = read[path]
            is_adamw = verdict.source == "given" and verdict.label == "vector"
            is_kept = is_adamw and prior.numbers is None and prior.label != FROZEN
            labels.append(prior.label if is_kept else verdict.label)
        return labels

    def layers(
        self, tree: paths.PathedTree
    ) -> tuple[list[AttentionLayer], paths.LeafAt]:
        """Returns the layers with those that are only watched, and leaves by path.

        **Raises:** `ValueError` as [`flax_attention_layers`][] does, and for layers or
        a model that do not fit the tree.
        """
        leaf_at = tree.by_path()
        if not tree.paths:  # as for `resolve_verdicts`
            return [], leaf_at
        if self.model is not None:
            _check_read(self.model, tree)
            if self.attention is None:
                # Leaves that the params lack count as hidden by a mask.
                hidden = dict.fromkeys(self.model.verdicts, MaskedNode())
                layers = [*self.model.attention, *self.watched]
                return layers, paths.LeafAt(hidden | leaf_at)
        return find_layers(self.attention, tree), leaf_at

    @property
    def watched(self) -> list[AttentionLayer]:
        """Returns the layers of the model that have a statistic but nothing to scale.

        They have no leaves and an infinite threshold.
        """
        read = self.model.layers if self.model is not None else ()
        paths_of = ("/".join(x.path) for x in read if x.layer is None and x.shape)
        return [AttentionLayer(x, (), (), threshold=np.inf) for x in paths_of]

    def check_clippable(self, only_watches: bool) -> None:
        """Raises for a reading with logits that no parameter scales.

        If nothing is to be clipped, it raises only for logits that are not recorded.
        """
        if self.attention is not None or self.model is None:
            return
        model = self.model
        if refused := model.unrecorded if only_watches else model.refused:
            is_watchable = refused != model.unrecorded
            listed = "\n  ".join(refused)
            raise ValueError(
                f"QK-Clip cannot scale the logits of\n  {listed}\n"
                + "threshold=inf watches these. " * is_watchable
                + (
                    "To clip only the other layers, give attention=reading.attention"
                    if model.attention
                    else "Give attention=[] to clip nothing"
                )
                + ", or use mc.muon"
            )


def knowledge_of(
    model: ModelReading | None,
    attention: Attention | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    per_head: bool | None = False,
) -> Knowledge:
    """Returns what the arguments say, after a check of those that need no params.

    `per_head=None` splits every leaf that can be split.
    """
    # `muonclip` makes one, with all four, and gives it to `muon` and `qk_clip`.
    if isinstance(model, Knowledge):
        return model
    if model is not None and not is_reading(model):
        raise ValueError(
            f"model must be what mc.read_model(loss, params, *batch) returns, got a "
            f"{type(model).__name__}"
        )
    per_head = per_head if per_head is None else check_flag("per_head", per_head)
    return Knowledge(model, attention, dimension_numbers, per_head)


def _check_read(model: ModelReading, tree: paths.PathedTree) -> None:
    """Raises for a `model=` of other params, or of other shapes.

    They may be a part of those that were read, as where adapters alone are trained.
    """
    read = model.shapes
    in_sight = {
        x: leaf for x, leaf in tree.by_path().items() if not paths.is_masked(leaf)
    }
    if missing := [path for path in in_sight if path not in read]:
        raise ValueError(
            f"model= was read from other params: it has no {paths.show_all(missing)}. "
            "Call read_model with the params that the optimizer gets"
        )
    # Inside of `shard_map` leaves are blocks.
    is_cut = bool(jax.sharding.get_abstract_mesh().manual_axes)
    others = [
        f"{paths.show(path)} {shape}, read as {read[path]}"
        for path, leaf in in_sight.items()
        if (shape := tuple(getattr(leaf, "shape", read[path]))) != read[path]
        if not (is_cut and _divides(shape, read[path]))
    ]
    if others:
        raise ValueError(
            "model= was read from params of other shapes:\n  "
            + "\n  ".join(others[:10])
            + (f"\n  and {len(others) - 10} more" if len(others) > 10 else "")
            + "\nHeads, stacks and fused kernels would be cut in the wrong places. "
            "Call read_model with the params that the optimizer gets; their shapes are "
            "enough: mc.read_model(loss, jax.eval_shape(init, key), *batch)"
        )


def _divides(block: paths.Shape, whole: paths.Shape) -> bool:
    is_alike = len(block) == len(whole)
    return is_alike and not any(n % m for m, n in zip(block, whole, strict=True) if m)
