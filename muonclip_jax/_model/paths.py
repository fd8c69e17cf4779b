"""Parameter paths, spelled the same for Linen, NNX and plain pytrees."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax


Path = tuple[str, ...]

#: The axis of the layers in the leaves of a module that is stacked, by its path.
StackAxes = Mapping[str, int]
IN_FRONT: StackAxes = MappingProxyType({})

# Collections that wrap a whole tree without being a module of the model.
_COLLECTIONS = ("params", "intermediates")


class PathedTree(NamedTuple):
    """The leaves of a pytree beside their paths, and the way back."""

    paths: tuple[Path, ...]
    leaves: tuple[Any, ...]
    treedef: Any

    def unflatten(self, entries: Iterable[Any]) -> Any:
        """Returns the tree with other leaves; what a mask hides stays hidden."""
        pairs = zip(self.leaves, entries, strict=True)
        return self.treedef.unflatten([x if is_masked(x) else y for x, y in pairs])

    def whole(self) -> Any:
        """Returns the tree that was flattened."""
        return self.unflatten(self.leaves)

    def of(self, other: Any) -> list[Any]:
        """Returns the leaves of a second tree of the same structure."""
        return self.treedef.flatten_up_to(other)

    def by_path(self) -> dict[Path, Any]:
        return dict(zip(self.paths, self.leaves, strict=True))


def is_masked(leaf: Any) -> bool:
    """Whether `optax.masked` hides this leaf from the transformation."""
    return isinstance(leaf, optax.MaskedNode)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] = is_masked) -> PathedTree:
    """Flattens a tree, keeping masked leaves in sight as `optax.MaskedNode`."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = tuple(_read_keys(keys) for keys, _ in pairs)
    return PathedTree(paths, tuple(leaf for _, leaf in pairs), treedef)


def show(path: Path) -> str:
    """Writes a path the way error messages and tables show it."""
    return "/".join(path) or "(the array itself)"


def show_all(paths) -> str:
    return ", ".join(repr(show(path)) for path in paths)


def stack_axis_of(path: Path, stack_axes: StackAxes) -> int:
    """The axis along which the innermost named module that holds a path is stacked."""
    holders = [m for m in stack_axes if path[: len(split(m))] == split(m)]
    return stack_axes[max(holders, key=len)] if holders else 0


def check_stack_axes(tree: PathedTree, stack_axes: StackAxes) -> None:
    """Raises for modules that the params do not have."""
    if not stack_axes:
        return
    starts = {path[:n] for path in tree.paths for n in range(len(path) + 1)}
    absent = [split(module) for module in stack_axes if split(module) not in starts]
    if absent and tree.paths:
        raise ValueError(f"stack_axes names {show_all(absent)}, which the params lack")


def split(path: str) -> Path:
    """Reads a path written with slashes."""
    return tuple(path.split("/")) if path else ()


def _read_keys(keys: tuple[Any, ...]) -> Path:
    # The variables of an `nnx.State` add `.value` to the path; `nnx.Optimizer` hands
    # the same tree over as plain dicts during the update.
    variable = jax.tree_util.GetAttrKey("value")
    names = [_name(key) for key in keys if key != variable]
    path = tuple(part for name in names for part in split(name))
    while path and path[0] in _COLLECTIONS:
        path = path[1:]
    return path


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
