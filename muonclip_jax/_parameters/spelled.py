"""Every leaf as Flax would have it: its path, and the shape of one layer.

Haiku calls a kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others
call the projections of attention `q_proj` or `wq`. Read like this, one set of rules
serves them all; `axes` lead back to the leaf.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import names
from .paths import Path
from .stack_axes import Shape


class Spelled(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    path: Path
    shape: Shape
    axes: tuple[int, ...]  # of the leaf, from the end, for those of the shape
    is_turned: bool = False  # the leaf has its outputs first

    def numbers(self, reduction: Iterable[int], output: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        return MuonDimensionNumbers(
            *(
                _squeeze(tuple(self.axes[axis] for axis in axes))
                for axes in (reduction, output)
            )
        )


def spell(
    layers: Mapping[Path, Shape], axes_of: Mapping[Path, tuple[int, ...]]
) -> dict[Path, Spelled]:
    """By the path of the leaf; `layers` are the shapes in one layer."""
    written = _flax_paths(layers)
    bias_of = {
        path[:-1]: layers[own] for own, path in written.items() if names.is_bias(path)
    }
    weights_first = _outputs_first(layers, written, bias_of)
    found = {}
    for own, path in written.items():
        shape, axes = layers[own], axes_of[own]
        by = 0
        if path[-1:] == ("kernel",) and len(shape) > 1:
            bias, is_weight = bias_of.get(path[:-1], ()), _is_weight(own)
            if is_weight or len(shape) == 2:
                by = _outputs_in_front(
                    shape, bias, is_weight and weights_first, path[-2:-1]
                )
        shape, axes = (x[by:] + x[:by] for x in (shape, axes))
        found[own] = Spelled(path, shape, axes, bool(by))
    return found


def _flax_paths(paths: Iterable[Path]) -> dict[Path, Path]:
    paths = list(paths)
    at_root = {path[0] for path in paths if len(path) == 1}
    plain = {path: _plain(path, {"weight", "bias"} <= at_root) for path in paths}
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


def _plain(path: Path, has_bias: bool) -> Path:
    """With Flax's names for kernel, bias and the gain of a norm."""
    path = names.unwrapped(path)
    last = {"w": "kernel", "weight": "kernel", "b": "bias"}
    name = last.get("".join(path[-1:]))
    if not name or (len(path) == 1 and not has_bias):
        return path
    is_gain = name == "kernel" and names.is_norm(path)
    return (*path[:-1], "scale" if is_gain else name)


def _is_alone(role: str, siblings: Iterable[str]) -> bool:
    """Whether no second module would be called the same."""
    return sum(names.projection(name) == role for name in siblings) == 1


def _is_weight(path: Path) -> bool:
    """Whether a leaf is called as Equinox and Haliax call it."""
    return "weight" in path[-2:]


def _outputs_first(layers, written, bias_of) -> bool:
    """Whether what is called a weight has its outputs first, as the biases say."""
    votes = []
    for own, path in written.items():
        if _is_weight(own) and path[-1:] == ("kernel",):
            first = is_turned_by_bias(layers[own], bias_of.get(path[:-1], ()))
            votes += [] if first is None else [first]
    return sum(votes) * 2 >= len(votes)


def without_ones(bias: Shape) -> Shape:
    """Equinox keeps the bias of a convolution as `(out, 1, 1)`."""
    while len(bias) > 1 and bias[-1] == 1:
        bias = bias[:-1]
    return bias


def is_turned_by_bias(shape: Shape, bias: Shape) -> bool | None:
    """Whether outputs come first, as a bias says, which has just those."""
    bias = without_ones(bias)
    if not bias or len(bias) >= len(shape):
        return None
    first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
    return first if first != last else None


def _outputs_in_front(shape: Shape, bias: Shape, by_name: bool, module: Path) -> int:
    """How many axes in front are outputs, 0 where they are at the end."""
    told = is_turned_by_bias(shape, bias)
    if told:
        return len(without_ones(bias))
    if told is False or not by_name:
        return 0
    is_input = module and module[-1] in ("query", "key", "value")
    return len(shape) - 1 if is_input else 1


def _squeeze(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes
