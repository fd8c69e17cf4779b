"""The format of a jaxpr, for all supported versions of JAX.

No other module in `_reading` knows where an equation keeps its jaxprs, how the
parameters of a loop are named, or where the line of code is recorded.
"""

import contextlib
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.extend.core import Literal

from .._model.statistics import STATISTIC


# Parameters in which an equation keeps the one jaxpr that it runs once. If the equation
# has more inputs than the jaxpr, it runs on the last ones. For jit, pjit, closed_call,
# core_call, remat2, checkpoint, custom_jvp_call, custom_vjp_call, custom_vmap_call and
# shard_map; since JAX 0.8, `jax.pmap` is a jitted shard_map.
_RUN_ONCE = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")

# These keep a jaxpr, too, but run it on references, on blocks or on a transpose.
_OPAQUE = (
    *("pallas_call", "tpu_custom_call", "triton_kernel_call", "custom_partitioning"),
    *("ffi_call", "custom_call", "pure_callback", "io_callback", "run_state"),
    *("run_scoped", "core_map", "linear_call", "custom_linear_solve", "xla_pmap"),
)

# Code between a user's line and JAX: frameworks, not models. Each has a name that it
# exports, which a user's own module called `optax` or `keras` lacks.
_FRAMEWORKS = {
    "jax": "jit",
    "flax": "core",
    "haiku": "transform",
    "equinox": "Module",
    "jaxtyping": "jaxtyped",
    "einops": "rearrange",
    "optax": "GradientTransformation",
    "chex": "assert_rank",
    "haliax": "NamedArray",
    "penzai": "core",
    "keras": "Model",
    "tokamax": "dot_product_attention",
    __name__.partition(".")[0]: "read_model",
}


class Inner(NamedTuple):
    """A jaxpr that an equation runs, with the values that it closes over."""

    jaxpr: Any
    consts: Sequence[Any]

    def run(
        self,
        values: Sequence[Any],
        step: Callable[[int, Any, list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Returns its outputs; `step` computes an equation's outputs from inputs."""
        env = dict(zip(self.jaxpr.invars, values, strict=True))
        env |= zip(self.jaxpr.constvars, self.consts, strict=True)

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

        for i, eqn in enumerate(self.jaxpr.eqns):
            env |= zip(eqn.outvars, step(i, eqn, read(eqn.invars)), strict=True)
        return read(self.jaxpr.outvars)


class Loop(NamedTuple):
    """A `scan` or a `while`: inputs are `consts`, then `carry`, then sliced arrays."""

    body: Inner
    consts: int
    carry: int
    trips: Any = None  # `None` for a `while`: only a run shows them
    # Only a `while` has a condition; its `first` constants precede all other inputs.
    condition: Inner | None = None
    first: int = 0
    is_reversed: bool = False  # the first trip takes the last slice


#: The equations around an equation, outermost first, then the equation itself.
Eqns = tuple[Any, ...]

#: The place of an equation in the jaxpr, preceded by the places of those around it.
Address = tuple[int, ...]


def inner(closed: Any) -> Inner:
    """Takes an open or closed jaxpr apart."""
    return Inner(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()))


def trace(fun: Any, *args: Any) -> Inner:
    """Returns the jaxpr of a function of arrays, or of their shapes."""
    return inner(jax.make_jaxpr(fun)(*args))


def called(eqn: Any) -> Inner | None:
    """Returns the jaxpr that an equation runs once; `None` if it is no such call."""
    keys = _RUN_ONCE if eqn.primitive.name not in _OPAQUE else ()
    bodies = (inner(eqn.params[key]) for key in keys if key in eqn.params)
    return next((body for body in bodies if hasattr(body.jaxpr, "eqns")), None)


def loop(eqn: Any) -> Loop | None:
    """Returns the loop that an equation runs; `None` if it is no loop."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        body, consts = inner(params["body_jaxpr"]), params["body_nconsts"]
        carry = len(body.jaxpr.invars) - consts
        of_condition = inner(params["cond_jaxpr"]), params["cond_nconsts"]
        return Loop(body, consts, carry, None, *of_condition)
    if name != "scan":
        return None
    if "ft_in" in params:  # from JAX 0.12 on: a tree of consts, carry and slices
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    body, trips = inner(params["jaxpr"]), params["length"]
    return Loop(body, consts, carry, trips, is_reversed=bool(params["reverse"]))


def branches(eqn: Any) -> list[Inner]:
    return [inner(branch) for branch in eqn.params["branches"]]


def has_slopes(eqn: Any) -> bool:
    """Whether an equation calls a function with a derivative of its own."""
    calls = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
    return eqn.primitive.name in calls


def step_of(jaxpr: Any, before: Any, after: Any) -> int | None:
    """Returns the number that is added to a variable in every trip, if it is known."""
    eqns = [eqn for eqn in jaxpr.eqns if any(x is after for x in eqn.outvars)]
    if before is after or not eqns or eqns[0].primitive.name != "add":
        return 0 if before is after else None
    added = [x for x in eqns[0].invars if x is not before]
    is_number = len(added) == 1 and isinstance(added[0], Literal)
    return int(added[0].val) if is_number else None


def is_statistic(eqn: Any) -> bool:
    """Whether an equation names an array as the statistic of attention."""
    return eqn.primitive.name == "name" and eqn.params["name"] == STATISTIC


def _transforms(eqn: Any) -> list[str]:
    """Returns the transformations of JAX that made an equation, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return [x.name for x in stack if isinstance(x, source_info_util.Transform)]


def is_differentiated(eqn: Any) -> bool:
    """Whether an equation is of a function that JAX differentiates, or its tangent."""
    transforms = _transforms(eqn)
    return "jvp" in transforms and not _is_backward(transforms)


def is_transposed(eqn: Any) -> bool:
    """Whether an equation is of the backward pass of a derivative.

    An equation of `jax.linear_transpose` is not: its transpose is the function.
    """
    return _is_backward(_transforms(eqn))


def _is_backward(names: list[str]) -> bool:
    return "transpose" in names and "jvp" in names[names.index("transpose") :]


def is_recomputed(eqn: Any) -> bool:
    """Whether a backward pass computes an equation of the forward pass again."""
    return any(
        x.name == "rematted_computation" for x in eqn.source_info.name_stack.stack
    )


def live(jaxpr: Any) -> list[int]:
    """Returns the places of the equations on which outputs depend.

    Statistics of attention count as outputs, though most losses do not return them. A
    function that is differentiated counts as used, though its value may not be.
    """
    # Compared by identity, since literals have no hash.
    wanted, kept = {id(v) for v in jaxpr.outvars}, []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        is_root = is_statistic(eqn) or is_differentiated(eqn)
        if is_root or any(id(v) in wanted for v in eqn.outvars):
            wanted.update(id(v) for v in eqn.invars)
            kept.append(i)
    return kept[::-1]


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a variable; `()` for a token or a reference."""
    return tuple(map(int, getattr(atom.aval, "shape", ())))


def mesh_cuts(eqn: Any, specs: str, i: int) -> dict[int, tuple[str, ...]]:
    """Returns mesh axes that cut dimensions of `shard_map`'s i-th input or output."""
    sizes, cuts = eqn.params["mesh"].shape, {}
    for dim, names in enumerate(eqn.params[f"{specs}_specs"][i]):
        names = (names,) if isinstance(names, str) else tuple(names or ())
        if math.prod(sizes[name] for name in names) > 1:
            cuts[dim] = names
    return cuts


def manual_in(eqn: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which `shard_map` maps."""
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return tuple(name for name in eqn.params["mesh"].axis_names if name in axes)


def axes_of(eqn: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a collective."""
    # Sums and maxima call them "axes"; primitives that move data call them "axis_name".
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (axes,) if isinstance(axes, str) else tuple(axes)


def kernel_name(eqn: Any) -> tuple[str, str]:
    """Returns the function that an equation calls and its file:line, or a primitive."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    for body in (inner(eqn.params[key]).jaxpr for key in keys if key in eqn.params):
        if info := getattr(getattr(body, "debug_info", None), "func_src_info", None):
            name, _, file = str(info).replace("\\", "/").partition(" at ")
            return name, file
    return eqn.primitive.name, ""


def functions_in(eqn: Any) -> list[Any]:
    """Returns the functions that an equation holds, as for a custom derivative.

    They are inside closures and wrappers of JAX, whose fields have these names.
    """
    fields = "f transforms params fun fwd bwd jvp func args __wrapped__ __func__"
    functions, seen, pending = [], {}, list(eqn.params.values())
    while pending:
        x = pending.pop()
        if x is None or id(x) in seen or isinstance(x, type):
            continue
        seen[id(x)] = x  # kept, so that no other object gets its id
        if isinstance(x, tuple | list):
            pending += x
        elif isinstance(x, types.CellType):
            with contextlib.suppress(ValueError):  # an empty one
                pending.append(x.cell_contents)
        else:
            functions += [x] if isinstance(x, types.FunctionType) else []
            pending += getattr(x, "__closure__", None) or ()
            pending += [getattr(x, field, None) for field in fields.split()]
    return functions


def line(eqns: Eqns) -> str:
    """Returns the file and line of the model that an equation comes from, or `"?"`.

    Takes the innermost frame outside frameworks, of the equation or of those around it:
    a function that JAX has already traced does not know its caller. If all frames are
    in frameworks, takes the innermost one that JAX considers a user's.
    """
    frames = [
        frame
        for eqn in reversed(eqns)
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]
    if not frames:
        return "?"
    outside = (f for f in frames if not _is_of_framework(f.file_name))
    frame = next(outside, frames[0])
    return f"{frame.file_name.replace(chr(92), '/').split('/')[-1]}:{frame.start_line}"


def _is_of_framework(file: str) -> bool:
    """Whether a file is of a framework that has been imported, or of this package.

    A folder's name alone says nothing: users have folders called `jax` and `flax`. JAX
    leaves out the standard library and its own frames, but for its Pallas kernels.
    """
    for name in _FRAMEWORKS.keys() & file.replace(chr(92), "/").split("/"):
        module = sys.modules.get(name)
        if module is not None and _FRAMEWORKS[name] in vars(module):
            folders = getattr(module, "__path__", ())
            if file.startswith(tuple(os.path.join(x, "") for x in folders)):
                return True
    return False


# Binding an equation again, for the recorder.


@contextlib.contextmanager
def written_as(eqn: Any) -> Iterator[None]:
    """Binds operations under the names and the line of an equation."""
    # Otherwise errors and profiles name the recorder's line and lose named scopes.
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
        yield


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation on other values."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.10, functions that it calls came apart from other parameters.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with written_as(eqn):
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def call_again(eqn: Any, fun: Any) -> Any:
    """Returns a function of arrays that runs as the equation runs its jaxpr.

    It returns a pair: the list of the equation's outputs, and additional outputs. A
    call with its own derivative rule cannot have these and gives `None`.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        # XLA's programs, profiles and the new jaxpr call it by this name.
        fun.__name__ = params["name"]
        shardings = {
            "in_shardings": tuple(params["in_shardings"]),
            "out_shardings": (list(params["out_shardings"]), None),
        }
        return jax.jit(fun, **shardings, inline=params["inline"])
    if name in ("remat2", "checkpoint"):
        policy, prevent_cse = params["policy"], params["prevent_cse"]
        return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)
    return fun if name in ("closed_call", "core_call") else None


def scan_again(eqn: Any, fun: Any, carry: Any, slices: Any) -> Any:
    """Runs `jax.lax.scan` of a function in place of an equation's jaxpr."""
    names = ("length", "reverse", "unroll")
    if jax.tree.leaves(slices):  # these have the length, which may be symbolic
        names = names[1:]
    return jax.lax.scan(fun, carry, slices, **{n: eqn.params[n] for n in names})


def shard_map_again(eqn: Any, fun: Any, more_specs: Any) -> Any:
    """Returns `jax.shard_map` of a function with additional outputs."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), more_specs),
        check_vma=params["check_vma"],
        axis_names=set(manual_in(eqn)),
    )
