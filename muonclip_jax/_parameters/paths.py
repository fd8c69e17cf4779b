"""Parameter paths, spelled the same for Linen, NNX and plain pytrees."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


Path = tuple[str, ...]
Shape = tuple[int, ...]

# Collections that wrap a whole tree without being a module of the model.
_COLLECTIONS = ("params", "intermediates")

# Keys of the one array in a box: Flax ("value"), Haliax, penzai; or it has a number.
_IN_BOX = {"value", "array", "data_array"}
_Number = jax.tree_util.FlattenedIndexKey


class LeafAt(dict[Path, Any]):
    """Leaves by path; `MaskedNode` for all below a module that a mask hides."""

    @functools.cached_property
    def hidden(self) -> set[Path]:
        return {path for path, leaf in self.items() if is_masked(leaf)}

    def __missing__(self, path: Path) -> optax.MaskedNode:
        if self.hides(path):
            return optax.MaskedNode()
        raise KeyError(path)

    def __contains__(self, path: object) -> bool:
        return super().__contains__(path) or self.hides(path)

    def hides(self, path: Any) -> bool:
        """Checks whether a mask hides a path, alone or with what holds it."""
        return bool(self.hidden) and any(
            path[:n] in self.hidden for n in range(len(path) + 1)
        )


class PathedTree(NamedTuple):
    """The leaves of a pytree with their paths, and the way back."""

    paths: tuple[Path, ...]
    leaves: tuple[Any, ...]
    treedef: Any
    axis_names: Mapping[Path, tuple[str, ...]] = MappingProxyType({})

    def rows(self, *entries: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Returns each leaf's path, the leaf, and its entries in other lists."""
        return zip(self.paths, self.leaves, *entries, strict=True)

    def unflatten(self, entries: Iterable[Any]) -> Any:
        """Returns the tree with other leaves; what a mask hides stays hidden."""
        rows = self.rows(entries)
        return self.treedef.unflatten([x if is_masked(x) else y for _, x, y in rows])

    def rebuilt(self) -> Any:
        """Returns the tree that was flattened."""
        return self.treedef.unflatten(self.leaves)

    def of(self, other: Any) -> list[Any]:
        """Returns the leaves of a second tree of the same structure."""
        return self.treedef.flatten_up_to(other)

    def by_path(self) -> LeafAt:
        """The leaves of params.

        **Raises:** `ValueError`, naming the paths, for leaves that are no arrays.
        """
        leaf_at = LeafAt(self.rows())
        hidden = [path for path, leaf in leaf_at.items() if not hasattr(leaf, "dtype")]
        if others := [path for path in hidden if not is_masked(leaf_at[path])]:
            raise ValueError(
                f"no arrays: {show_all(others)}. All params must be arrays: write a "
                "number as jnp.asarray(...), and pass an Equinox model as "
                "eqx.filter(model, eqx.is_inexact_array)"
            )
        return leaf_at


def is_array(leaf: Any) -> bool:
    """Checks for a shape and a dtype, which abstract arrays have, too."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_masked(leaf: Any) -> bool:
    """Checks whether `optax.masked` hides this leaf from the transformation."""
    return isinstance(leaf, optax.MaskedNode)


def is_function(x: Any) -> bool:
    """Checks whether to call it on the params; a callable NNX module is a tree."""
    is_leaf = jax.tree_util.all_leaves([x]) or isinstance(x, functools.partial)
    return callable(x) and is_leaf


def params_of(params: Any) -> Any:
    """Returns a module's part for an optimizer: the state of `nnx.Param`, or floats.

    NNX selects them by `wrt=nnx.Param`, Equinox by `eqx.is_inexact_array`. Equinox's
    modules may be anywhere in the tree. All else stays as it is.
    """
    # Whoever has a module of theirs has imported them.
    nnx, eqx = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    if nnx is not None and isinstance(params, nnx.Module):
        # Modules without variables, of arrays alone, are trees as they are.
        state = nnx.state(params, nnx.Param)
        return state if jax.tree.leaves(state) else params
    if eqx is None:
        return params

    def is_module(x: Any) -> bool:
        return isinstance(x, eqx.Module)

    def if_float(x: Any) -> Any:
        is_float = is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        return x if is_float else None

    return jax.tree.map(
        lambda x: jax.tree.map(if_float, x) if is_module(x) else x,
        params,
        is_leaf=is_module,
    )


def flatten(tree: Any, is_leaf: Callable[[Any], bool] = is_masked) -> PathedTree:
    """Flattens a tree, keeping masked leaves in sight as `optax.MaskedNode`.

    Nodes that wrap one array, of whichever library, are no part of a name: a tree is
    often unboxed on the way, as `nnx.Optimizer` and Linen's `nn.unbox` do.

    **Raises:** `ValueError` for leaves whose paths are spelled the same.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    paths, axis_names = [], {}
    for path, names in _walk(tree, (), (), is_leaf):
        while path and path[0] in _COLLECTIONS:
            path = path[1:]
        paths.append(path)
        axis_names |= {path: names} if names else {}
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(
            f"several leaves have the path {show_all(twice)}. Paths must differ, and a "
            "slash in a key separates modules: rename one"
        )
    return PathedTree(tuple(paths), tuple(leaves), treedef, axis_names)


def show(path: Path, root: str = "(the array itself)") -> str:
    """Writes a path the way error messages and tables show it."""
    return "/".join(path) or root


#: Writes the path of a module, which may be all of the params.
show_module = functools.partial(show, root="(the root)")


def show_all(paths: Iterable[Path], at_most: int | None = None) -> str:
    """Writes several paths, or the first of them and how many there are besides."""
    shown = [repr(show(path)) for path in paths]
    named, more = ", ".join(shown[:at_most]), len(shown[at_most or len(shown) :])
    return f"{named} and {more} more" if more else named


def split(path: str) -> Path:
    """Reads a path written with slashes."""
    return tuple(path.split("/")) if path else ()


def _walk(
    node: Any, path: Path, names: tuple[str, ...], is_leaf: Callable[[Any], bool]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the path of every leaf, and the names of its axes in the box around it."""
    if is_leaf(node):
        yield path, names
        return
    # Level by level: JAX's paths of leaves also name what is in a box, and a box may be
    # at any level.
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if treedef.node_data() is None and children:
        yield path, names
        return
    is_box = _is_box(node, is_leaf)
    names = (is_box and _axis_names(node)) or names
    for (key,), child in children:
        name = jax.tree_util.keystr((key,), simple=True)
        child_path = path if is_box or not name else (*path, *name.split("/"))
        yield from _walk(child, child_path, names, is_leaf)


def _is_box(node: Any, is_leaf: Callable[[Any], bool]) -> bool:
    """Checks for one array in a node: boxes of Flax, named arrays of Haliax, and such.

    The array's own name there says nothing, and the rest is about the array.
    """
    of_flax = _is_box_of_flax(type(node))
    if of_flax is not None or isinstance(node, tuple | list):
        return bool(of_flax)
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    data = treedef.node_data()
    if data is None or len(children) != 1:
        return False
    (((key,), child),), (kind, metadata) = children, data
    name = jax.tree_util.keystr((key,), simple=True)
    is_end = is_leaf(child) or jax.tree_util.all_leaves([child])
    if name != "value":
        may_be = name in _IN_BOX or isinstance(key, _Number)
        return may_be and (is_end or _is_box(child, is_leaf))
    # A module may hold nothing but its `value`; a box says something about it, or, in
    # penzai, holds a named array, in one more box.
    if is_end:
        return bool(metadata) and not issubclass(kind, Mapping)
    below = jax.tree.flatten_with_path(child, is_leaf=lambda x: x is not child)[0]
    return [jax.tree_util.keystr(x, simple=True) for x, _ in below] == ["data_array"]


@functools.cache
def _is_box_of_flax(kind: type) -> bool | None:
    """Checks for a variable of NNX or a box of Linen, without importing Flax.

    They may hold a tree, too. Returns `None` for a type of another library.
    """
    names = {x.__name__ for x in kind.__mro__ if f"{x.__module__}.".startswith("flax.")}
    if names & {"Variable", "AxisMetadata"}:
        return True
    is_nnx = any(f"{x.__module__}.".startswith("flax.nnx.") for x in kind.__mro__)
    return False if is_nnx else None


def _axis_names(box: Any) -> tuple[str, ...]:
    """Returns the names that a box gives the axes of its array, `()` if none.

    Linen's `LogicallyPartitioned` has `names`, Haliax `axes` of a name and a size,
    penzai `named_axes`; NNX keeps `out_sharding`, once `sharding`, in its metadata.
    """
    metadata = box.get_metadata() if hasattr(box, "get_metadata") else {}
    metadata = metadata if isinstance(metadata, Mapping) else {}
    axes = metadata.get("out_sharding") or metadata.get("sharding") or ()
    for attribute in ("names", "axes", "named_axes") if not metadata else ():
        axes = axes or getattr(box, attribute, ())
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        return ()
    return tuple(x if isinstance(x, str) else getattr(x, "name", "") for x in axes)
