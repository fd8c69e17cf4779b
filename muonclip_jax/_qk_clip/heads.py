"""The heads of all attention layers in one row: read, divided by layer, scaled.

statistics -> row -> gamma -> one row per layer and share -> one scale per leaf.

One row needs one collective, and one state with the same structure for every model. An
array per layer would need as many as there are layers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._layout.layout import AxisNames, cut_axes, differing, gather, Layout, own_block
from .._layout.shardings import blocks_along
from .._layout.state import replicated
from .._matrices.stacks import unstack
from .._mesh_axes import manual_axes, resharded
from .._model.attention_layers import AttentionLayer, READ_IT, show_layer
from .._model.bound_layer import BoundLayer, LeafInRole
from .._model.knowledge import Knowledge
from .._model.shares import clipped_together, scaled_leaves, Share
from .._model.statistics import largest, read_attention_stats, STATISTIC
from .._parameters.paths import is_masked, Path, show, show_all, split
from .rule import ClipRule


_HOW_TO_RECORD = (
    "mc.record_attention(loss) returns them with the loss of any model, given the "
    f"optimizer's {READ_IT}. In stock Flax attention_fn=mc.attention_fn sows them: "
    "call the layer with sow_weights=True and read the intermediates back "
    "(mutable=['intermediates'] in Linen, under nn.scan with "
    "variable_axes={'intermediates': 0}; nnx.capture(..., nnx.Intermediate) in NNX)"
)


#: A logit in the state before the first statistic. Finite, for `jax_debug_infs`.
UNKNOWN = float(np.finfo(np.float32).min)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Combined:
    """Statistics that `multi_steps` has read and passes to `qk_clip`.

    A pytree, because it passes through the `jit` and condition of `optax.MultiSteps`.
    """

    of_layers: dict[Path, jax.Array]
    # The replicas over which the maximum was taken; static, since names are not arrays.
    reduced_over: AxisNames = dataclasses.field(metadata={"static": True})


class Heads:
    """The attention layers that the mask shows, in one row of all their heads.

    Each device has the same row, of whole layers. Mapped axes that cut the heads change
    neither the state nor which layer a head belongs to.
    """

    def __init__(
        self, layout: Layout, knowledge: Knowledge, only_watches: bool = False
    ):
        layers, leaf_at = knowledge.layers(layout.whole)
        self._leaves = {leaf.path: leaf for leaf in layout.leaves}
        self._layout = layout
        # Next to layers that are given, a reading's own may be recorded.
        self._known = {split(x.path) for x in (*layers, *knowledge.watched)}
        self._is_hidden = leaf_at.hides
        self.layers: list[BoundLayer] = []
        self.count = 0
        read = knowledge.model.layers if knowledge.model is not None else ()
        of_path = {"/".join(x.path): x for x in read}
        in_sight = {path for path, leaf in leaf_at.items() if not is_masked(leaf)}
        for layer in layers:
            leaf_paths = [layer.path_of(leaf) for leaf in layer.leaves]
            hidden = [path for path in leaf_paths if path not in in_sight]
            recorded = of_path.get(layer.path)
            makers, shape = (
                (recorded.makers, recorded.shape) if recorded else ((), None)
            )
            trained = [path for path in makers if path in in_sight]
            if leaf_paths and not hidden:
                self._add(layer, leaf_at)
            elif shape and trained and (only_watches or not leaf_paths):
                bare = layer._replace(query=(), key=(), rotary_query=())
                self._add(bare._replace(threshold=np.inf), leaf_at, shape)
            elif 0 < len(hidden) < len(leaf_paths):  # a mask may hide only whole layers
                raise ValueError(
                    f"the optimizer is not given {show_all(hidden)}, but the rest of "
                    f"attention layer '{show_layer(layer)}': a mask hides them, or "
                    "wrt= leaves them out. Freeze all of a layer's query and key, or "
                    "nothing of it: QK-Clip scales them together. If only a part of "
                    "the params of model= is trained, as with wrt=nnx.LoRAParam, use "
                    "mc.muon, which does not clip. To clip frozen params, too, use "
                    "wrt=nnx.Param, an optax.partition, and mc.qk_clip after it"
                )
            elif trained and leaf_paths:
                # The logits still grow, and nothing that is left can scale them.
                raise ValueError(
                    f"QK-Clip cannot act on attention layer '{show_layer(layer)}': the "
                    f"optimizer is not given {show_all(hidden)}, the only parameters "
                    f"that scale its logits, but trains {show_all(trained, 3)}, which "
                    "make them. Train both, freeze both, or put mc.qk_clip after the "
                    "mask or partition"
                )
        self._scaled = scaled_leaves(self.layers)

    def _add(
        self,
        layer: AttentionLayer,
        leaf_at: Mapping[Path, Any],
        *shape: tuple[int, ...],
    ) -> None:
        at = len(self.layers), self.count
        self.layers.append(BoundLayer(layer, leaf_at, *at, *shape))
        self.count += math.prod(self.layers[-1].shape)

    def shares(self) -> list[tuple[LeafInRole, Share | None]]:
        """Returns each use of a leaf and its share of gamma; `None` if it stays."""
        shares: dict[int, Share] = {id(use): share for use, share in self._scaled}
        uses = (use for layer in self.layers for use in layer.uses)
        return [(use, shares.get(id(use))) for use in uses]

    def read(self, attention_stats: Any) -> jax.Array:
        """Returns the maximum over replicas of each head, `(all heads,)` float32.

        **Raises:** `ValueError`, naming the paths, if statistics are missing, do not
        fit, or are known to differ along a mapped axis.
        """
        if attention_stats is None:
            raise ValueError(
                "qk_clip needs attention_stats: tx.update(grads, state, params, "
                "attention_stats=stats), with the statistics that "
                "mc.record_attention(loss) returns or mc.attention_fn sows; pass "
                "attention_stats={} for a model without attention. Flax's TrainState "
                "does not pass them on: call mc.clip_qk on its params after the step, "
                "or, as mc.multi_steps needs, write a subclass that does"
            )
        if isinstance(attention_stats, Combined):
            # `multi_steps` may have layers that a mask around `qk_clip` hides.
            stats = attention_stats.of_layers
            self._check_matched(stats)
            return _to_row([self._checked(layer, stats)[0] for layer in self.layers])
        row = self._whole_row(read_attention_stats(attention_stats))
        # The state must be the same on all devices. Otherwise the out_specs of
        # shard_map would raise an error far from here.
        if along := manual_axes(row):
            raise ValueError(
                f"the attention_stats differ along {sorted(along)}: name the axes that "
                "divide the batch in axis_name, and give in shardings how the others "
                "shard query and key"
            )
        return row

    def _whole_row(self, stats: dict[Path, jax.Array]) -> jax.Array:
        """Checks the statistics; returns their maximum over replicas, as one row."""
        self._check_matched(stats)
        # Axes that cut the statistics have other heads on each device, so take no
        # maximum along them. Heads that all share a leaf go by the largest of all
        # heads, whichever device has it.
        shared, replicas = self._layout.shared_axes, self._layout.replicas
        groups: dict[AxisNames, dict[BoundLayer, tuple[jax.Array, PartitionSpec]]] = {}
        for layer in self.layers:
            x, spec = self._checked(layer, stats)
            axes = shared if layer.is_shared else replicas
            over = tuple(axis for axis in axes if axis not in cut_axes(spec))
            groups.setdefault(over, {})[layer] = x, spec
        maxima: dict[BoundLayer, jax.Array] = {}
        # One collective for all layers with the same axes.
        for axes, group in groups.items():
            row = _to_row([x for x, _ in group.values()])
            # No collective along axes where the type says that the row is the same.
            if differ := differing(row, axes) if row.size else ():
                # All replicas must see a NaN of one (`keep_nan`). As infinity it
                # survives a maximum, and is counted in the same way.
                row = jax.lax.pmax(jnp.where(jnp.isnan(row), jnp.inf, row), differ)
            parts = _divide(row, {layer: x.shape for layer, (x, _) in group.items()})
            maxima |= {layer: gather(x, group[layer][1]) for layer, x in parts.items()}
        return _to_row([maxima[layer] for layer in self.layers])

    def clip(
        self, attention_stats: Any, rule: ClipRule
    ) -> tuple[jax.Array, jax.Array, dict[Path, jax.Array]]:
        """Returns the row of logits, the row of gamma, and the scale of each leaf."""
        # Otherwise XLA would shard the row and all that follows like the heads.
        logits = replicated(self.read(attention_stats), self._layout.mesh)
        gamma = self.joint(rule.gamma(logits, self.thresholds(rule)))
        return logits, gamma, self.scales(rule.powers(gamma))

    def check_state(self, row: jax.Array) -> None:
        """Raises if a row of the state does not have all heads."""
        if row.shape != (self.count,):
            raise ValueError(
                f"the state of qk_clip is of {row.size} heads, but the params have "
                f"{self.count}: pass what init returned for these params. Inside "
                "jax.shard_map every device needs the state of all heads: its in_specs "
                "and out_specs are PartitionSpec()"
            )

    def combined(self, row: jax.Array) -> Combined:
        """Returns the statistics for an inner `qk_clip`, which needs no collective."""
        of_layers = {layer.path: x for layer, x in self.by_layer(row).items()}
        return Combined(of_layers, self._layout.replicas)

    def by_layer(self, row: jax.Array) -> dict[BoundLayer, jax.Array]:
        """Returns an array `(*stack, heads)` for each layer."""
        return _divide(row, {layer: layer.shape for layer in self.layers})

    def thresholds(self, rule: ClipRule) -> jax.Array:
        """Returns the row of thresholds."""
        return _to_row([rule.threshold_of(layer) for layer in self.layers])

    def joint(self, gamma: jax.Array) -> jax.Array:
        """Gives heads that can only be scaled together their smallest gamma."""
        # In most models no heads share scaled entries: no gather, no scatter.
        first = clipped_together(self.layers, self._scaled)
        if np.array_equal(first, np.arange(self.count)):
            return gamma
        return jnp.ones_like(gamma).at[first].min(gamma)[first]

    def scales(self, rows: Mapping[Share, jax.Array]) -> dict[Path, jax.Array]:
        """Returns the scale of each leaf, as an array that broadcasts to it.

        `rows` are gamma to the power of each share.
        """
        by_layer = {share: self.by_layer(row) for share, row in rows.items()}
        scales: dict[Path, jax.Array] = {}
        for use, share in self._scaled:
            scale = use.leaf.spread(use.row_of(by_layer[share][use.layer]))
            # Parts of a leaf have different entries. Entries that several layers or
            # roles use are scaled once.
            scales[use.path] = jnp.minimum(scales.get(use.path, 1), scale)
        # Computed for whole leaves: only they show which head an entry belongs to.
        cuts = {path: self._leaves[path].cut for path in scales}
        return {path: own_block(x, cuts[path]) for path, x in scales.items()}

    def _checked(
        self, layer: BoundLayer, stats: Mapping[Path, jax.Array]
    ) -> tuple[jax.Array, PartitionSpec]:
        """Returns the statistic of a layer's scalable heads, and how it is sharded.

        Inside `jax.shard_map` it may have all heads, or only the heads of this device.
        The shape decides: the whole layer's, or this device's part by the query's spec.
        """
        statistic, expected = stats[layer.path], layer.shape
        name = show((*layer.path, STATISTIC))
        if not statistic.ndim:
            if expected != (1,):
                raise ValueError(
                    f"the statistics '{name}' are a scalar; expected an array with one "
                    f"maximum per head, {expected}, (*stack, heads)"
                )
            statistic = statistic[None]
        row = statistic
        if layer.is_shared and statistic.shape != expected:
            expected = (*layer.shape[:-1], statistic.shape[-1])
            row = largest(statistic, -1)[..., None].repeat(layer.shape[-1], -1)
        if statistic.shape == expected:
            return row, PartitionSpec()
        if not layer.uses:  # no leaf shows how devices cut the heads
            raise ValueError(
                f"the statistics '{name}' have shape {statistic.shape}; expected "
                f"{expected}, (*stack, heads), of all heads"
            )
        use = max(layer.uses, key=lambda use: use.is_whole)  # the query's, if whole
        leaf, mesh = self._leaves[use.path], jax.sharding.get_abstract_mesh().shape
        cut, shape = leaf.cut, leaf.whole.shape
        counts = [count for _, count in blocks_along(shape, cut, mesh)]
        spec = use.leaf.row_spec(cut, counts)
        blocks = blocks_along(expected, spec or PartitionSpec(), mesh)
        parts = [divmod(*block) for block in blocks]
        # A block that ends within a head, or has heads from several places (on a split
        # axis), has no statistic of its own.
        if spec is None or any(rest for _, rest in parts):
            raise ValueError(
                f"{sorted(cut_axes(cut))} cut '{show(use.path)}' "
                "across heads: inside jax.shard_map pass the statistics "
                f"'{name}' of all heads, {expected}"
            )
        local = tuple(n for n, _ in parts)
        if statistic.shape != local:
            here = f", or {local} for those of one device" if local != expected else ""
            raise ValueError(
                f"the statistics '{name}' have shape {statistic.shape}, which does not "
                f"fit the heads of {layer.leaves}; expected {expected}, "
                f"(*stack, heads){here}"
            )
        return row, spec

    def _check_matched(self, stats: dict[Path, jax.Array]) -> None:
        missing = [layer.path for layer in self.layers if layer.path not in stats]
        if missing:
            others = [(*path, STATISTIC) for path in stats if path not in self._known]
            have = f", only {show_all(others)}" if others else ""
            raise ValueError(
                "no statistics for the attention layers "
                f"{show_all(sorted(missing))}{have}. {_HOW_TO_RECORD}"
            )
        strays = [
            (*path, STATISTIC)
            for path in stats
            if path not in self._known and not self._is_hidden(path)
        ]
        if strays:
            known = show_all(sorted(self._known))
            none = f"none: for names of your own give the optimizer {READ_IT}"
            raise ValueError(
                f"the statistics {show_all(strays)} match no query and key in the "
                f"params; the attention layers are {known or none}"
            )


def _to_row(arrays: Sequence[jax.Array]) -> jax.Array:
    # Arrays sharded differently on explicit axes cannot be concatenated: replicate them
    # first. The empty array is for models without attention.
    whole = (resharded(x, PartitionSpec()) for x in arrays)
    flat = [x.ravel().astype(jnp.float32) for x in whole]
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *flat])


def _divide(
    row: jax.Array, shapes: Mapping[BoundLayer, tuple[int, ...]]
) -> dict[BoundLayer, jax.Array]:
    parts = unstack(row, tuple(math.prod(shape) for shape in shapes.values()))
    pairs = zip(shapes.items(), parts, strict=True)
    return {layer: part.reshape(shape) for (layer, shape), part in pairs}
