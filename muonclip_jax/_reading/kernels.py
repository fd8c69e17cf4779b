"""Defines what kernels of attention compute, because no equation has their logits.

The reading replaces a kernel by plain attention. The statistic is computed next to the
kernel, in memory that does not grow with the square of the length. `attention_rule`
teaches a kernel; the kernels of JAX, tokamax and this package are taught below.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._attention.max_logits import max_logits
from .._model.statistics import largest
from . import jaxprs


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """The attention that a kernel computes: the result of [`attention_rule`][]."""

    fun: Callable[..., Any]
    maxima: Callable[..., Any] | int | None
    name: str
    file: str
    of: Any
    functions: Sequence[Any]  # the kernel's function and its derivative rules, if any

    def rank(self, eqn: Any, file: str) -> int | None:
        """Returns how surely an equation of this name calls the kernel, or `None`."""
        if isinstance(self.of, str):
            code = f"/{file}".rsplit(":", 1)[0]
            is_there = not self.file or code.endswith(f"/{self.file}")
            return 0 if is_there else None
        if not self.functions:
            return 0 if self.of is eqn.primitive else None
        if self.file != file:
            return None
        # Functions from one factory begin at the same line. The functions that an
        # equation holds, such as its derivative rules, show which kernel it calls.
        places = [_place(x) for x in self.functions]
        alike = [x for x in jaxprs.functions_in(eqn) if _place(x) in places]
        is_own = all(x in self.functions for x in alike)
        is_own &= bool(alike) or len(self.functions) == 1
        return len(alike) if is_own else None

    def body(self, eqn: Any) -> jaxprs.Inner:
        """Returns the jaxpr of the plain function, on the inputs of a call."""
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
        return jaxprs.trace(lambda *inputs: _called(self.fun, eqn, inputs), *shapes)

    def largest(self, eqn: Any, inputs: Sequence[Any]) -> Any:
        """Returns the largest logit of every head, or `None` if it is not available."""
        if not callable(self.maxima):
            return None
        return _called(self.maxima, eqn, inputs)


#: All rules, in the order in which they were taught.
_KERNELS: list[AttentionRule] = []


def attention_rule(
    fun: Callable[..., Any], *, of: Any, maxima: Callable[..., Any] | int | None = None
) -> AttentionRule:
    """Teaches [`read_model`][] and [`record_attention`][] a kernel of yours.

    A kernel is a primitive, a function with `jax.custom_vjp` or `jax.custom_jvp`, or a
    Pallas kernel. After this call, all calls of the kernel are read as calls of `fun`,
    a plain function that computes the same. `fun` may omit masks and scales, which do
    not affect linearity. It is best to teach a kernel where it is defined.

    **Arguments:**

    - `fun`: `fun(*inputs)` takes a call's inputs and returns the output, or outputs in
        order. If it has an argument `params`, it gets the parameters of the equation.
    - `of`: the kernel: a function, a primitive, or a name. For a function of a library,
        write `"name at end/of/file.py"` with the file that defines it.
    - `maxima`: `maxima(*inputs)` returns the largest logit of every head, `(heads,)`,
        as [`max_logits`][] does. An integer is instead the index of the output that
        holds the largest logit of every row. Without `maxima`, the kernel's layers are
        read but not recorded.

    **Returns:** the rule. It holds for this function or primitive only: another one
    of the same name, or from the same factory, needs its own. A name stands for all
    functions that fit it. If several rules fit a call, the last one is used.

    **Raises:** `ValueError` if `of` is not a function, primitive or name, or if the
    function or primitive already has a rule.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> @jax.custom_vjp
        ... def fused(q, k, v):  # (length, heads, dim), in a kernel
        ...     return jax.pure_callback(lambda q, k, v: v, v, q, k, v)
        >>> fused.defvjp(lambda *x: (fused(*x), x), lambda x, g: (g, g, g))
        >>> def plain(q, k, v):
        ...     logits = jnp.einsum("qhd,khd->hqk", q, k)
        ...     return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), v)
        >>> rule = mc.attention_rule(
        ...     plain, of=fused, maxima=lambda q, k, v: mc.max_logits(q[None], k[None])
        ... )
        >>> def loss(p, x):
        ...     return fused(*(jnp.einsum("td,dhk->thk", x, p[n]) for n in "qkv")).sum()
        >>> params = {n: jnp.ones((8, 2, 4)) for n in "qkv"}
        >>> [layer] = mc.read_model(loss, params, jnp.ones((3, 8))).attention
        >>> layer.query[0].path, layer.key[0].path
        ('q', 'k')
    """
    functions: list[Any] = []
    if isinstance(of, str):
        name, _, file = of.partition(" at ")
    elif isinstance(primitive := getattr(of, "name", None), str):
        name, file = primitive, ""
    elif functions := _functions(of):
        name, file = _place(functions[0])
    else:
        raise ValueError(
            "of= must be the kernel: a function with jax.custom_vjp or jax.custom_jvp, "
            f'a primitive, or a name as "name at end/of/file.py"; got {of!r}'
        )
    if not isinstance(of, str) and any(rule.of is of for rule in _KERNELS):
        raise ValueError(
            f"{name} has a rule already, and a kernel has one. To run a cell of a "
            "notebook again, define the kernel in it, too"
        )
    rule = AttentionRule(fun, maxima, name, file, of, functions)
    _KERNELS.append(rule)
    return rule


def rule_of(eqn: Any) -> AttentionRule | None:
    """Returns the rule of the kernel that an equation calls, if there is one."""
    name, file = jaxprs.kernel_name(eqn)
    named = (x for x in _KERNELS if x.name == name)
    ranked = [(rank, x) for x in named if (rank := x.rank(eqn, file)) is not None]
    if not ranked:
        return None
    _, rule = ranked[-1]
    if rule.functions:
        surest = max(rank for rank, x in ranked if x.functions)
        best = [x for rank, x in ranked if rank == surest and x.functions]
        rule, codes = best[-1], [x.functions[0].__code__ for x in best]
        if codes.count(codes[-1]) > 1:
            raise ValueError(
                f"a trace cannot tell {rule.name} at {rule.file} from another kernel "
                "that the same lines made, which has a rule, too: give what differs as "
                "an argument, or give each a jax.custom_vjp with functions of its own"
            )
    return rule


def _functions(of: Any) -> list[Any]:
    """Returns the function of a kernel and the functions of its derivative rules."""
    rules, inside = [], of if callable(of) else None
    while inside is not None:
        rules += [getattr(inside, name, None) for name in ("fwd", "bwd", "jvp")]
        of, inside = inside, getattr(inside, "fun", None)
        inside = inside or getattr(of, "__wrapped__", None)
    functions = [inspect.unwrap(x) for x in (of, *rules) if x is not None]
    return [x for x in functions if hasattr(x, "__code__")]


def _place(function: Any) -> tuple[str, str]:
    """Returns a function's name and where it begins, as traces write them."""
    code = function.__code__
    return code.co_name, f"{code.co_filename}:{code.co_firstlineno}".replace("\\", "/")


def _called(fun: Callable[..., Any], eqn: Any, inputs: Sequence[Any]) -> Any:
    """Calls `fun`, with the equation's primitive and parameters if it takes them."""
    wanted = inspect.signature(fun).parameters
    given = {"params": eqn.params, "primitive": eqn.primitive}
    return fun(*inputs, **{k: v for k, v in given.items() if k in wanted})


# The kernels of JAX and tokamax, and the kernel of `mc.splash_attention`.


def _plain(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: Any = 0.0, heads: int = 1
) -> jax.Array:
    """Computes attention of `(batch, heads, length, dim)`, without mask and scale."""
    if heads == 2:  # (batch, length, heads, dim)
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return jnp.swapaxes(_plain(query, key, value, bias), 1, 2)
    if key.ndim < query.ndim:  # all query heads share one key head
        key, value = (jnp.expand_dims(x, -3) for x in (key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = (jnp.repeat(x, group, -3) for x in (key, value))
    return jax.nn.softmax(query @ key.mT + bias) @ value


def _of_arrays(*inputs: jax.Array, heads: int = 1) -> jax.Array:
    """Computes attention of Pallas kernels, whose code has scale and mask.

    Query, key and value are the first three floating-point inputs. Segments are
    integers, and so are the tables of blocks, which come first.
    """
    floats = [x for x in inputs if jnp.isdtype(x.dtype, "real floating")]
    return _plain(*floats[:3], heads=heads)


attention_rule(
    functools.partial(_of_arrays, heads=2),
    of="mha_forward at pallas/ops/gpu/attention.py",
)
attention_rule(
    _of_arrays, of="_flash_attention_kernel at pallas/ops/tpu/flash_attention.py"
)
# Splash attention has kernels of many names: for segments, for one key head and for
# gradients. This function calls all of them. For `mc.splash_attention` it returns the
# result of attention, log-sum-exps and maxima.
_SPLASH = "tpu/splash_attention/splash_attention_kernel.py"
attention_rule(_of_arrays, of=f"_splash_attention_custom at pallas/ops/{_SPLASH}")
attention_rule(
    _of_arrays,
    of=f"_splash_attention_custom at tokamax/_src/ops/experimental/{_SPLASH}",
    maxima=2,
)


def _cudnn(*inputs: Any, params: Any) -> jax.Array:
    # AttentionLayout.BNTH is 1.
    bias = inputs[3] if inputs[3].size else 0.0
    return _plain(*inputs[:3], bias=bias, heads=1 if params["layout"] == 1 else 2)


def _cudnn_largest(*inputs: Any, params: Any, primitive: Any) -> jax.Array | None:
    """Returns the maxima of `jax.nn.dot_product_attention(implementation="cudnn")`.

    The inputs are query, key, value, bias (with masks as large negative numbers), the
    lengths of query and key, and arrays for paged and packed sequences. The parameters
    are the same from JAX 0.8 to 0.12.
    """
    mask = getattr(params["mask_type"], "name", str(params["mask_type"]))
    # Offsets and pages are arrays of size zero where unused.
    is_packed = any(x.size for x in inputs[6:10])
    if is_packed or params.get("score_mod") is not None or mask == "ALIBI":
        return None
    query, key, _, bias, query_lengths, key_lengths = inputs[:6]
    if params["layout"] == 1:
        query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
    options: dict[str, Any] = {"scale": params["scale"]}
    if bias.size:
        options["bias"] = bias
    if "PADDING" in mask:
        # Padding of the query and of the key gets segments that match no other segment.
        lengths = zip((query, key), (query_lengths, key_lengths), strict=True)
        is_padding = [jnp.arange(x.shape[1]) >= n[:, None] for x, n in lengths]
        options["query_segment_ids"] = jnp.where(is_padding[0], 1, 0)
        options["key_segment_ids"] = jnp.where(is_padding[1], 2, 0)
    if window := params["sliding_window_length"]:
        # A query sees `window` keys: its own and the ones before it.
        options["local_window_size"] = (window - 1, 0)
    formed = functools.partial(
        max_logits, query, key, is_causal="CAUSAL" in mask, **options
    )
    if bias.size or "PADDING" in mask:
        return formed()

    def log_sums(query: jax.Array, scale: float) -> jax.Array:
        settings = {**params, "scale": scale, "is_training": True}
        return primitive.bind(query, *inputs[1:], **settings)[1]

    heads = 1 if params["layout"] == 1 else 2
    by_sums = functools.partial(
        largest_by_sums, log_sums, *inputs[:2], params["scale"], heads
    )
    return jax.lax.platform_dependent(cuda=by_sums, default=formed)


#: Logits are stretched to at most this size, so that the largest exponential dominates
#: the sum. A kernel rounds an exponent `x` by `2^-24 x`: here by a quarter.
_STRETCHED = 2.0**22


def largest_by_sums(
    log_sums: Callable[[jax.Array, float], jax.Array],
    query: jax.Array,
    key: jax.Array,
    scale: float,
    heads: int,
) -> jax.Array:
    """Returns the largest logits, by a kernel that returns log-sum-exps.

    With logits `b` times as large, `log(sum(exp(b x))) / b` exceeds the largest `x` by
    at most `log(keys) / b`. For 8,192 keys this is 2e-6 of the bound on logits by the
    norms of query and key, and far less unless all logits are alike. On an H100 it
    takes a tenth of the time of forming the logits (`benchmarks/accelerator.py`).

    `heads` is the axis of the heads in query and key; `log_sums(query, scale)` returns
    `(batch, heads, queries)`.
    """
    bound = abs(scale) * _longest(query, heads)
    of_keys = _longest(key, heads)
    bound *= jnp.repeat(of_keys, bound.size // of_keys.size)
    # A power of two scales the query without rounding, in float16 too.
    power = -jnp.ceil(jnp.log2(jnp.maximum(bound, 2.0**-14)))
    shape = [-1 if axis == heads else 1 for axis in range(query.ndim)]
    stretched = query * jnp.exp2(power).astype(query.dtype).reshape(shape)
    sums = log_sums(stretched, scale * _STRETCHED)
    return largest(sums, (0, 2)) / (_STRETCHED * jnp.exp2(power))


def _longest(x: jax.Array, heads: int) -> jax.Array:
    """Returns the largest norm of the vectors of each head."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), -1)
    others = tuple(axis for axis in range(squares.ndim) if axis != heads)
    return jnp.sqrt(jnp.max(squares, others))


attention_rule(_cudnn, of="dot_product_attention_fwd_wrapper", maxima=_cudnn_largest)
