"""Parameter paths, spelled the same for Linen, NNX and plain pytrees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax


Path = tuple[str, ...]

# Collections that wrap a whole tree without being a module of the model.
_COLLECTIONS = ("params", "intermediates")


class PathedTree(NamedTuple):
    """The leaves of a pytree beside their paths, and the way back."""

    paths: tuple[Path, ...]
    leaves: tuple[Any, ...]
    treedef: Any

    def unflatten(self, leaves) -> Any:
        return self.treedef.unflatten(leaves)

    def of(self, other: Any) -> list[Any]:
        """Returns the leaves of a second tree of the same structure."""
        return self.treedef.flatten_up_to(other)


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
