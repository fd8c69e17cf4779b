"""Modules that hold a leaf by name, and the attention layers made of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._parameters import paths
from .._parameters.reading import is_turned_by_bias, Reading
from .._parameters.stacks import Shape, StackAxes
from .attention_layers import as_found, AttentionLayer, checked, Finder, modules_with
from .head_leaf import HeadLeaf


# How many names an error lists.
_SHOWN = 12


class Module(NamedTuple):
    """A module that holds a marker, and the shapes of one layer of the model."""

    path: paths.Path
    reading: Reading

    @property
    def leaf_at(self) -> paths.LeafAt:
        return self.reading.leaf_at

    def __str__(self) -> str:
        return "/".join(self.path)

    def show(self, name: str) -> str:
        """Writes the path of a leaf."""
        return paths.show((*self.path, *paths.split(name)))

    def has(self, name: str) -> bool:
        return (*self.path, *paths.split(name)) in self.leaf_at

    def leaf(self, name: str) -> Any:
        return self.leaf_at[*self.path, *paths.split(name)]

    def shape(self, name: str) -> Shape:
        return self.reading.layer((*self.path, *paths.split(name)))


def projection(name: str, module: Module, **where: Any) -> tuple[HeadLeaf, ...]:
    """The kernel of a Dense, and its bias if it has one.

    HuggingFace's GPT-2 keeps kernels as `(out, in)`, which their bias tells.
    """
    kernel, bias = (module.shape(f"{name}/{leaf}") for leaf in ("kernel", "bias"))
    turned = len(kernel) == 2 and is_turned_by_bias(kernel, bias)
    leaf = HeadLeaf(f"{name}/kernel", 2, **where)
    if turned:
        # All that `where` counts from the end has the inputs behind it.
        part = leaf.part and (leaf.part[0] - 1, leaf.part[1])
        axis = leaf.axis - 1 if isinstance(leaf.axis, int) else leaf.axis
        leaf = leaf._replace(axis=axis, part=part, split_axis=-2)
    has_bias = module.has(f"{name}/bias")
    return (leaf, HeadLeaf(f"{name}/bias", 1, **where)) if has_bias else (leaf,)


def check_flat(module: Module, name: str, head: int) -> None:
    """Raises for a kernel with an axis of heads; one head alone is `head` wide."""
    shape = module.shape(f"{name}/kernel")
    if len(shape) > 2 and _has_head_axis(module, name, head):
        raise ValueError(
            f"'{module.show(f'{name}/kernel')}' of shape {shape} has an axis of heads "
            "of its own; expected is (*stack, features, heads * head_dim). Kernels "
            "that Flax names need no preset, but mc.flax_attention_layers; describe "
            "others by mc.AttentionLayer with mc.HeadLeaf"
        )


def _has_head_axis(module: Module, name: str, head: int) -> bool:
    """Whether a kernel of rank 3 is no stack; where nothing tells, it is one."""
    kernel, bias = module.shape(f"{name}/kernel"), module.shape(f"{name}/bias")
    if bias:
        return bias != kernel[:-2] + kernel[-1:]
    if len(kernel) == 3 and module.reading.has_heads(module.path):
        return True
    # A single head, and no fewer layers than features: hardly a stack.
    return kernel[-1] <= head and kernel[0] >= kernel[-2]


def finder(
    marker: str | Sequence[str],
    layer: Callable[[Module], AttentionLayer],
    stack_axes: StackAxes,
) -> Finder:
    """Makes a layer of every module that holds a leaf at a marker."""
    markers = [marker] if isinstance(marker, str) else list(marker)

    def find(params: Any) -> list[AttentionLayer]:
        reading = Reading(paths.flatten(params), stack_axes)
        leaf_at = reading.leaf_at
        marked = (modules_with(paths.split(name), leaf_at) for name in markers)
        modules = list(dict.fromkeys(module for each in marked for module in each))
        # A mask may hide them all.
        if not modules and leaf_at and not leaf_at.hidden:
            raise ValueError(_nothing_found(markers[0], leaf_at))
        layers = [layer(Module(path, reading)) for path in modules]
        return checked(as_found(layers, reading), leaf_at)

    return find


def _nothing_found(marker: str, leaf_at: paths.LeafAt) -> str:
    depth = len(paths.split(marker))
    names = list(dict.fromkeys("/".join(path[-depth:]) for path in leaf_at))
    more = ", ..." if len(names) > _SHOWN else ""
    return (
        f"no attention layer found: no leaf is named '{marker}'. The params have "
        f"{', '.join(map(repr, names[:_SHOWN]))}{more}; name theirs in the arguments "
        "of the preset, or leave attention= out for Flax's own attention"
    )
