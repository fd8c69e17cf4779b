"""A function and its arguments as a jaxpr of the arrays among them."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .._options import shown
from .._parameters import paths
from . import jaxprs
from .symbols import symbols_in, Twin, twins_of


class Call(NamedTuple):
    """A function as the jaxpr of the arrays among its arguments, parameters first."""

    tree: paths.PathedTree  # the parameters
    arrays: list[int]  # indices of its leaves that are arrays
    body: jaxprs.Inner  # to read: symbolic dimensions have sizes in it
    original: jaxprs.Inner  # to run: with all symbolic dimensions
    twins: Sequence[Twin]  # `body` and another one, if dimensions are symbolic
    values: list[Any]  # the arrays to run it on
    # Returns the function's result, from the jaxpr's outputs. NNX objects among the
    # arguments change only when it is called.
    outputs: Callable[[Sequence[Any]], Any]


def check_function(fun: Any) -> None:
    """Raises if the first argument of a reading is no function."""
    if not callable(fun):
        raise ValueError(f"the function comes first, then the params; got {shown(fun)}")


@contextlib.contextmanager
def call_of(
    fun: Callable[..., Any], params: Any, /, *args: Any, **kwargs: Any
) -> Iterator[Call]:
    """Traces a function on the arrays among its arguments; other arguments stay.

    **Raises:** `ValueError` as `check_function` does.
    """
    check_function(fun)
    # Only code that imports Flax has objects of NNX; nobody else has to install it.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        run = _named_as(fun, lambda p, x, named: fun(p, *x, **named))
        yield _traced(run, params, args, kwargs)
    else:
        with nnx.update_context(__name__):
            yield _on_objects(nnx, fun, params, (args, kwargs))


def _on_objects(nnx: Any, fun: Any, params: Any, rest: Any) -> Call:
    """Traces a function of objects as a function of their state, which it returns, too.

    NNX's bookkeeping for transformations runs it on copies. All arguments and results
    share one graph, so an object that appears twice stays one object, even a new one.
    """
    is_object = nnx.graph.is_graph_node

    def parted(tree: Any) -> tuple[list[Any], list[Any], Any]:
        flat, treedef = jax.tree.flatten(tree, is_leaf=is_object)
        objects = [x if is_object(x) else None for x in flat]
        return objects, [None if is_object(x) else x for x in flat], treedef

    def joined(objects: list[Any], others: list[Any], treedef: Any) -> Any:
        pairs = zip(objects, others, strict=True)
        return treedef.unflatten(y if x is None else x for x, y in pairs)

    def split(*nodes: Any, tag: str | None = __name__) -> Any:
        is_param = nnx.All(nnx.Param, lambda path, _: path[0] == 0)
        with nnx.split_context(tag) as context:
            return context.split(nodes, is_param, ...)

    def merged(graph: Any, *states: Any, is_inner: bool) -> Any:
        with nnx.merge_context(__name__, inner=is_inner) as context:
            return context.merge(graph, *states)

    objects, others, treedef = parted(rest)
    # Variables without a module are an ordinary tree.
    is_module = any(not isinstance(x, nnx.Variable | None) for x in parted(params)[0])
    graph, param_state, state = split(params if is_module else None, objects)
    # The parameters of a module are those of `nnx.state(params, nnx.Param)`.
    given = param_state.get(0, param_state) if is_module else params

    def of_state(params: Any, state: Any, others: Any) -> Any:
        param_state = nnx.State({0: params} if is_module else {})
        module, objects = merged(graph, param_state, state, is_inner=True)
        args, kwargs = joined(objects, others, treedef)
        result = fun(module if is_module else params, *args, **kwargs)
        out_objects, *out = parted(result)
        new_graph, *after = split(module, objects, tag=None)
        before, has_new = (param_state, state), any(x is not None for x in out_objects)
        old, new = (list(map(id, jax.tree.leaves(x))) for x in (before, after))
        is_same = new_graph == graph and new == old and not has_new
        return split(module, objects, out_objects), out, is_same

    call = _traced(_named_as(fun, of_state), given, state, others)

    def outputs(values: Sequence[Any]) -> Any:
        of_objects, out, is_same = call.outputs(values)
        # Objects of an outer trace, as in a closure, must not be written to.
        out_objects = out[0] if is_same else merged(*of_objects, is_inner=False)[-1]
        return joined(out_objects, *out)

    return call._replace(outputs=outputs)


def _named_as(fun: Any, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the stand-in for a function, whose name and line JAX's errors give."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return functools.update_wrapper(stand_in, fun, assigned=(), updated=())


def _traced(fun: Callable[..., Any], params: Any, *rest: Any) -> Call:
    tree = paths.flatten(params)
    others, treedef = jax.tree.flatten(rest)
    given, end = [*tree.leaves, *others], len(tree.leaves)
    indices = [i for i, x in enumerate(given) if paths.is_array(x)]
    returned: list[Any] = []

    def of_arrays(*arrays: Any) -> Any:
        flat = list(given)
        for i, x in zip(indices, arrays, strict=True):
            flat[i] = x
        out = fun(tree.unflatten(flat[:end]), *treedef.unflatten(flat[end:]))
        out, structure = jax.tree.flatten(out)
        # An argument that is returned unchanged is returned as given. A stored tracer
        # would outlive its trace.
        args = {id(x): given[i] for i, x in zip(indices, arrays, strict=True)}
        new = [i for i, x in enumerate(out) if paths.is_array(x) and id(x) not in args]
        kept = [None if i in new else args.get(id(x), x) for i, x in enumerate(out)]
        returned[:] = structure, new, kept
        return [out[i] for i in new]

    def outputs(values: Sequence[Any]) -> Any:
        structure, new, out = returned
        for i, x in zip(new, values, strict=True):
            out[i] = x
        return structure.unflatten(out)

    values = [given[i] for i in indices]
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        if written := symbols_in(leaf):
            raise ValueError(
                f"{paths.show(path)} has the symbolic dimension {written[0]}: those of "
                "params must be integers, only those of other arguments may be symbolic"
            )
    try:
        body = jaxprs.trace(_named_as(fun, of_arrays), *values)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            "The function is traced as under jax.jit: params and batch have shapes, "
            "but no values. Write jnp.where or jax.lax.cond in place of an if on data; "
            "bind what is no data with functools.partial."
        )
        raise
    arrays, twins = [i for i in indices if i < end], twins_of(body)
    read = twins[0].body if twins else body
    return Call(tree, arrays, read, body, twins, values, outputs)
