"""`record_attention`: a function that returns the largest logit of every head, too."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._axes import varying
from .._model.statistics import STATISTIC
from .._options import flag
from . import jaxprs, kernels
from .head_leaves import NamedLayer
from .layers import Layer
from .reading import Call, call_of, Read, read_call
from .walk import Address, Walk


def record_attention(
    fun: Callable[..., Any], has_aux: bool = False, *, strict: bool = True
) -> Callable[..., Any]:
    """Makes a function that returns the largest logit of every head, too.

    It runs the operations of `fun` again, one by one, with a maximum next to every
    softmax of attention: values and gradients stay what they are. It composes with
    `jax.jit`, `jax.grad`, `jax.vmap` and `jax.checkpoint`, outside and inside of `fun`.
    Call it under `jax.jit`, as any training step: it traces `fun` in every call.

    The statistic is of logits as they enter the softmax, scaled and masked, but before
    a softcap; it is the maximum over batch, queries and keys. Layers that
    [`qk_clip`][] cannot scale have none: `read_model(...).refused` names them.

    **Arguments:**

    - `fun`: `fun(params, *args, **kwargs)`, as for [`read_model`][].
    - `has_aux`: whether it returns a pair, of which the second is auxiliary.
    - `strict`: whether it is an error that an operation which cannot be read, such as
        a Pallas kernel, has several activations for inputs and so may be attention.
        `False` where you know that none is.

    **Returns:** a function of the same arguments that returns `(out, stats)`, with
    `has_aux` `(out, (aux, stats))`. `stats` is what `attention_stats` is to be: a leaf
    `<path of the layer>/max_logits` for each layer of `read_model(...).attention`, of
    shape `(heads,)`, or `(*stack, heads)` for layers that `jax.lax.scan` runs.

    **Raises:** `ValueError`, with file and line, where logits cannot be recorded.

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
    def recorded(params: Any, *args: Any, **kwargs: Any) -> Any:
        out, stats = _run(call_of(fun, params, args, kwargs), strict)
        return (out[0], (out[1], stats)) if has_aux else (out, stats)

    return recorded


class _Site(NamedTuple):
    """A softmax of attention, and what its logits are like."""

    number: int  # among all
    layer: Layer
    address: Address  # of the equation that has the logits, or their maximum
    # The loops whose trips are different layers.
    stack: frozenset[int]
    # Where a softcap has the logits, and what it is.
    cap: tuple[Address, float] | None = None


#: The statistics that are known by now, by the number of their site.
Stats = dict[int, jax.Array]


def _run(call: Call, strict: bool) -> tuple[Any, Any]:
    """What a function returns, and the statistics."""
    read = read_call(call)
    if strict and read.hidden:
        raise ValueError(
            f"attention may be hidden in {', '.join(read.hidden)}, which cannot be "
            "read. If it is there, use jax.nn.dot_product_attention (on a GPU with "
            'implementation="cudnn"), mc.blockwise_attention or mc.splash_attention '
            "in its place; if it is not, give strict=False"
        )
    sites: list[_Site] = []
    of_layer: list[tuple[NamedLayer, list[int]]] = []
    for named in read.layers:
        if named.layer is not None:
            first = len(sites)
            for layer in named.found:
                sites.append(_site(len(sites), layer, read))
            of_layer.append((named, [*range(first, len(sites))]))
    outs, found = _Recorder(read.walk, sites).run(call.body, call.values, ())
    stats: dict[str, Any] = {}
    for named, numbers in of_layer:
        node = stats
        for part in named.path:
            node = node.setdefault(part, {})
        # A layer that is called more than once has the largest of all its calls.
        # Through `lax.scan` calls are a stack only if their parameters are.
        node[STATISTIC] = functools.reduce(jnp.maximum, [found[n] for n in numbers])
    return call.outputs(outs), stats


def _site(number: int, layer: Layer, read: Read) -> _Site:
    parts = (*layer.query, *layer.key, *layer.whole)
    digits = [d for part in parts for p in part.pieces for d in p.digits]
    along = {d.dim for d in digits if d.axis is not None}
    walk, factor = read.walk, layer.logits[-1]
    stack = frozenset({*walk.dims.values()} - {*walk.devices} & along)
    if recorded := walk.recorded.get(factor.source.number):
        return _Site(number, layer, recorded, stack)
    address, cap = layer.softmax.address, None
    if factor.source.number in walk.caps:
        cap = walk.caps[factor.source.number], factor.scale
        if cap[0][:-1] != address[:-1] or math.isnan(factor.scale):
            raise ValueError(
                f"the logits of {layer.line} are softcapped by a number that is not "
                "known, or in a function of their own: write cap * jnp.tanh(logits / "
                "cap), with a number for the cap, next to the softmax"
            )
    return _Site(number, layer, address, stack, cap)


class _Recorder:
    """Runs a jaxpr again, and forms the maximum where logits enter a softmax."""

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

        # All equations, dead ones too: effects, names and random keys stay as they are.
        for i, eqn in enumerate(body.jaxpr.eqns):
            at, inputs = (*outer, branch, i), [read(v) for v in eqn.invars]
            if self._sites_in(at):
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

    def _sites_in(self, at: Address) -> list[_Site]:
        return [s for s in self._sites if s.address[: len(at)] == at != s.address]

    def _inside(
        self, eqn: Any, inputs: list[Any], at: Address
    ) -> tuple[list[Any], Stats]:
        """An equation that runs a jaxpr with sites in it, or stands for one."""
        if kernel := kernels.kernel_of(eqn):
            return self._kernel(kernel, eqn, inputs, at)
        again = getattr(self, f"_{eqn.primitive.name}", None)
        if again is not None:
            with jaxprs.written_as(eqn):
                return again(eqn, inputs, at)
        body = jaxprs.called(eqn)
        assert body is not None
        inputs = inputs[len(inputs) - len(body.jaxpr.invars) :]
        call = jaxprs.call_again(eqn, lambda *x: self.run(body, x, at))
        if call is not None:
            with jaxprs.written_as(eqn):
                return call(*inputs)
        # Its rules tell derivatives of its outputs alone: the logits are formed once
        # more next to it, without any. XLA sees that both are the same and keeps one.
        stopped = [jax.lax.stop_gradient(x) for x in inputs]
        return jaxprs.bound(eqn, inputs), self.run(body, stopped, at)[1]

    def _kernel(
        self, kernel: kernels.Kernel, eqn: Any, inputs: list[Any], at: Address
    ) -> tuple[list[Any], Stats]:
        (site,) = self._sites_in(at)
        if kernel.largest is None:
            raise ValueError(
                f"the logits of {site.layer.line} cannot be recorded: mask and scale "
                f"are in the code of {jaxprs.kernel_name(eqn).partition(' at ')[0]}. "
                "Use mc.splash_attention or mc.blockwise_attention in its place"
            )
        stopped = [jax.lax.stop_gradient(x) for x in inputs]
        largest = kernel.largest(stopped)
        if largest.size != site.layer.heads:
            raise ValueError(
                f"the kernel at {site.layer.line} has {largest.size} heads, and its "
                f"query and key {site.layer.heads}: give it an axis of heads"
            )
        return jaxprs.bound(eqn, inputs), {site.number: largest}

    def _scan(self, eqn: Any, inputs: list[Any], at: Address):
        body, consts, carry = jaxprs.scanned(eqn)
        loop = self._walk.dims[at]

        def trip(state: Any, slices: Any) -> Any:
            outs, stats = self.run(body, [*inputs[:consts], *state, *slices], at)
            return outs[:carry], (outs[carry:], stats)

        given = inputs[consts : consts + carry], inputs[consts + carry :]
        state, (rest, stats) = jaxprs.scan_again(eqn, trip, *given)
        stacked = {
            n: x if loop in self._sites[n].stack else x.max(0) for n, x in stats.items()
        }
        return [*state, *rest], stacked

    def _while(self, eqn: Any, inputs: list[Any], at: Address):
        condition, first, (body, consts, _) = jaxprs.repeated(eqn)
        own = inputs[first : first + consts]

        def trip(state: list[Any]) -> tuple[list[Any], Stats]:
            return self.run(body, [*own, *state], at)

        def is_on(both: Any) -> Any:
            return jaxprs.run(condition, [*inputs[:first], *both[0]])[0]

        def step(both: Any) -> Any:
            state, stats = trip(both[0])
            return state, jax.tree.map(jnp.maximum, both[1], stats)

        start = inputs[first + consts :]
        none = _nothing(jax.eval_shape(trip, start)[1])
        return jax.lax.while_loop(is_on, step, (start, none))

    def _cond(self, eqn: Any, inputs: list[Any], at: Address):
        """Heads of a branch that is not run have no logits: -inf."""
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

        return jax.lax.switch(index, [functools.partial(whole, r) for r in runs], args)

    def _branch(self, body: jaxprs.Inner, at: Address, i: int, args: list[Any]):
        return self.run(body, args, at, i)

    def _shard_map(self, eqn: Any, inputs: list[Any], at: Address):
        """Devices along some axes have other heads; along the rest, other batches."""
        body = jaxprs.called(eqn)
        assert body is not None
        of_heads, specs = {}, {}
        for s in self._sites_in(at):
            dims = [dim for dim in s.layer.head_dims if dim < 0]
            axes = [name for dim in dims for name in self._walk.devices[dim].names]
            of_heads[s.number] = axes
            specs[s.number] = PartitionSpec(*[None] * len(s.stack), tuple(axes) or None)

        def on_device(*inputs: Any) -> tuple[list[Any], Stats]:
            outs, stats = self.run(body, inputs, at)
            for n, x in stats.items():
                over = [a for a in jaxprs.manual_in(eqn) if a not in of_heads[n]]
                if over:
                    if eqn.params["check_vma"]:
                        x = varying(x, tuple(over))
                    stats[n] = jax.lax.pmax(x, tuple(over))
            return outs, stats

        return jaxprs.shard_map_again(eqn, on_device, specs)(*inputs)


def _nothing(stats: Stats) -> Stats:
    return {n: jnp.full(x.shape, -jnp.inf, x.dtype) for n, x in stats.items()}


def _largest(site: _Site, eqn: Any, x: Any, out: Any, before_cap: Any) -> jax.Array:
    """The maximum for every head of what enters a softmax, `(heads,)`.

    Dimensions are cut into the digits that heads are, and all others reduced.
    """
    if jaxprs.is_statistic(eqn):
        return x
    layer, softmax = site.layer, site.layer.softmax
    is_sum = eqn.primitive.name == "reduce_sum"
    shape, pieces = softmax.shape, [p for f in layer.logits for p in f.pieces]
    digits = pieces[-1].digits  # of the last product
    # Next to the logits of query and key there may be others, such as a sink's.
    spans = [
        (min(p.span(i)[0] for p in pieces), max(p.span(i)[1] for p in pieces))
        for i in range(len(shape))
    ]
    has_heads = [
        any(d.dim == i and d.axis in layer.head_dims for d in digits)
        for i in range(len(shape))
    ]
    if site.cap:
        cap = site.cap[1]
        # The mask comes after the cap, and hides what is below anything it lets by.
        x = jnp.where(x >= -1.001 * abs(cap), before_cap * cap, -jnp.inf)
    elif not is_sum and all(
        spans[i] == (0, shape[i]) and not has_heads[i] for i in softmax.axes
    ):
        # What remains is to compare the maxima that the softmax has formed. XLA on CPU
        # keeps these inside softmax's own fusion, and folds both steps into one pass
        # that reads the logits again: 1.2 % of the bytes of GPT-2 at 4 layers of 256
        # (benchmarks/record_attention.py). With a barrier between them it is the same.
        x = jnp.expand_dims(out, softmax.axes)
        spans = [(0, n) for n in x.shape]
        shape = x.shape
    x = jax.lax.stop_gradient(x)
    cannot = (
        f"the logits of {layer.line} enter the softmax in an order in which heads "
        "cannot be told apart: keep an axis for them"
    )
    sizes: list[int] = []
    order: list[tuple[int, int, int]] = []
    for dim, n in enumerate(shape):
        if not has_heads[dim]:
            x = jax.lax.slice_in_dim(x, *spans[dim], axis=dim)
            sizes.append(x.shape[dim])
            continue
        own = sorted((d for d in digits if d.dim == dim), key=lambda d: -d.step)
        if math.prod(d.size for d in own) != n:
            raise ValueError(cannot)
        for d in own:
            if d.axis not in layer.head_dims:
                sizes.append(d.size)
                continue
            # The digit counts what is before heads, heads, and what is after them.
            step, stop = layer.head_dims[d.axis]
            end = d.stride * d.size
            edges = [end, max(min(end, stop), d.stride), d.stride]
            edges.insert(2, min(max(step, d.stride), edges[1]))
            if d.stride < 1 or any(a % b for a, b in itertools.pairwise(edges)):
                raise ValueError(cannot)
            if edges[1] > edges[2]:
                major = [*layer.head_dims].index(d.axis)
                order.append((major, -edges[2], len(sizes) + 1))
            sizes += [a // b for a, b in itertools.pairwise(edges)]
    kept = [place for *_, place in order]
    x = x.reshape(sizes).max([i for i in range(len(sizes)) if i not in kept])
    ranks = sorted(kept)
    x = x.transpose([ranks.index(place) for *_, place in sorted(order)]).ravel()
    # Softmax without a maximum: these are exponentials.
    return jnp.log(x) if is_sum else x
