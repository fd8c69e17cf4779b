"""The format of a jaxpr, read here alone, for all versions of JAX that are supported.

No other module of this wing knows where an equation keeps the jaxprs that it runs, what
the parameters of a loop are called, or where it has the line of code it comes from.
"""

import contextlib
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.extend.core import Literal

from .._model.statistics import STATISTIC


# Where an equation keeps the one jaxpr that it runs once, on its last inputs if it has
# more of them than the jaxpr: jit, pjit, closed_call, core_call, remat2, checkpoint,
# custom_jvp_call, custom_vjp_call, custom_vmap_call, shard_map. `jax.pmap` is a jitted
# shard_map in all versions from 0.8 on.
_RUN_ONCE = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")

# These keep a jaxpr, too, but it runs on references, on blocks, or on a transpose.
_OPAQUE = (
    *("pallas_call", "tpu_custom_call", "triton_kernel_call", "custom_partitioning"),
    *("ffi_call", "custom_call", "pure_callback", "io_callback", "run_state"),
    *("run_scoped", "core_map", "linear_call", "custom_linear_solve", "xla_pmap"),
)

# Code between a user's line and JAX: frameworks, not models.
_FRAMEWORKS = re.compile(
    r"[/\\](jax|jaxlib|flax|haiku|equinox|jaxtyping|einops|optax|chex|haliax|penzai|"
    r"keras|functools|contextlib|tokamax|muonclip_jax[/\\]_\w+)([/\\]|\.py)"
)


def names(words: str) -> frozenset[str]:
    """The names of primitives, or of other things, between spaces."""
    return frozenset(words.split())


class Inner(NamedTuple):
    """A jaxpr that an equation runs, with the values that it closes over."""

    jaxpr: Any
    consts: Sequence[Any]

    def run(
        self,
        values: Sequence[Any],
        step: Callable[[int, Any, list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Its outputs, where `step` gives those of an equation from its inputs."""
        env = dict(zip(self.jaxpr.invars, values, strict=True))
        env |= zip(self.jaxpr.constvars, self.consts, strict=True)

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

        for i, eqn in enumerate(self.jaxpr.eqns):
            env |= zip(eqn.outvars, step(i, eqn, read(eqn.invars)), strict=True)
        return read(self.jaxpr.outvars)


class Loop(NamedTuple):
    """A `scan` or a `while`: inputs are `consts`, then `carry`, then what it slices."""

    body: Inner
    consts: int
    carry: int
    trips: int | None = None  # those of a `while` only a run shows
    # A `while` has one, and in front of all other inputs those of it alone.
    condition: Inner | None = None
    first: int = 0


#: An equation, after those that it is inside of.
Eqns = tuple[Any, ...]

#: Where an equation is: its place in the jaxpr, and so on for those inside of it.
Address = tuple[int, ...]


def inner(closed: Any) -> Inner:
    """A jaxpr, open or closed, taken apart."""
    return Inner(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()))


def trace(fun: Any, *args: Any) -> Inner:
    """The jaxpr of a function of arrays, or of their shapes."""
    return inner(jax.make_jaxpr(fun)(*args))


def called(eqn: Any) -> Inner | None:
    """The jaxpr that an equation runs once; `None` if it is no such call."""
    keys = _RUN_ONCE if eqn.primitive.name not in _OPAQUE else ()
    found = (inner(eqn.params.get(key)) for key in keys)
    return next((body for body in found if hasattr(body.jaxpr, "eqns")), None)


def loop(eqn: Any) -> Loop | None:
    """The loop that an equation is, if it is one."""
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
    return Loop(inner(params["jaxpr"]), consts, carry, int(params["length"]))


def branches(eqn: Any) -> list[Inner]:
    return [inner(branch) for branch in eqn.params["branches"]]


def adds_one(jaxpr: Any, before: Any, after: Any) -> bool:
    """Whether one variable is another plus one, as `fori_loop` counts its trips."""
    made = [eqn for eqn in jaxpr.eqns if after in eqn.outvars]
    if not made or made[0].primitive.name != "add":
        return False
    one = [x for x in made[0].invars if x is not before]
    return len(one) == 1 and isinstance(one[0], Literal) and one[0].val == 1


def is_statistic(eqn: Any) -> bool:
    """Whether an array is named as the statistic of attention."""
    return eqn.primitive.name == "name" and eqn.params["name"] == STATISTIC


def live(jaxpr: Any) -> list[int]:
    """The places of the equations that outputs depend on.

    Statistics of attention are among them, though most losses do not return these.
    """
    # By their identity, since literals among them have no hash.
    wanted, kept = {id(v) for v in jaxpr.outvars}, []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if is_statistic(eqn) or any(id(v) in wanted for v in eqn.outvars):
            wanted.update(id(v) for v in eqn.invars)
            kept.append(i)
    return kept[::-1]


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable; a token or a reference has none to speak of."""
    return tuple(map(int, getattr(atom.aval, "shape", ())))


def mesh_cuts(eqn: Any, specs: str, i: int) -> dict[int, tuple[str, ...]]:
    """The dimensions that `shard_map` cuts of its i-th input, or output (`"out"`).

    Each with the axes of the mesh that do.
    """
    sizes, cuts = eqn.params["mesh"].shape, {}
    for dim, names in enumerate(eqn.params[f"{specs}_specs"][i]):
        names = (names,) if isinstance(names, str) else tuple(names or ())
        if math.prod(sizes[name] for name in names) > 1:
            cuts[dim] = names
    return cuts


def manual_in(eqn: Any) -> tuple[str, ...]:
    """The axes of its mesh over which `shard_map` maps."""
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return tuple(name for name in eqn.params["mesh"].axis_names if name in axes)


def axes_of(eqn: Any) -> tuple[str, ...]:
    """The axes of a mesh that a collective is over."""
    # Sums and maxima have them as "axes", what moves data as "axis_name".
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (found,) if isinstance(found, str) else tuple(found)


def kernel_name(eqn: Any) -> tuple[str, str]:
    """The function that an equation calls and its file:line, else its primitive."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    for body in (inner(eqn.params.get(key)).jaxpr for key in keys):
        if info := getattr(getattr(body, "debug_info", None), "func_src_info", None):
            name, _, file = str(info).replace("\\", "/").partition(" at ")
            return name, file
    return eqn.primitive.name, ""


def functions_in(eqn: Any) -> list[Any]:
    """The functions that an equation holds, such as those of a custom derivative.

    They are inside closures and wrappers of JAX, whose fields have these names.
    """
    fields = "f transforms params fun fwd bwd jvp func args __wrapped__ __func__"
    found, seen, left = [], {}, list(eqn.params.values())
    while left:
        x = left.pop()
        if x is None or id(x) in seen or isinstance(x, type):
            continue
        seen[id(x)] = x  # kept, so that no other object gets its id
        if isinstance(x, tuple | list):
            left += x
        elif isinstance(x, types.CellType):
            with contextlib.suppress(ValueError):  # an empty one
                left.append(x.cell_contents)
        else:
            found += [x] if isinstance(x, types.FunctionType) else []
            left += getattr(x, "__closure__", None) or ()
            left += [getattr(x, field, None) for field in fields.split()]
    return found


def line(eqns: Eqns) -> str:
    """The file and line of the model that an equation comes from, or `"?"`.

    The innermost frame that is of no framework, of the last equation or of those that
    it is inside of: functions that JAX has traced before do not know who calls them.
    Where all are, the innermost of those that JAX considers a user's.
    """
    frames = [
        frame
        for eqn in reversed(eqns)
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]
    if not frames:
        return "?"
    own = (f for f in frames if not _FRAMEWORKS.search(f.file_name))
    frame = next(own, frames[0])
    return f"{frame.file_name.replace(chr(92), '/').split('/')[-1]}:{frame.start_line}"


# How an equation is bound again, for the recorder.


@contextlib.contextmanager
def written_as(eqn: Any) -> Iterator[None]:
    """Gives what is bound inside the names and the line of an equation."""
    # Errors and profiles would name the recorder's own line, and lose named scopes.
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=names), eqn.ctx.manager:
        yield


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation on other values."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Before JAX 0.10, functions that it calls came apart from other parameters.
    functions, params = params if isinstance(params, tuple) else ((), params)
    with written_as(eqn):
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def call_again(eqn: Any, fun: Any) -> Any:
    """A function of arrays that is run as an equation runs the jaxpr in it.

    It returns a pair of the list of outputs that the equation has, and more. `None` for
    a call that cannot have more outputs, since a rule of its own gives its derivatives.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        # XLA's programs, profiles and the jaxpr of the result call it by this name.
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
    """`jax.lax.scan` of a function in place of an equation's jaxpr."""
    names = ("length", "reverse", "unroll")
    return jax.lax.scan(fun, carry, slices, **{n: eqn.params[n] for n in names})


def shard_map_again(eqn: Any, fun: Any, more_specs: Any) -> Any:
    """`jax.shard_map` of a function that returns what the equation does, and more."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), more_specs),
        check_vma=params["check_vma"],
        axis_names=set(manual_in(eqn)),
    )
