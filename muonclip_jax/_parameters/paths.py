"""Parameter paths, spelled the same for Linen, NNX and plain pytrees."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax


Path = tuple[str, ...]

# Collections that wrap a whole tree without being a module of the model.
_COLLECTIONS = ("params", "intermediates")

_Keys = tuple[Any, ...]


class LeafAt(dict[Path, Any]):
    """Leaves by path; `MaskedNode` for all below a module that a mask hides as one."""

    def __init__(self, paths: Iterable[Path], leaves: Iterable[Any]):
        super().__init__(zip(paths, leaves, strict=True))
        self.hidden = {path for path, leaf in self.items() if is_masked(leaf)}

    def __missing__(self, path: Path) -> optax.MaskedNode:
        if self.hides(path):
            return optax.MaskedNode()
        raise KeyError(path)

    def __contains__(self, path: object) -> bool:
        return super().__contains__(path) or self.hides(path)

    def hides(self, path: Any) -> bool:
        """Whether a mask hides what is at a path, alone or with what holds it."""
        if not self.hidden:
            return False
        return any(path[:n] in self.hidden for n in range(len(path) + 1))

    def modules_with(self, mark: Path) -> list[Path]:
        """The modules that hold a path `mark`, or the part of it that is in sight."""
        lengths = range(1, len(mark) + 1)
        modules = [
            path[:-n]
            for path in self
            for n in lengths
            if path[-n:] == mark[:n] and (n == len(mark) or path in self.hidden)
        ]
        return list(dict.fromkeys(modules))


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

    def by_path(self) -> LeafAt:
        """The leaves of params.

        **Raises:** `ValueError`, naming the paths, for leaves that are no arrays.
        """
        leaf_at = LeafAt(self.paths, self.leaves)
        others = [p for p, x in leaf_at.items() if not is_array(x) and not is_masked(x)]
        if others:
            raise ValueError(
                f"no arrays: {show_all(others)}. Params hold arrays alone: write a "
                "number as jnp.asarray(...), and pass an Equinox model as "
                "eqx.filter(model, eqx.is_inexact_array)"
            )
        return leaf_at


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, as abstract arrays do, too."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_masked(leaf: Any) -> bool:
    """Whether `optax.masked` hides this leaf from the transformation."""
    return isinstance(leaf, optax.MaskedNode)


def is_function(x: Any) -> bool:
    """Whether to call it on the params; a module of NNX may be callable and a tree."""
    is_leaf = jax.tree_util.all_leaves([x]) or isinstance(x, functools.partial)
    return callable(x) and is_leaf


def flatten(tree: Any, is_leaf: Callable[[Any], bool] = is_masked) -> PathedTree:
    """Flattens a tree, keeping masked leaves in sight as `optax.MaskedNode`.

    **Raises:** `ValueError` for leaves whose paths are spelled the same.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    may_have_boxes = any(_may_be_in_box(key) for keys, _ in pairs for key in keys)
    boxes = _boxes(tree, is_leaf) if may_have_boxes else frozenset()
    paths = tuple(_read_keys(keys, boxes) for keys, _ in pairs)
    if len(set(paths)) < len(paths):
        raise ValueError(_of_the_same_name(paths))
    return PathedTree(paths, tuple(leaf for _, leaf in pairs), treedef)


def show(path: Path) -> str:
    """Writes a path the way error messages and tables show it."""
    return "/".join(path) or "(the array itself)"


def show_module(path: Path) -> str:
    """Writes the path of a module, which may be all of the params."""
    return "/".join(path) or "(the root)"


def show_all(paths: Iterable[Path], at_most: int | None = None) -> str:
    """Writes several paths, or the first of them and how many there are besides."""
    shown = [repr(show(path)) for path in paths]
    named = ", ".join(shown[:at_most])
    more = len(shown) - (len(shown) if at_most is None else at_most)
    return f"{named} and {more} more" if more > 0 else named


def split(path: str) -> Path:
    """Reads a path written with slashes."""
    return tuple(path.split("/")) if path else ()


def _of_the_same_name(paths: Iterable[Path]) -> str:
    found = [path for path, count in Counter(paths).items() if count > 1]
    return (
        f"several leaves have the path {show_all(found)}. Rules, patterns and state go "
        "by path, in which a slash in a key divides as a module does: rename one"
    )


def _read_keys(keys: _Keys, boxes: frozenset[_Keys]) -> Path:
    if boxes:
        keys = tuple(key for i, key in enumerate(keys) if keys[:i] not in boxes)
    path = tuple(part for key in keys for part in split(_name(key)))
    while path and path[0] in _COLLECTIONS:
        path = path[1:]
    return path


def _boxes(tree: Any, is_leaf: Callable[[Any], bool]) -> frozenset[_Keys]:
    """Where nodes wrap one array, of whichever library; they are no part of a name.

    A tree is often unboxed on the way: `nnx.Optimizer` hands over plain dicts during
    the update, Linen's users call `nn.unbox`.
    """

    def found(node: Any, keys: _Keys) -> Iterator[_Keys]:
        def is_end(x: Any) -> bool:
            return x is not node and (is_leaf(x) or _is_box(x, is_leaf))

        if _is_box(node, is_leaf):
            yield keys
        for below, x in jax.tree_util.tree_flatten_with_path(node, is_leaf=is_end)[0]:
            if below and not is_leaf(x):
                yield from found(x, keys + below)

    return frozenset(found(tree, ()))


def _may_be_in_box(key: Any) -> bool:
    return isinstance(key, jax.tree_util.FlattenedIndexKey) or (
        _name(key) in ("value", "array")
    )


def _is_box(node: Any, is_leaf: Callable[[Any], bool]) -> bool:
    """Whether a node wraps one array: boxes of Flax, named arrays of Haliax, and such.

    What the array is called in it says nothing, and the rest is about the array.
    """
    told = _is_box_of_flax(type(node))
    if told is not None or isinstance(node, tuple | list):
        return bool(told)
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    data = treedef.node_data()
    if data is None or len(children) != 1:
        return False
    ((key,), child), (kind, about) = children[0], data
    is_array = is_leaf(child) or jax.tree_util.all_leaves([child])
    if isinstance(key, jax.tree_util.FlattenedIndexKey) or _name(key) == "array":
        return is_array or _is_box(child, is_leaf)
    # A module may hold nothing but its `value`; a box says something about it.
    is_value = _name(key) == "value" and bool(about) and is_array
    return is_value and not issubclass(kind, Mapping)


@functools.cache
def _is_box_of_flax(kind: type) -> bool | None:
    """Whether it is a variable of NNX or a box of Linen, told without importing Flax.

    They may hold a tree, too. `None` for what is not Flax's.
    """
    names = {base.__name__ for base in kind.__mro__ if _is_of(base, "flax")}
    if names & {"Variable", "AxisMetadata"}:
        return True
    return False if any(_is_of(base, "flax.nnx") for base in kind.__mro__) else None


def _is_of(kind: type, package: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{package}.")


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
