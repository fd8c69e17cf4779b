"""Defines `record_attention`, which adds the largest logit of every head."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._attention.logits import without_bias
from .._mesh_axes import varying
from .._model.statistics import largest, largest_of_devices, STATISTIC
from .._options import check_flag, shown
from . import jaxprs, kernels
from .attention import Layer
from .jaxprs import Address
from .named_layers import NamedLayer
from .primitives import Kind, kind_of
from .reading import read_call
from .sites import Site
from .traced_call import Call, call_of, check_function


P = ParamSpec("P")
R = TypeVar("R")
Aux = TypeVar("Aux")


@overload
def record_attention(
    fun: Callable[P, R], has_aux: Literal[False] = False, *, strict: bool = True
) -> Callable[P, tuple[R, Any]]: ...


@overload
def record_attention(
    fun: Callable[P, tuple[R, Aux]], has_aux: Literal[True], *, strict: bool = True
) -> Callable[P, tuple[R, tuple[Aux, Any]]]: ...


def record_attention(
    fun: Callable[P, Any], has_aux: bool = False, *, strict: bool = True
) -> Callable[P, tuple[Any, Any]]:
    """Makes a function that also returns the largest logit of every head.

    The function runs the operations of `fun` one by one and takes a maximum at every
    softmax of attention. Values and gradients do not change. It composes with
    `jax.jit`, `jax.grad`, `jax.vmap` and `jax.checkpoint`, outside and inside `fun`.
    Call it under `jax.jit`, like any training step, because every call traces `fun`.
    NNX objects among the arguments are updated as by `fun`.

    The statistic is the maximum over batch, queries and keys of the scaled logits of
    all visible pairs. It is taken before a softcap, and without biases that do not
    depend on query or key. An array that is added to the logits hides a pair where its
    entry is -9,900 or less. Logits that no parameter scales are recorded, too, so that
    they can be watched; `read_model(...).unrecorded` lists what is not recorded.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, as for [`read_model`][]. For `jax.export`,
        dimensions of arguments other than the params may be symbolic.
    - `has_aux`: whether `fun` returns a pair whose second element is auxiliary.
    - `strict`: whether to raise an error for an operation that may be attention but
        cannot be read, such as a Pallas kernel with several activations as inputs. Set
        it to `False` if you know that no such operation is attention.

    **Returns:** a function of the same arguments that returns `(out, stats)`, or
    `(out, (aux, stats))` with `has_aux`. Pass `stats` as `attention_stats`. It has a
    leaf `<path of the layer>/max_logits` for each layer of `read_model(...).attention`,
    and for each that is recorded and not scaled.
    The shape is `(heads,)`, or `(*stack, heads)` for layers that `jax.lax.scan` runs.

    **Raises:** `ValueError` if `fun` is no function, or returns no pair with `has_aux`;
    and, with file and line, if logits cannot be recorded.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> def loss(params, x):
        ...     heads = lambda kernel: jnp.einsum("td,dhk->htk", x, kernel)
        ...     logits = heads(params["q"]) @ heads(params["k"]).mT
        ...     return jnp.sum(jax.nn.softmax(logits) @ heads(params["v"]))
        >>> params = {name: jnp.ones((8, 2, 4)) for name in "qkv"}
        >>> step = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
        >>> (value, stats), grads = jax.jit(step)(params, jnp.ones((3, 8)))
        >>> stats
        {'max_logits': Array([256., 256.], dtype=float32)}
    """
    has_aux, strict = check_flag("has_aux", has_aux), check_flag("strict", strict)
    check_function(fun)

    @functools.wraps(fun)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError(
                "the function of record_attention needs the params as its first "
                "argument, by position"
            )
        with call_of(fun, *args, **kwargs) as call:
            out, stats = _run(call, strict)
        if not has_aux:
            return out, stats
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise ValueError(
                "has_aux=True: the function must return (out, aux), and returned "
                f"{shown(out)}. Without aux, leave has_aux out of record_attention, "
                "but not of jax.value_and_grad"
            )
        return out[0], (out[1], stats)

    return recorded


#: The statistics found up to now, by the number of their site.
Stats = dict[int, jax.Array]

#: Where logits are recorded, by the identity of the site that the reading found.
Sites = dict[int, tuple[Layer, Site]]


def _run(call: Call, strict: bool) -> tuple[Any, Any]:
    """Returns the function's result and the statistics."""
    _, layers, hidden = read_call(call)
    if strict and hidden:
        raise ValueError(
            f"attention may be hidden in {', '.join(hidden)}, which cannot be "
            "read. If it is, use jax.nn.dot_product_attention (on a GPU with "
            'implementation="cudnn"), mc.blockwise_attention or mc.splash_attention '
            "instead; if it is not, give strict=False"
        )
    # Layers that one loop runs, or one product has, are recorded together.
    layer_sites = _sites(layers)
    sites = {id(site): (layer, site) for layer, site in layer_sites}
    if call.twins:
        sites = _in_symbols(call, layer_sites)
    outs, recorded = _Recorder([*sites.values()]).run(call.original, call.values, ())
    by_site = {key: recorded[n] for n, key in enumerate(sites)}
    stats: dict[str, Any] = {}
    for named in (x for x in layers if x.is_recorded):
        node = functools.reduce(lambda x, k: x.setdefault(k, {}), named.path, stats)
        for layer, site in ((x, y) for x in named.calls for y in x.sites):
            x = _of_layer(layer, by_site[id(site)])
            # The statistic is the maximum over the places where logits enter a softmax,
            # and over the calls of a layer.
            node[STATISTIC] = (
                jnp.maximum(node[STATISTIC], x) if STATISTIC in node else x
            )
    return call.outputs(_values(outs)), stats


def _sites(layers: Sequence[NamedLayer]) -> list[tuple[Layer, Site]]:
    """Returns where to record the layers that have a statistic."""
    recorded = [x for named in layers if named.is_recorded for x in named.calls]
    for layer in recorded:
        if not layer.sites:
            raise ValueError(f"the logits of {layer.line} {layer.unclear}")
    return [(layer, site) for layer in recorded for site in layer.sites]


def _in_symbols(call: Call, layer_sites: Sequence[tuple[Layer, Site]]) -> Sites:
    """Returns the sites for all sizes of symbolic dimensions, by a second reading."""
    other = call._replace(body=call.twins[1].body)
    sites, of_twins = {}, _sites(read_call(other)[1])
    if len(of_twins) != len(layer_sites):
        of_twins = [None] * len(layer_sites)
    for (layer, site), of_twin in zip(layer_sites, of_twins, strict=True):
        is_same = of_twin is not None and layer.stacked == of_twin[0].stacked
        new = site.in_symbols(of_twin[1], call.twins) if of_twin and is_same else None
        if new is None:
            raise ValueError(
                f"the logits of {layer.line} cannot be recorded for every size of "
                f"{', '.join(call.twins[0].sizes)}: their place or their factor in the "
                "softmax is no dimension of an array. Make shapes of integers, or keep "
                "batch, heads and length in axes of their own"
            )
        sites[id(site)] = layer, new
    return sites


def _of_layer(layer: Layer, recorded: jax.Array) -> jax.Array:
    """Returns the statistic of one of the layers that were recorded together."""
    # If a loop runs over heads, its axis and the heads of each trip become one axis.
    depth = len(layer.loops)
    count = math.prod(recorded.shape[:depth])
    rows = recorded.reshape((count, -1))
    if layer.own_heads is not None:
        rows = rows[:, np.array(layer.own_heads)]
    if layer.trips is None:
        return rows.reshape((*recorded.shape[:depth], -1))
    *stack, each = layer.trips.shape
    if not np.array_equal(layer.trips.ravel(), np.arange(count)):
        rows = rows[layer.trips.ravel()]
    rows = rows.reshape((*stack, each, -1))
    return rows[..., 0, :] if each == 1 else largest(rows, -2)


class _Changed(NamedTuple):
    """Logits after a softcap or a bias, and the logits of query and key alone."""

    value: Any
    raw: Any  # -inf where the bias hides a pair


def _values(arrays: Sequence[Any]) -> list[Any]:
    return [x.value if isinstance(x, _Changed) else x for x in arrays]


def _raw(arrays: Sequence[Any]) -> list[Any]:
    return [x.raw if isinstance(x, _Changed) else x for x in arrays]


def _split_as(like: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, as `_Changed` wherever `like` has `_Changed`."""
    return [
        _Changed(x, x)
        if isinstance(other, _Changed) and not isinstance(x, _Changed)
        else x
        for other, x in zip(like, arrays, strict=True)
    ]


class _Recorder:
    """Runs a jaxpr again and takes the maximum where logits enter a softmax."""

    def __init__(self, sites: Sequence[tuple[Layer, Site]]):
        self._layers = {n: layer for n, (layer, _) in enumerate(sites)}
        self._sites = {n: site for n, (_, site) in enumerate(sites)}
        # Equations between products and softmaxes, with the operands that are a bias;
        # and the equations whose inner jaxprs hold them.
        self._biases: dict[Address, set[int]] = {}
        for _, site in sites:
            for address, biases in site.biases.items():
                self._biases.setdefault(address, set()).update(biases)
        self._around = {
            address[:n] for address in self._biases for n in range(1, len(address))
        }

    def run(
        self, body: jaxprs.Inner, values: Sequence[Any], outer: Address, branch: int = 0
    ) -> tuple[list[Any], Stats]:
        stats: Stats = {}

        def step(i: int, eqn: Any, inputs: list[Any]) -> list[Any]:
            address = (*outer, branch, i)
            outs, inner = self._rerun(eqn, inputs, address)
            stats.update(inner)
            for n, site in self._sites.items():
                if site.eqn.address == address:
                    logits = inputs[site.operand]
                    assert not site.biases or isinstance(logits, _Changed)
                    stats[n] = site.largest(*_raw([logits]))
            return self._split(eqn, inputs, outs, address)

        # Dead equations run, too, so that effects, names and random keys do not change.
        return body.run(values, step), stats

    def _inside(self, address: Address) -> dict[int, Layer]:
        """Returns the layers with a site in the jaxpr that an equation runs."""
        places = {n: site.eqn.address for n, site in self._sites.items()}
        return {
            n: self._layers[n]
            for n, x in places.items()
            if x[: len(address)] == address != x
        }

    def _split(
        self, eqn: Any, inputs: list[Any], outs: list[Any], address: Address
    ) -> list[Any]:
        """Returns an equation's outputs, as `_Changed` from the first bias or softcap.

        The equation runs a second time, without biases, on logits of query and key.
        """
        biases, kind = self._biases.get(address), kind_of(eqn.primitive.name)
        is_cap = kind is Kind.SOFTCAP
        is_split = any(isinstance(x, _Changed) for x in inputs)
        if biases is None or not (biases or is_cap or is_split):
            return outs
        raw = jax.lax.stop_gradient(_raw(inputs))
        if is_cap:  # skip tanh: the division by the cap and the product with it cancel
            return [_Changed(*outs, *raw)]
        for i in biases:
            sign = -1 if kind is Kind.DIFFERENCE and i == 1 else 1
            raw[i] = without_bias(raw[i], sign)
        return [*map(_Changed, outs, jaxprs.bound(eqn, raw))]

    def _rerun(self, eqn: Any, inputs: list[Any], address: Address) -> Any:
        """Returns the outputs of an equation and the statistics of its inner sites."""
        inside, rule = self._inside(address), kernels.rule_of(eqn)
        if not inside and (rule or address not in self._around):
            return jaxprs.bound(eqn, _values(inputs)), {}
        if rule:
            (layer, *_), inputs = inside.values(), _values(inputs)
            maxima = rule.largest(eqn, jax.lax.stop_gradient(inputs))
            if maxima is None:
                raise ValueError(
                    f"the logits of {layer.line} cannot be recorded: mask and scale "
                    f"are in the code of {rule.name}. Use mc.splash_attention or "
                    "mc.blockwise_attention instead, or give mc.attention_rule its "
                    "largest logits as maxima="
                )
            if maxima.size != layer.recorded:
                raise ValueError(
                    f"the kernel at {layer.line} has {maxima.size} heads, but its "
                    f"query and key have {layer.recorded}: give it an axis of heads"
                )
            return jaxprs.bound(eqn, inputs), dict.fromkeys(inside, maxima)
        # Loops, branches and `shard_map` have a method each.
        if rerun := getattr(self, f"_{eqn.primitive.name}", None):
            with jaxprs.written_as(eqn):
                return rerun(eqn, inputs, address)
        body: Any = jaxprs.called(eqn)
        operands = slice(len(inputs) - len(body.jaxpr.invars), None)
        if call := jaxprs.call_again(eqn, lambda *x: self.run(body, x, address)):
            with jaxprs.written_as(eqn):
                return call(*inputs[operands])
        # A custom derivative cannot return statistics as further outputs. The body
        # therefore runs again, without gradients. XLA merges the two runs.
        stopped = jax.lax.stop_gradient(inputs[operands])
        again, stats = self.run(body, stopped, address)
        both = zip(jaxprs.bound(eqn, _values(inputs)), again, strict=True)
        outs = [_Changed(x, y.raw) if isinstance(y, _Changed) else x for x, y in both]
        return outs, stats

    def _start(self, trip: Any, start: list[Any], address: Address) -> list[Any]:
        """Returns a loop's initial carry, as `_Changed` where a trip returns these."""
        if address not in self._around:
            return start
        split = _split_as(jax.eval_shape(trip, start), start)
        is_same = len(jax.tree.leaves(split)) == len(jax.tree.leaves(start))
        return start if is_same else self._start(trip, split, address)

    def _scan(self, eqn: Any, inputs: list[Any], address: Address):
        loop: Any = jaxprs.loop(eqn)
        consts, carry, end = loop.consts, loop.carry, loop.consts + loop.carry

        def trip(state: Any, slices: Any) -> Any:
            outs, stats = self.run(
                loop.body, [*inputs[:consts], *state, *slices], address
            )
            return _split_as(state, outs[:carry]), (outs[carry:], stats)

        def first(state: Any) -> Any:
            return trip(state, jax.tree.map(lambda x: x[0], inputs[end:]))[0]

        start = self._start(first, inputs[consts:end], address)
        state, (rest, stats) = jaxprs.scan_again(eqn, trip, start, inputs[end:])
        for n, x in stats.items():
            layer = self._layers[n]
            is_apart = address in {*layer.loops, *layer.loops_of_heads}
            stats[n] = x if is_apart else largest(x, 0)
        return [*state, *rest], stats

    def _while(self, eqn: Any, inputs: list[Any], address: Address):
        loop: Any = jaxprs.loop(eqn)
        of_condition, rest = inputs[: loop.first], inputs[loop.first :]
        consts, start = rest[: loop.consts], rest[loop.consts :]

        def is_on(carry: Any) -> Any:
            values = [*of_condition, *carry[0]]
            return _values(self.run(loop.condition, values, address, branch=1)[0])[0]

        def trip(state: Any) -> Any:
            outs, stats = self.run(loop.body, [*consts, *state], address)
            return _split_as(state, outs), stats

        def step(carry: Any) -> Any:
            state, stats = trip(carry[0])
            return state, jax.tree.map(jnp.maximum, carry[1], stats)

        # The loop carries the statistics. They begin at -inf: it may run no trip.
        start = self._start(lambda x: trip(x)[0], start, address)
        shapes = jax.eval_shape(lambda x: trip(x)[1], start)
        return jax.lax.while_loop(is_on, step, (start, _nothing(shapes)))

    def _cond(self, eqn: Any, inputs: list[Any], address: Address):
        """Runs the chosen branch; heads of other branches get -inf."""
        (index, *args), all_stats = inputs, {}
        like: list[Any] = [None] * len(eqn.outvars)

        def whole(run: Any, args: list[Any]) -> Any:
            outs, stats = run(args)
            return _split_as(like, outs), _nothing(all_stats) | stats

        runs = [
            lambda args, body=body, i=i: self.run(body, args, address, i)
            for i, body in enumerate(jaxprs.branches(eqn))
        ]
        for run in runs:
            outs, stats = jax.eval_shape(run, args)
            like, all_stats = _split_as(outs, like), all_stats | stats
        return jax.lax.switch(index, [functools.partial(whole, r) for r in runs], args)

    def _shard_map(self, eqn: Any, inputs: list[Any], address: Address):
        """Runs on each device: some mesh axes split the heads, others the batch."""
        body: Any = jaxprs.called(eqn)
        mesh_axes, of_heads, specs = jaxprs.manual_in(eqn), {}, {}
        for n, layer in self._inside(address).items():
            # Loops and mesh axes outside of it are handled by their own equations.
            stack = [None for loop in layer.loops if loop[: len(address)] == address]
            of_heads[n] = tuple(name for name in layer.devices if name in mesh_axes)
            specs[n] = PartitionSpec(*stack, of_heads[n] or None)

        def on_device(*inputs: Any) -> tuple[list[Any], Stats]:
            outs, stats = self.run(body, inputs, address)
            for n, x in stats.items():
                over = tuple(a for a in mesh_axes if a not in of_heads[n])
                # With `check_vma`, `pmax` accepts only values that vary over its axes.
                x = varying(x, over) if over and eqn.params["check_vma"] else x
                stats[n] = largest_of_devices(x, over) if over else x
            return outs, stats

        return jaxprs.shard_map_again(eqn, on_device, specs)(*inputs)


def _nothing(stats: Any) -> Stats:
    return {n: jnp.full(x.shape, -jnp.inf, x.dtype) for n, x in stats.items()}
