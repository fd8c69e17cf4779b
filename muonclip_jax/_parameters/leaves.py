"""Leaves in Flax's words: one layer of each, its outputs at the end."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import names
from .names import without_ones
from .paths import Path, Shape


class Leaf(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    own: Path
    path: Path
    shape: Shape
    axes: tuple[int, ...]  # of the leaf, from the end, for those of the shape
    bias: Shape | None  # next to it; of no axes where a mask hides it
    module: str
    is_kernel: bool
    is_conv: bool
    is_turned: bool = False  # the leaf has its outputs first

    def numbers(self, inputs: Iterable[int], outputs: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        sides = (tuple(self.axes[i] for i in axes) for axes in (inputs, outputs))
        return MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in sides))


def leaves_of(
    shapes: Mapping[Path, Shape], axes_of: Mapping[Path, tuple[int, ...]]
) -> dict[Path, Leaf]:
    """One layer of each leaf in Flax's words, turned where its outputs come first."""
    layers = {own: tuple(shapes[own][i] for i in axes) for own, axes in axes_of.items()}
    written = names.in_flax(layers)
    by_path = {path: layers[own] for own, path in written.items()}
    biases = {own: by_path.get((*x[:-1], "bias")) for own, x in written.items()}
    kernels = {own for own, x in written.items() if x[-1:] == ("kernel",)}
    weights = {x for x in layers if "weight" in ".".join(x[-2:]).split(".")[-2:]}

    def is_turned(own: Path) -> bool | None:
        """Compares a kernel with its bias, which has its outputs."""
        shape, bias = layers[own], without_ones(biases[own] or ())
        first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
        return first if first != last and 0 < len(bias) < len(shape) else None

    # What is called a weight has its outputs first in Equinox and Haliax.
    votes = [is_turned(own) for own in kernels & weights]
    weights_turned = votes.count(True) >= votes.count(False)
    found: dict[Path, Leaf] = {}
    for own, path in written.items():
        shape, axes, bias = layers[own], axes_of[own], biases[own]
        is_weight, module = own in kernels & weights, "".join(path[-2:-1])
        in_attention = module in ("query", "key", "value", "out")
        is_conv = bool(names.CONVOLUTION.search(module))
        # Layers of rank 2 may be turned, too: HuggingFace's GPT-2, recurrent cells in
        # Equinox; and the first of pairs in stax.
        is_layer = own in kernels or "".join(own[-1:]).startswith(("weight_", "w_"))
        may_turn = own in weights or own[-1:] == ("0",)
        may_turn |= len(shape) == 2 and is_layer
        by = 0
        if may_turn and len(without_ones(bias or ())) < len(shape) > 1:
            turned = is_turned(own)
            if turned:
                by = len(without_ones(bias or ()))
            elif turned is None and is_weight and weights_turned:
                by = len(shape) - 1 if in_attention and module != "out" else 1
                by *= names.kind(own) != "embedding"
        shape, axes = shape[by:] + shape[:by], axes[by:] + axes[:by]
        kinds = module, own in kernels, is_conv
        found[own] = Leaf(own, path, shape, axes, bias, *kinds, bool(by))
    return found
