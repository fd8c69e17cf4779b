"""Every leaf as Flax would have it: its path, and the shape of one layer.

Haiku calls a kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others
call the projections of attention `q_proj` or `wq`. Read like this, one set of rules
serves them all; `axes` lead back to the leaf.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import names
from .paths import Path
from .stack_axes import Shape, without_ones


class Spelled(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    path: Path
    shape: Shape
    axes: tuple[int, ...]  # of the leaf, from the end, for those of the shape
    is_turned: bool = False  # the leaf has its outputs first
    is_open: bool = False  # nothing tells which of its axes are outputs
    is_stacked: bool = False

    def numbers(self, reduction: Iterable[int], output: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        return MuonDimensionNumbers(
            *(
                _squeeze(tuple(self.axes[axis] for axis in axes))
                for axes in (reduction, output)
            )
        )


def spell(
    layers: Mapping[Path, Shape],
    axes_of: Mapping[Path, tuple[int, ...]],
    stacked: Collection[Path] = (),
) -> dict[Path, Spelled]:
    """By the path of the leaf; `layers` are the shapes in one layer."""
    written = _flax_paths(layers)
    order = _Order(layers, written, stacked)
    found = {}
    for own, path in written.items():
        by = order.outputs_in_front(own, path)
        shape, axes = (x[by:] + x[:by] for x in (layers[own], axes_of[own]))
        found[own] = Spelled(
            path, shape, axes, bool(by), order.is_open(own, path), own in stacked
        )
    return found


def _flax_paths(layers: Mapping[Path, Shape]) -> dict[Path, Path]:
    plain = plain_paths(layers)
    children: dict[Path, set[str]] = {}
    for path in plain.values():
        for depth in range(len(path)):
            children.setdefault(path[:depth], set()).add(path[depth])
    in_attention = {
        module
        for module, below in children.items()
        if {"query", "key"} <= {names.projection(name) for name in below}
    }

    def written(path: Path) -> Path:
        for depth in range(max(len(path) - 2, 0), len(path)):
            module, role = path[:depth], names.projection(path[depth])
            below = children[module]
            if module in in_attention and role and _is_alone(role, below):
                if path[depth + 1 :]:
                    return (*module, role, *path[depth + 1 :])
                if any(names.projection(name) == "out" for name in below):
                    return (*module, role, "kernel")
        return path

    return {own: written(path) for own, path in plain.items()}


def plain_paths(shapes: Mapping[Path, Shape]) -> dict[Path, Path]:
    """With Flax's names for kernel, bias and the gain of a norm."""
    return {path: _plain(path, shapes) for path in shapes}


def _plain(path: Path, shapes: Mapping[Path, Shape]) -> Path:
    module, last = path[:-1], "".join(path[-1:])
    if last == "b" and (*module, "w") in shapes:
        return (*module, "bias")
    # At the root, a name is known by what lies beside it.
    is_known = module or (last == "weight" and ("bias",) in shapes)
    if last not in ("w", "weight") or not is_known:
        return path
    is_norm = names.is_norm(path) and not _has_inputs(path, shapes)
    return (*module, "scale" if is_norm else "kernel")


def _has_inputs(path: Path, shapes: Mapping[Path, Shape]) -> bool:
    """Whether a weight has more axes than its bias, as the gain of a norm has not."""
    bias = shapes.get((*path[:-1], "bias" if path[-1] == "weight" else "b"), ())
    return 0 < len(bias) < len(shapes[path])


def _is_alone(role: str, siblings: Iterable[str]) -> bool:
    """Whether no second module would be called the same."""
    return sum(names.projection(name) == role for name in siblings) == 1


def is_turned_by_bias(shape: Shape, bias: Shape) -> bool | None:
    """Whether outputs come first, as a bias says, which has just those."""
    is_of_window = 1 < len(bias) == len(shape) - 1 and set(bias[1:]) == {1}
    if is_of_window and bias[0] == shape[0]:
        return True
    bias = without_ones(bias)
    if not bias or len(bias) >= len(shape):
        return None
    first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
    return first if first != last else None


class _Order:
    """Where kernels have their outputs: in front, or at the end as in Flax."""

    def __init__(
        self,
        layers: Mapping[Path, Shape],
        written: Mapping[Path, Path],
        stacked: Collection[Path],
    ):
        self._layers = layers
        self._inside = {
            path
            for own, path in written.items()
            if own in stacked or any(name[-1:].isdigit() for name in path[:-2])
        }
        self._bias_of = {
            path[:-1]: layers[own]
            for own, path in written.items()
            if names.is_bias(path)
        }
        weights = [
            (path, layers[own])
            for own, path in written.items()
            if _is_weight(own) and path[-1:] == ("kernel",)
        ]
        gains = [layers[own] for own, path in written.items() if _is_gain(path)]
        self._features = max(gains, key=gains.count, default=())
        votes = [is_turned_by_bias(x, self._bias(path)) for path, x in weights]
        told = [vote for vote in votes if vote is not None]
        # What is called a weight has its outputs first in Equinox and Haliax.
        self._weights_turned = sum(told) * 2 >= len(told)

    def outputs_in_front(self, own: Path, path: Path) -> int:
        """How many axes in front are outputs, 0 where they are at the end."""
        shape = self._layers[own]
        is_kernel, is_weight = path[-1:] == ("kernel",), _is_weight(own)
        is_cell = path[-1:] != () and path[-1].startswith(("weight_", "w_"))
        if len(shape) < 2 or not (
            is_weight or ((is_kernel or is_cell) and len(shape) == 2)
        ):
            return 0
        if len(self._bias(path)) >= len(shape):  # a gain and its shift
            return 0
        told = is_turned_by_bias(shape, self._bias(path))
        if told is not None or not is_kernel:
            return len(without_ones(self._bias(path))) if told else 0
        if not is_weight or self.is_open(own, path) or names.is_embedding(own):
            return 0
        told = self._by_width(path, shape)
        if not (self._weights_turned if told is None else told):
            return 0
        name = "".join(path[-2:-1])
        return len(shape) - 1 if name in ("query", "key", "value") else 1

    def is_open(self, own: Path, path: Path) -> bool:
        """Whether a weight has more than two axes, and nothing says what they are."""
        shape = self._layers[own]
        return (
            len(shape) > 2
            and _is_weight(own)
            and path[-1:] == ("kernel",)
            and not self._bias(path)
            and "".join(path[-2:-1]) not in ("query", "key", "value", "out")
            and not names.has_word(path[-2:-1], "conv")
        )

    def _by_width(self, path: Path, shape: Shape) -> bool | None:
        """Whether outputs come first, by where the width of the model is."""
        # What lies outside of the layers may be an output head, whatever its name.
        if path not in self._inside:
            return None
        ends = shape[:1], shape[-1:]
        writes = names.writes_features("".join(path[-2:-1]))
        if len(shape) < 2 or writes is None or ends.count(self._features) != 1:
            return None
        return (ends[0] == self._features) == writes

    def _bias(self, path: Path) -> Shape:
        return self._bias_of.get(path[:-1], ())


def _is_weight(path: Path) -> bool:
    """Whether a leaf is called as Equinox and Haliax call it."""
    return "weight" in path[-2:]


def _is_gain(path: Path) -> bool:
    return path[-1:] == ("scale",)


def _squeeze(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes
