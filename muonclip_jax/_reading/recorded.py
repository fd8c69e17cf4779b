"""`record_attention`: a function that returns the largest logit of every head, too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._axes import varying
from .._model.statistics import largest, largest_of_devices, STATISTIC
from .._options import flag
from . import jaxprs, kernels
from .attention import Layer
from .calls import Call, call_of
from .jaxprs import Address
from .reading import read_call
from .sites import Site


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

    It runs the operations of `fun` one by one, with a maximum added at every softmax of
    attention; values and gradients do not change. It composes with `jax.jit`,
    `jax.grad`, `jax.vmap` and `jax.checkpoint`, outside and inside of `fun`. Call it
    under `jax.jit`, like any training step, since it traces `fun` in every call. NNX
    objects among the arguments are updated as by `fun`.

    The statistic is the maximum over batch, queries and keys of the logits as they
    enter the softmax, scaled and masked, but before a softcap. Layers that
    [`qk_clip`][] cannot scale have none: `read_model(...).refused` lists them.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, as for [`read_model`][].
    - `has_aux`: whether `fun` returns a pair whose second element is auxiliary.
    - `strict`: whether to raise an error for an operation that cannot be read, such as
        a Pallas kernel, and that may be attention, since several of its inputs are
        activations. Set it to `False` if you know that none is.

    **Returns:** a function of the same arguments that returns `(out, stats)`, with
    `has_aux` `(out, (aux, stats))`. Pass `stats` as `attention_stats`. It has a leaf
    `<path of the layer>/max_logits` for each layer of `read_model(...).attention`, of
    shape `(heads,)`, or `(*stack, heads)` for layers that `jax.lax.scan` runs.

    **Raises:** `ValueError`, with file and line, if logits cannot be recorded.

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

    has_aux, strict = flag("has_aux", has_aux), flag("strict", strict)

    @functools.wraps(fun)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError(
                "the function of record_attention needs the params as its first "
                "argument, by position"
            )
        with call_of(fun, *args, **kwargs) as call:
            out, stats = _run(call, strict)
        return (out[0], (out[1], stats)) if has_aux else (out, stats)

    return recorded


#: The statistics that are known by now, by the number of their site.
Stats = dict[int, jax.Array]


def _run(call: Call, strict: bool) -> tuple[Any, Any]:
    """A function's result, and the statistics."""
    _, layers, hidden = read_call(call)
    if strict and hidden:
        raise ValueError(
            f"attention may be hidden in {', '.join(hidden)}, which cannot be "
            "read. If it is, use jax.nn.dot_product_attention (on a GPU with "
            'implementation="cudnn"), mc.blockwise_attention or mc.splash_attention '
            "instead; if it is not, give strict=False"
        )
    clipped = [named for named in layers if named.layer is not None]
    own = [layer for named in clipped for layer in named.found]
    for layer in own:
        if not layer.sites:
            raise ValueError(f"the logits of {layer.line} {layer.unclear}")
    sites = [(layer, site) for layer in own for site in layer.sites]
    outs, found = _Recorder(sites).run(call.body, call.values, ())
    stats: dict[str, Any] = {}
    of_sites = (found[i] for i in range(len(sites)))
    rows = (
        functools.reduce(jnp.maximum, [next(of_sites) for _ in layer.sites])
        for layer in own
    )
    for named in clipped:
        node = functools.reduce(lambda x, k: x.setdefault(k, {}), named.path, stats)
        # A layer that is called more than once has the largest of all its calls.
        # Through `lax.scan` calls are a stack only if their parameters are.
        # Heads that are trips of a loop are one axis with those of each trip.
        depths = (len(layer.loops) for layer in named.found)
        own = [next(rows) for _ in named.found]
        own = [x.reshape((*x.shape[:n], -1)) for x, n in zip(own, depths, strict=True)]
        node[STATISTIC] = functools.reduce(jnp.maximum, own)
    return call.outputs(outs), stats


class _Recorder:
    """Runs a jaxpr again, and forms the maximum where logits enter a softmax."""

    def __init__(self, sites: Sequence[tuple[Layer, Site]]):
        self._layers = {n: layer for n, (layer, _) in enumerate(sites)}
        self._sites = {n: site for n, (_, site) in enumerate(sites)}

    def run(
        self, body: jaxprs.Inner, values: Sequence[Any], outer: Address, branch: int = 0
    ) -> tuple[list[Any], Stats]:
        stats: Stats = {}
        before_cap: dict[Any, Any] = {}

        def step(i: int, eqn: Any, inputs: list[Any]) -> list[Any]:
            at = (*outer, branch, i)
            outs, inner = self._again(eqn, inputs, at)
            stats.update(inner)
            for n, site in self._sites.items():
                # Logits are those before the cap; the mask comes after it.
                if site.cap_at is not None and site.cap_at.at == at:
                    before_cap[at] = inputs[0]
                if site.at.at == at:
                    capped = before_cap.get(site.cap_at.at) if site.cap_at else None
                    stats[n] = site.largest(inputs[site.operand], capped)
            return outs

        # All equations, dead ones too: effects, names and random keys stay as they are.
        return body.run(values, step), stats

    def _inside(self, at: Address) -> dict[int, Layer]:
        """The layers whose logits are in the jaxpr that an equation runs."""
        places = {n: site.at.at for n, site in self._sites.items()}
        return {
            n: self._layers[n] for n, x in places.items() if x[: len(at)] == at != x
        }

    def _again(self, eqn: Any, inputs: list[Any], at: Address) -> Any:
        """The outputs of an equation, and the statistics of the sites in it."""
        if not (inside := self._inside(at)):
            return jaxprs.bound(eqn, inputs), {}
        if rule := kernels.rule_of(eqn):
            (layer, *_) = inside.values()
            found = rule.largest(eqn, jax.lax.stop_gradient(inputs))
            if found is None:
                raise ValueError(
                    f"the logits of {layer.line} cannot be recorded: mask and scale "
                    f"are in the code of {rule.name}. Use mc.splash_attention or "
                    "mc.blockwise_attention instead, or give mc.attention_rule its "
                    "largest logits as maxima="
                )
            if found.size != layer.heads:
                raise ValueError(
                    f"the kernel at {layer.line} has {found.size} heads, but its "
                    f"query and key have {layer.heads}: give it an axis of heads"
                )
            return jaxprs.bound(eqn, inputs), dict.fromkeys(inside, found)
        # What runs its jaxpr often, not at all or on every device: each by a method.
        if again := getattr(self, f"_{eqn.primitive.name}", None):
            with jaxprs.written_as(eqn):
                return again(eqn, inputs, at)
        body: Any = jaxprs.called(eqn)
        own = slice(len(inputs) - len(body.jaxpr.invars), None)
        if call := jaxprs.call_again(eqn, lambda *x: self.run(body, x, at)):
            with jaxprs.written_as(eqn):
                return call(*inputs[own])
        # Its rules are for derivatives of its outputs alone: the logits are formed once
        # more alongside it, without any. XLA sees that both are the same and keeps one.
        stopped = jax.lax.stop_gradient(inputs[own])
        return jaxprs.bound(eqn, inputs), self.run(body, stopped, at)[1]

    def _scan(self, eqn: Any, inputs: list[Any], at: Address):
        loop: Any = jaxprs.loop(eqn)
        consts, carry, end = loop.consts, loop.carry, loop.consts + loop.carry

        def trip(state: Any, slices: Any) -> Any:
            outs, stats = self.run(loop.body, [*inputs[:consts], *state, *slices], at)
            return outs[:carry], (outs[carry:], stats)

        given = inputs[consts:end], inputs[end:]
        state, (rest, stats) = jaxprs.scan_again(eqn, trip, *given)
        for n, x in stats.items():
            layer = self._layers[n]
            is_apart = at in layer.loops | layer.loops_of_heads
            stats[n] = x if is_apart else largest(x, 0)
        return [*state, *rest], stats

    def _while(self, eqn: Any, inputs: list[Any], at: Address):
        loop: Any = jaxprs.loop(eqn)
        of_condition, rest = inputs[: loop.first], inputs[loop.first :]
        own, start = rest[: loop.consts], rest[loop.consts :]

        def is_on(both: Any) -> Any:
            values = [*of_condition, *both[0]]
            return self.run(loop.condition, values, at, branch=1)[0][0]

        def step(both: Any) -> Any:
            state, stats = self.run(loop.body, [*own, *both[0]], at)
            return state, jax.tree.map(jnp.maximum, both[1], stats)

        # It carries the statistics along with its state, and may run no trip at all.
        shapes = jax.eval_shape(lambda x: self.run(loop.body, [*own, *x], at)[1], start)
        return jax.lax.while_loop(is_on, step, (start, _nothing(shapes)))

    def _cond(self, eqn: Any, inputs: list[Any], at: Address):
        """Heads of a branch that is not run have no logits: -inf."""
        (index, *args), every = inputs, {}

        def whole(run: Any, args: list[Any]) -> Any:
            outs, stats = run(args)
            return outs, _nothing(every) | stats

        runs = [
            lambda args, body=body, i=i: self.run(body, args, at, i)
            for i, body in enumerate(jaxprs.branches(eqn))
        ]
        for run in runs:
            every |= jax.eval_shape(run, args)[1]
        return jax.lax.switch(index, [functools.partial(whole, r) for r in runs], args)

    def _shard_map(self, eqn: Any, inputs: list[Any], at: Address):
        """Devices along some axes have other heads; along the rest, other batches."""
        body: Any = jaxprs.called(eqn)
        own, of_heads, specs = jaxprs.manual_in(eqn), {}, {}
        for n, layer in self._inside(at).items():
            # What is outside of it, loops and other axes, has its part later.
            stack = [None for loop in layer.loops if loop[: len(at)] == at]
            of_heads[n] = tuple(name for name in layer.devices if name in own)
            specs[n] = PartitionSpec(*stack, of_heads[n] or None)

        def on_device(*inputs: Any) -> tuple[list[Any], Stats]:
            outs, stats = self.run(body, inputs, at)
            for n, x in stats.items():
                over = tuple(a for a in own if a not in of_heads[n])
                # Where types are checked, `pmax` takes only what varies over its axes.
                x = varying(x, over) if over and eqn.params["check_vma"] else x
                stats[n] = largest_of_devices(x, over) if over else x
            return outs, stats

        return jaxprs.shard_map_again(eqn, on_device, specs)(*inputs)


def _nothing(stats: Any) -> Stats:
    return {n: jnp.full(x.shape, -jnp.inf, x.dtype) for n, x in stats.items()}
