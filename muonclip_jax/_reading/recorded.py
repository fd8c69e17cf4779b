"""`record_attention`: a function with the largest logit of every head beside it."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._jax_versions import varying
from .._options import flag
from . import jaxprs
from .layers import Layer
from .naming import NamedLayer
from .nnx_modules import split_module
from .reading import Call, call_of, read_call
from .walk import Address, Walk


def record_attention(
    fun: Callable[..., Any], has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that returns the largest logit of every head, too.

    It runs the operations of `fun` again, one by one, with a maximum beside every
    softmax of attention: values and gradients stay what they are. It composes with
    `jax.jit`, `jax.grad`, `jax.vmap` and `jax.checkpoint`, outside and inside of `fun`.
    Call it under `jax.jit`, as any training step: it traces `fun` in every call.

    The statistic is of logits as the softmax takes them, scaled and masked, but before
    a softcap; it is the maximum over batch, queries and keys.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, as [`read_model`][] takes it.
    - `has_aux`: whether it returns a pair, of which the second is auxiliary.

    **Returns:** a function of the same arguments that returns `(out, stats)`, with
    `has_aux` `(out, (aux, stats))`. `stats` is what `attention_stats` is to be: a leaf
    `<path of the layer>/max_logits` for each layer of `read_model(...).attention`, of
    shape `(heads,)`, or `(*stack, heads)` for layers that `jax.lax.scan` runs.

    **Raises:** `ValueError`, with file and line, where logits can be read but not
    recorded.

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

    has_aux = flag("has_aux", has_aux)

    @functools.wraps(fun)
    def recorded(params: Any, *args: Any, **kwargs: Any) -> Any:
        module = split_module(params)
        if module is None:
            out, stats = _run(call_of(fun, params, args, kwargs))
        else:
            rest = (module.rest, *args)
            call = call_of(module.of_parts(fun), module.params, rest, kwargs)
            (out, rest), stats = _run(call)
            module.update(params, rest)
        return (out[0], (out[1], stats)) if has_aux else (out, stats)

    return recorded


class _Site(NamedTuple):
    """A softmax of attention, and what its logits are like.

    **Arguments:**

    - `number`: its place among all.
    - `layer`: its layer.
    - `stack`: the loops whose trips are different layers.
    - `cap`: where a softcap takes the logits, and what it is; else `None`.
    """

    number: int
    layer: Layer
    stack: frozenset[int]
    cap: tuple[Address, float] | None

    @property
    def address(self) -> Address:
        return self.layer.softmax.address


def _run(call: Call) -> tuple[Any, Any]:
    """What a function returns, and the statistics."""
    read = read_call(call)
    sites: list[_Site] = []
    of_layer: list[tuple[NamedLayer, list[int]]] = []
    for named in read.layers:
        if named.layer is not None:
            first = len(sites)
            for layer in named.found:
                sites.append(_site(len(sites), layer, read.walk))
            of_layer.append((named, list(range(first, len(sites)))))
    recorder = _Recorder(read.walk, sites)
    outs, found = recorder.run(call.body, call.values, ())
    stats: dict[str, Any] = {}
    for named, numbers in of_layer:
        node = stats
        for part in named.path:
            node = node.setdefault(part, {})
        # A layer that is called more than once has the largest of all its calls.
        node["max_logits"] = functools.reduce(jnp.maximum, [found[n] for n in numbers])
    return call.outputs(outs), stats


def _site(number: int, layer: Layer, walk: Walk) -> _Site:
    parts = (*layer.query, *layer.key, *layer.whole)
    digits = [d for part in parts for p in part.pieces for d in p.digits]
    stack = frozenset(
        loop
        for loop in walk.loops.values()
        if any(d.dim == loop and d.axis is not None for d in digits)
    )
    (*_, factor), cap = layer.logits, None
    if factor.source.number in walk.caps:
        cap = walk.caps[factor.source.number], factor.scale
        if cap[0][:-1] != layer.softmax.address[:-1] or math.isnan(factor.scale):
            raise ValueError(
                f"the logits of {layer.line} are softcapped by a number that is not "
                "known, or in a function of their own: write cap * jnp.tanh(logits / "
                "cap), with a number for the cap, beside the softmax"
            )
    return _Site(number, layer, stack, cap)


Stats = dict[int, jax.Array]


class _Recorder:
    """Runs a jaxpr again, and takes the maximum where logits enter a softmax."""

    def __init__(self, walk: Walk, sites: Sequence[_Site]):
        self._walk = walk
        self._sites = sites

    def run(
        self,
        body: jaxprs.Inner,
        values: Sequence[Any],
        outer: Address,
        branch: int = 0,
    ) -> tuple[list[Any], Stats]:
        env = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        env |= zip(body.jaxpr.invars, values, strict=True)
        stats: Stats = {}
        before_cap: dict[Address, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if jaxprs.is_literal(atom) else env[atom]

        for i, eqn in enumerate(body.jaxpr.eqns):
            at, inputs = (*outer, branch, i), [read(v) for v in eqn.invars]
            if any(s.address[: len(at)] == at != s.address for s in self._sites):
                outs, inner = self._inside(eqn, inputs, at)
                stats |= inner
            else:
                outs = jaxprs.bound(eqn, inputs)
            for site in self._sites:
                if site.cap and site.cap[0] == at:
                    before_cap[at] = inputs[0]
                if site.address == at:
                    capped = before_cap[site.cap[0]] if site.cap else None
                    stats[site.number] = _largest(site, eqn, inputs[0], outs[0], capped)
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(v) for v in body.jaxpr.outvars], stats

    def _inside(self, eqn: Any, inputs: list[Any], at: Address):
        """An equation that runs a jaxpr with sites in it."""
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, inputs, at)
        if name == "while":
            return self._while(eqn, inputs, at)
        if name == "cond":
            return self._cond(eqn, inputs, at)
        if name == "shard_map":
            return self._shard_map(eqn, inputs, at)
        body = jaxprs.called(eqn)
        assert body is not None
        inputs = inputs[len(inputs) - len(body.jaxpr.invars) :]
        call = jaxprs.same_call(eqn, lambda *x: self.run(body, x, at))
        if call is not None:
            with jaxprs.written_as(eqn):
                return call(*inputs)
        # Its rules tell derivatives of its outputs alone: the logits are made once
        # more beside it, without any, which XLA sees to be the same.
        stopped = [jax.lax.stop_gradient(x) for x in inputs]
        return jaxprs.bound(eqn, inputs), self.run(body, stopped, at)[1]

    def _scan(self, eqn: Any, inputs: list[Any], at: Address):
        body, consts, carry, _ = jaxprs.scanned(eqn)
        loop = self._walk.loops[at]

        def trip(state: Any, taken: Any) -> Any:
            outs, stats = self.run(body, [*inputs[:consts], *state, *taken], at)
            return outs[:carry], (outs[carry:], stats)

        given = inputs[consts : consts + carry], inputs[consts + carry :]
        with jaxprs.written_as(eqn):
            state, (rest, stats) = jaxprs.scan_again(eqn, trip, *given)
        stacked = {
            n: x if loop in self._sites[n].stack else x.max(0) for n, x in stats.items()
        }
        return [*state, *rest], stacked

    def _while(self, eqn: Any, inputs: list[Any], at: Address):
        condition, (body, consts, carry, _) = jaxprs.repeated(eqn)
        first = len(inputs) - consts - carry
        own = inputs[first : first + consts]

        def trip(state: list[Any]) -> tuple[list[Any], Stats]:
            return self.run(body, [*own, *state], at)

        def again(both: Any) -> Any:
            (is_on,) = jaxprs.run(condition, [*inputs[:first], *both[0]])
            return is_on

        def step(both: Any) -> Any:
            state, stats = trip(both[0])
            return state, jax.tree.map(jnp.maximum, both[1], stats)

        start = inputs[first + consts :]
        with jaxprs.written_as(eqn):
            none = _nothing(jax.eval_shape(trip, start)[1])
            return jax.lax.while_loop(again, step, (start, none))

    def _cond(self, eqn: Any, inputs: list[Any], at: Address):
        """What a branch that is not taken has of heads has no logits: -inf."""
        index, *args = inputs
        runs = [
            functools.partial(self._branch, body, at, i)
            for i, body in enumerate(jaxprs.branches(eqn))
        ]
        every: Stats = {}
        for run in runs:
            every |= jax.eval_shape(run, args)[1]

        def whole(run: Any, args: list[Any]) -> Any:
            outs, stats = run(args)
            return outs, _nothing(every) | stats

        with jaxprs.written_as(eqn):
            branches = [functools.partial(whole, run) for run in runs]
            return jax.lax.switch(index, branches, args)

    def _branch(self, body: jaxprs.Inner, at: Address, i: int, args: list[Any]):
        return self.run(body, args, at, i)

    def _shard_map(self, eqn: Any, inputs: list[Any], at: Address):
        """Devices along some axes have other heads; along the rest, other batches."""
        body = jaxprs.called(eqn)
        sites = [s for s in self._sites if s.address[: len(at)] == at]
        of_heads = {
            s.number: [
                name
                for dim in s.layer.head_dims
                if dim < 0
                for name in self._walk.devices[dim].names
            ]
            for s in sites
        }

        def on_device(*inputs: Any) -> tuple[list[Any], Stats]:
            outs, stats = self.run(body, inputs, at)  # type: ignore[arg-type]
            for n, x in stats.items():
                over = [a for a in jaxprs.manual_in(eqn) if a not in of_heads[n]]
                if over:
                    if eqn.params["check_vma"]:
                        x = varying(x, tuple(over))
                    stats[n] = jax.lax.pmax(x, tuple(over))
            return outs, stats

        specs = {
            s.number: PartitionSpec(
                *[None] * len(s.stack), tuple(of_heads[s.number]) or None
            )
            for s in sites
        }
        with jaxprs.written_as(eqn):
            return jaxprs.map_again(eqn, on_device, specs)(*inputs)


def _nothing(stats: Stats) -> Stats:
    return {n: jnp.full(x.shape, -jnp.inf, x.dtype) for n, x in stats.items()}


def _largest(site: _Site, eqn: Any, x: Any, out: Any, before_cap: Any) -> jax.Array:
    """The maximum for every head of what enters a softmax, `(heads,)`.

    Dimensions are cut into the digits that heads are, and all others reduced.
    """
    layer, note = site.layer, site.layer.softmax
    pieces = [p for f in layer.logits for p in f.pieces]
    piece = pieces[-1]  # of the last product
    is_sum = eqn.primitive.name == "reduce_sum"
    x = jax.lax.stop_gradient(x)
    if site.cap:
        cap = abs(site.cap[1])
        before = jax.lax.stop_gradient(before_cap)
        # The mask comes behind the cap, and hides what is below anything it lets by.
        x = jnp.where(x >= -1.001 * cap, before * site.cap[1], -jnp.inf)
    sizes: list[int] = []
    order: list[tuple[int, int, int]] = []
    for dim, n in enumerate(note.shape):
        own = [d for d in piece.digits if d.dim == dim]
        heads = [d for d in own if d.axis in layer.head_dims]
        if not heads:
            # Beside the logits of query and key there may be others, such as a sink's.
            low, high = (
                f(p.span(dim)[i] for p in pieces) for i, f in enumerate((min, max))
            )
            x = jax.lax.slice_in_dim(x, low, high, axis=dim)
            sizes.append(x.shape[dim])
            continue
        own.sort(key=lambda d: -d.step)
        if math.prod(d.size for d in own) != n:
            raise ValueError(
                f"the logits of {layer.line} enter the softmax in an order in which "
                "heads cannot be told apart: keep an axis for them"
            )
        for d in own:
            if d.axis in layer.head_dims:
                order.append((layer.head_dims.index(d.axis), -d.stride, len(sizes)))
            sizes.append(d.size)
    x = x.reshape(sizes)
    kept = [place for *_, place in order]
    x = x.max([i for i in range(len(sizes)) if i not in kept])
    ranks = sorted(kept)
    x = x.transpose([ranks.index(place) for *_, place in sorted(order)]).ravel()
    # Softmax without a maximum: these are exponentials.
    return jnp.log(x) if is_sum else x
