"""What the format of a jaxpr says, for all versions of JAX that are supported.

No other module of this wing knows where an equation keeps the jaxprs that it runs, or
how it tells the line of code that it comes from.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.extend.core import Literal


# Under these keys an equation keeps the one jaxpr that it runs once, on its last inputs
# if it has more of them than the jaxpr. Known: jit, pjit, closed_call, core_call,
# remat2, checkpoint, custom_jvp_call, custom_vjp_call, custom_vmap_call, shard_map.
_RUN_ONCE = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")

#: Run code that is no jaxpr on the arrays, or one on their blocks.
OPAQUE = (
    *("pallas_call", "tpu_custom_call", "triton_kernel_call", "custom_partitioning"),
    *("ffi_call", "custom_call", "pure_callback", "io_callback", "run_state"),
    *("run_scoped", "core_map", "linear_call", "custom_linear_solve", "xla_pmap"),
)

# Code between a user's line and JAX: frameworks, not models.
_FRAMEWORKS = re.compile(
    r"[/\\](jax|jaxlib|flax|haiku|equinox|jaxtyping|einops|optax|chex|haliax|penzai|"
    r"keras|functools|contextlib|muonclip_jax[/\\]_\w+)([/\\]|\.py)"
)


class Inner(NamedTuple):
    """A jaxpr that an equation runs, with the values that it closes over."""

    jaxpr: Any
    consts: Sequence[Any]


class Loop(NamedTuple):
    """A `scan` or a `while`: inputs are `consts`, then `carry`, then what it takes."""

    body: Inner
    consts: int
    carry: int
    length: int | None


def inner(closed: Any) -> Inner:
    """A jaxpr, open or closed, taken apart."""
    return Inner(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()))


def called(eqn: Any) -> Inner | None:
    """The jaxpr that an equation runs once; `None` if it is no such call."""
    if eqn.primitive.name in OPAQUE:
        return None
    for key in _RUN_ONCE:
        if hasattr(eqn.params.get(key), "eqns") or hasattr(
            getattr(eqn.params.get(key), "jaxpr", None), "eqns"
        ):
            return inner(eqn.params[key])
    return None


def scanned(eqn: Any) -> Loop:
    params = eqn.params
    if "ft_in" in params:  # from JAX 0.12 on: a tree of consts, carry and what is taken
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    return Loop(inner(params["jaxpr"]), consts, carry, params["length"])


def repeated(eqn: Any) -> tuple[Inner, Loop]:
    """The condition and the body of a `while`; inputs of the first come first."""
    params = eqn.params
    body, consts = inner(params["body_jaxpr"]), params["body_nconsts"]
    carry = len(body.jaxpr.invars) - consts
    return inner(params["cond_jaxpr"]), Loop(body, consts, carry, None)


def branches(eqn: Any) -> list[Inner]:
    return [inner(branch) for branch in eqn.params["branches"]]


def live(jaxpr: Any) -> list[tuple[int, Any]]:
    """The equations that outputs depend on, with their places among all of them."""
    wanted, kept = {id(v) for v in jaxpr.outvars}, []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if any(id(v) in wanted for v in eqn.outvars):
            wanted.update(id(v) for v in eqn.invars)
            kept.append((i, eqn))
    return kept[::-1]


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable; a token or a reference has none to speak of."""
    return tuple(map(int, getattr(atom.aval, "shape", ())))


class Axes(NamedTuple):
    """Axes of a mesh, and how many devices there are along them."""

    names: tuple[str, ...]
    size: int


def mesh_cuts(eqn: Any, specs: str, i: int) -> list[tuple[int, Axes]]:
    """The dimensions that `shard_map` cuts of its i-th input, or output (`"out"`)."""
    sizes = eqn.params["mesh"].shape
    cuts = []
    for dim, names in enumerate(eqn.params[f"{specs}_specs"][i]):
        names = (names,) if isinstance(names, str) else tuple(names or ())
        count = math.prod(sizes[name] for name in names)
        if count > 1:
            cuts.append((dim, Axes(names, count)))
    return cuts


def axes_of(eqn: Any) -> tuple[str, ...]:
    """The axes of a mesh that a collective is over."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (found,) if isinstance(found, str) else tuple(found)


def line(eqn: Any) -> str:
    """The file and line of the model that an equation comes from, or `"?"`.

    The innermost frame that is of no framework; where all are, the innermost of those
    that JAX takes for a user's.
    """
    frames: Iterable[Any] = source_info_util.user_frames(eqn.source_info.traceback)
    first = None
    for frame in frames:
        first = first or frame
        if not _FRAMEWORKS.search(frame.file_name):
            return _written(frame)
    return _written(first) if first else "?"


def _written(frame: Any) -> str:
    *_, name = frame.file_name.replace("\\", "/").rsplit("/", 2)[-2:]
    return f"{name}:{frame.start_line}"


def trace(fun: Any, *args: Any) -> Inner:
    """The jaxpr of a function of arrays, or of their shapes."""
    return inner(jax.make_jaxpr(fun)(*args))


@contextlib.contextmanager
def written_as(eqn: Any) -> Iterator[None]:
    """What is bound inside has the names and the line of an equation."""
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


def same_call(eqn: Any, fun: Any) -> Any:
    """A function of arrays that is run as an equation runs the jaxpr in it.

    It returns a pair of the list of outputs that the equation has, and more. `None` for
    a call that cannot have more outputs, since a rule of its own tells its derivatives.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        fun.__name__ = params["name"]
        return jax.jit(
            fun,
            in_shardings=tuple(params["in_shardings"]),
            out_shardings=(list(params["out_shardings"]), None),
            inline=params["inline"],
        )
    if name in ("remat2", "checkpoint"):
        policy, prevent_cse = params["policy"], params["prevent_cse"]
        return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)
    return fun if name in ("closed_call", "core_call") else None


def map_again(eqn: Any, fun: Any, more_specs: Any) -> Any:
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


def manual_in(eqn: Any) -> tuple[str, ...]:
    """The axes of its mesh over which `shard_map` maps."""
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return tuple(name for name in eqn.params["mesh"].axis_names if name in axes)


def scan_again(eqn: Any, fun: Any, carry: Any, taken: Any) -> Any:
    """`jax.lax.scan` of a function in place of an equation's jaxpr."""
    names = ("length", "reverse", "unroll")
    return jax.lax.scan(fun, carry, taken, **{n: eqn.params[n] for n in names})


def run(body: Inner, values: Sequence[Any]) -> list[Any]:
    """A jaxpr on values, each of its equations bound again."""
    env = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    env |= zip(body.jaxpr.invars, values, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in body.jaxpr.eqns:
        outs = bound(eqn, [read(v) for v in eqn.invars])
        env |= zip(eqn.outvars, outs, strict=True)
    return [read(v) for v in body.jaxpr.outvars]
