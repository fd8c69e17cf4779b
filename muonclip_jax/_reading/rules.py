"""What each primitive does with the values of its operands: all but products."""

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import Any

from . import gates, jaxprs
from .jaxprs import shape_of
from .pieces import flipped, PICKED, Shape, shifted
from .values import (
    Factor,
    Kind,
    mixed,
    multiplied,
    nonlinear,
    Source,
    summed,
    UNSCALED,
    Value,
)
from .walk import rule, Softmax, Walk


# Entries stay what they are, and go elsewhere.


@rule(
    "convert_element_type copy copy_p reduce_precision neg real imag conj pvary pcast "
    "optimization_barrier mesh_cast reshard sharding_constraint abs pbroadcast "
    "layout_constraint stop_gradient device_put bitcast_convert_type ppermute "
    "sharding_barrier"
)  # `abs` is one: |2x| = 2 |x|
def same(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """The same entries in the same places, for factors above zero at least."""
    return [
        v if shape_of(x) == shape_of(y) else walk.unknown([v])
        for v, x, y in zip(values, eqn.invars, eqn.outvars, strict=False)
    ]


@rule("name")
def name(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """A name that the program gives to an array; one is this package's own."""
    for factor in values[0].factors("maxima"):
        if jaxprs.is_statistic(eqn):
            walk.recorded[factor.source.number] = walk.at
    return values


@rule("transpose")
def transpose(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    order = list(eqn.params["permutation"])
    to = [order.index(i) for i in range(len(order))]
    return values[0].moved(to, shape_of(eqn.outvars[0]))


@rule("reshape squeeze expand_dims")
def reshape(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    return values[0].reshaped(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))


@rule("broadcast_in_dim")
def broadcast_in_dim(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    to = list(eqn.params["broadcast_dimensions"])
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    is_spread = values[0].is_spread or math.prod(old) < math.prod(new)
    places = [i if new[i] == n else None for i, n in zip(to, old, strict=True)]
    return values[0].moved(places, new, is_spread=is_spread)


@rule("tile")
def tile(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    apart = tuple(itertools.chain(*zip(eqn.params["reps"], old, strict=True)))
    spread = values[0].moved(range(1, len(apart), 2), apart, is_spread=True)
    return spread.reshaped(apart, new)


@rule("slice")
def slice_(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    begin, value = eqn.params["start_indices"], values[0]
    strides = eqn.params["strides"] or (1,) * len(begin)
    shape, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for i, (start, n, stride) in enumerate(zip(begin, new, strides, strict=True)):
        if stride == 1:
            value = _cut(walk, value, i, int(start), n)
        elif shape[i] == n * stride and start < stride:
            # Every other entry: one of each pair, as rotary embeddings cut them.
            apart = (*shape[:i], n, stride, *shape[i + 1 :])
            value = value.reshaped(shape, apart).sliced(i + 1, int(start), 1)
            one = (*shape[:i], n, 1, *shape[i + 1 :])
            value = value.reshaped(one, (*shape[:i], n, *shape[i + 1 :]))
        else:
            value = value.moved([None if j == i else j for j in range(len(new))], shape)
        shape = (*shape[:i], n, *shape[i + 1 :])
    return value


@rule("split unstack")
def split(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    axis, shape = eqn.params["axis"], shape_of(eqn.invars[0])
    sizes = eqn.params.get("sizes", (1,) * shape[axis])
    outs, at = [], 0
    for size, atom in zip(map(int, sizes), eqn.outvars, strict=True):
        part = _cut(walk, values[0], axis, at, size)
        at += size
        if "sizes" not in eqn.params:  # unstack: the axis goes
            part = part.reshaped((*shape[:axis], 1, *shape[axis + 1 :]), shape_of(atom))
        outs.append(part)
    return outs


@rule("rev")
def rev(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    shape, dims = shape_of(eqn.invars[0]), eqn.params["dimensions"]
    return values[0].mapped(lambda p: flipped(p, dims, shape))


@rule("pad")
def pad(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    (value, fill), config = values, eqn.params["padding_config"]
    if any(low < 0 or high < 0 or gap for low, high, gap in config):
        moved = _mixed_along(value, [i for i, c in enumerate(config) if any(c)], eqn)
    else:
        moved = value.mapped(lambda p: shifted(p, [low for low, *_ in config]))
    return mixed((moved, fill), summed((*moved.terms, *fill.terms)))


@rule("concatenate stack")
def concatenate(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A sum of what is placed next to one another, with zeros around."""
    values = _met_together(walk, values)
    new, terms, at = shape_of(eqn.outvars[0]), [], 0
    is_new = "axis" in eqn.params  # `stack` has the dimension from JAX 0.12 on
    dim = eqn.params["axis" if is_new else "dimension"]
    for value, atom in zip(values, eqn.invars, strict=True):
        size = 1 if is_new else shape_of(atom)[dim]
        if is_new:
            value = value.reshaped(shape_of(atom), (*new[:dim], 1, *new[dim + 1 :]))
        low = [at if i == dim else 0 for i in range(len(new))]
        terms += value.mapped(lambda p, low=low: shifted(p, low)).terms
        at += size
    return mixed(values, summed(terms))


@rule("cumsum reduce_window_sum fft")
def along(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    rank = len(shape_of(eqn.invars[0]))
    axis = eqn.params.get("axis")
    if len(shape_of(eqn.outvars[0])) != rank:
        return walk.unknown(values)
    return _mixed_along(values[0], range(rank) if axis is None else [axis], eqn)


# Several operands of one shape.


@rule("add sub add_any max min select_n clamp complex nextafter")
def add(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A sum, or a choice between entries: twice the operands make twice the result.

    The greater of two, or one that a mask picks, is as linear as a sum for factors
    above zero, and QK-Clip's are.
    """
    deep = [v for v in values if v.is_deep]
    values = _of_one_shape(walk, eqn, values)
    if eqn.primitive.name == "select_n":
        mask, *cases = values
        # `where(i < 0, i + n, i)` is what an index becomes before it is used.
        trip = next((v.trip for v in cases if v.trip is not None), None)
        terms = summed(term for v in cases for term in v.terms)
        return mixed(values, terms, is_onehot=mask.is_onehot, trip=trip)
    gates.features(walk, *values)
    out = mixed(values, summed(term for v in values for term in v.terms))
    # After a residual sum the layer has not the last word: the output is written by
    # what comes later, if anything. A sum of losses, one number, is none of layers.
    is_array = math.prod(shape_of(eqn.outvars[0])) > 1
    if is_array and len(deep) == 2 and _is_residual(walk, *deep):
        out = dataclasses.replace(out, ends=0)
    return out


@rule("mul")
def mul(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    return times(walk, *_of_one_shape(walk, eqn, values))


def times(walk: Walk, a: Value, b: Value) -> Value:
    """The product of two values entry by entry."""
    a, b = _met_together(walk, [a, b])
    gates.met(walk, a, b)
    gates.met(walk, b, a)
    weigh(walk, a, b)
    weigh(walk, b, a)
    return mixed((a, b), multiplied(a, b), is_onehot=a.is_onehot or b.is_onehot)


@rule("div")
def div(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    a, b = _of_one_shape(walk, eqn, values)
    # What divides the logits, sqrt(head_dim) or a softcap, is a number as a factor is.
    number = 1 / b.number if b.number else None
    by = dataclasses.replace(b, terms=nonlinear([b]), number=number)
    return mixed((a, b), multiplied(a, by))


# Where the axes of a kernel are stays known after these. A router's sigmoid is still
# along its experts, and a query that is normed still has heads for its gain to scale.
@rule(
    "log log1p expm1 logistic rsqrt sqrt cbrt pow integer_pow square erf erfc "
    "erf_inv sin cos tan sinh cosh asin acos atan atan2 asinh acosh atanh exp2 sign "
    "floor ceil round is_finite not and or xor eq ne lt le gt ge eq_to le_to lt_to "
    "rem shift_left shift_right_logical shift_right_arithmetic population_count "
    "lgamma digamma igamma igammac bessel_i0e bessel_i1e "
    "regularized_incomplete_beta"
)
def elementwise(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    values = _of_one_shape(walk, eqn, values)
    # One-hot rows are `index == arange(n)`, and what a mask leaves of them.
    if eqn.primitive.name == "eq":
        is_onehot = any(v.is_counter for v in values)
    else:
        is_onehot = eqn.primitive.name == "and" and any(v.is_onehot for v in values)
    return mixed(values, nonlinear(values), is_onehot=is_onehot)


@rule("tanh")
def tanh(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A softcap, if of logits: they are to be known before it."""
    out = _known_after(values[0], "capped", ("logits",))
    for f in out.factors("capped"):
        walk.caps[f.source.number] = walk.at
    return out


@rule("exp")
def exp(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """The weights of a softmax, if of logits; its maximum came before."""
    out = _known_after(values[0], "weights", ("logits", "capped"))
    return dataclasses.replace(out, gates=values[0].ends & walk.gates)


# Reductions.


@rule("reduce_sum")
def reduce_sum(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    _soft(walk, eqn, values[0], ("weights",))
    return _reduced(walk, values[0], eqn)


@rule("reduce_max reduce_min reduce_and reduce_or reduce_prod reduce_xor")
def reduce_max(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    if eqn.primitive.name == "reduce_max":
        _soft(walk, eqn, values[0], ("logits", "capped"))
    out = _reduced(walk, values[0], eqn)
    # The maximum of a kernel's maxima is one, too.
    maxima = tuple((f,) for f in out.factors("maxima"))
    return dataclasses.replace(out, terms=maxima or nonlinear([out]))


@rule("argmax argmin top_k approx_top_k sort")
def choose(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Whatever decides an order may decide where activations go.

    So the outputs of a router do, which are seen in the array. Distances to the codes
    of a vector quantizer are sums over outputs: no kernel before them is a router.
    """
    for f in values[0].factors():
        if f.event & values[0].ends and any(p.axes for p in f.pieces):
            walk.note("chosen", events=f.event)
    values = [walk.as_activation(v) for v in values]
    outs = []
    for i, atom in enumerate(eqn.outvars):
        of = values[i] if eqn.primitive.name == "sort" else values[0]
        if shape_of(atom) == shape_of(eqn.invars[0]):
            dims = [eqn.params.get("dimension", len(shape_of(atom)) - 1)]
            outs.append(_mixed_along(of, dims, eqn))
        else:
            outs.append(mixed(values, UNSCALED))
    return [dataclasses.replace(o, is_spread=False) for o in outs]


# Indexing by numbers; lookups in parameters are products.


@rule("dynamic_slice")
def dynamic_slice(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A part whose place may be known, or that of a loop's trip; else it may be any."""
    value, *starts = values
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    to: list[int | None] = list(range(len(new)))
    for i, start in enumerate(starts):
        if new[i] == old[i]:
            continue
        if start.number is not None:
            # XLA moves a slice that would end outside back inside.
            at = min(max(int(start.number), 0), old[i] - new[i])
            value = value.sliced(i, at, new[i])
        elif new[i] == 1:
            to[i] = PICKED if start.trip is None else start.trip
        else:
            to[i] = None
    out = value.moved(to, new)
    if value.kind == Kind.ACTIVATION:
        return mixed((out, *starts), out.terms)
    # A parameter is one still, whatever picks its entries.
    for start in starts:
        out = dataclasses.replace(out, past=out.past | start.past)
    return out


@rule("dynamic_update_slice scatter scatter-add scatter_add")
def update(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A sum, of which the second summand may be anywhere."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    second = 1 if is_slice else 2
    operand, new = _met_together(walk, [values[0], values[second]])
    shape, small = shape_of(eqn.outvars[0]), shape_of(eqn.invars[second])
    to: list[int | None] = [None] * len(small)
    if is_slice:
        to = [i if n == small[i] else None for i, n in enumerate(shape)]
    new = new.moved(to, shape)
    return mixed([*values, new], summed((*operand.terms, *new.terms)))


@rule("iota")
def iota(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    return Value(is_counter=True)


# What several rules share.


def _cut(walk: Walk, value: Value, dim: int, start: int, size: int) -> Value:
    """A slice; of one entry along a parameter's own axis it may be a matrix's outputs.

    `gate, up = jnp.einsum("btd,cdf->cbtf", x, w)` has two matrices in w.
    """
    if size == 1 and value.kind == Kind.ACTIVATION:
        for f in value.factors():
            shape = walk.shapes[f.source.number]
            along = {d for p in f.pieces for d in p.digits if d.dim == dim}
            if len(along) != 1:
                continue
            (d,) = along
            if d.axis is not None and d.size == shape[d.axis]:
                roles = ((d.axis, "cut"),)
                walk.note("cut", f.source.number, events=1 << start, roles=roles)
    return value.sliced(dim, start, size)


def _mixed_along(value: Value, dims: Collection[int], eqn: Any) -> Value:
    new = shape_of(eqn.outvars[0])
    return value.moved([None if i in dims else i for i in range(len(new))], new)


def _reduced(walk: Walk, value: Value, eqn: Any) -> Value:
    gates.features(walk, value, dims=set(eqn.params["axes"]))
    gone, rank = set(eqn.params["axes"]), len(shape_of(eqn.invars[0]))
    left = iter(range(rank))
    to = [None if i in gone else next(left) for i in range(rank)]
    return value.moved(to, shape_of(eqn.outvars[0]))


def _of_one_shape(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Operands as activations if one is, and numbers spread over the shape."""
    shape = shape_of(eqn.outvars[0])
    values = [
        _spread(v, shape_of(x), shape) for v, x in zip(values, eqn.invars, strict=True)
    ]
    return _met_together(walk, values)


def _spread(value: Value, old: Shape, new: Shape) -> Value:
    """Numbers, and from JAX 0.12 on axes of one entry, that an operation broadcasts."""
    if old == new:
        return value
    to = [i if n == new[i] else None for i, n in enumerate(old)]
    return value.moved(to, new, is_spread=value.is_spread or bool(old))


def _met_together(walk: Walk, values: list[Value]) -> list[Value]:
    if any(v.kind == Kind.ACTIVATION for v in values):
        return [walk.as_activation(v) for v in values]
    return values


def _is_residual(walk: Walk, a: Value, b: Value) -> bool:
    """Whether one summand comes from the other: then neither writes the output."""

    def before(value: Value) -> int:
        found, ends = 0, value.ends
        while ends:
            event = ends & -ends
            found |= walk.past_of.get(event, 0) & ~event
            ends ^= event
        return found

    if a.ends == b.ends:
        return False
    if not (a.ends and b.ends):
        return True
    return bool(before(a) & b.ends or before(b) & a.ends)


def _known_after(value: Value, what: str, kinds: Collection[str]) -> Value:
    """A function of logits that attention applies: they are followed through it."""
    terms = summed(
        (Factor(Source(what, f.source.number), f.event, f.pieces),)
        for kind in kinds
        for f in value.factors(kind)
        if f.is_linear
    )
    return mixed([value], terms or nonlinear([value]))


def _soft(walk: Walk, eqn: Any, value: Value, kinds: Collection[str]) -> None:
    """Notes what a softmax may be, of logits or of a product with a parameter."""
    axes, shape = tuple(eqn.params["axes"]), shape_of(eqn.invars[0])
    terms = tuple(
        tuple(f for f in term if f.source.kind in kinds and f.is_linear)
        for term in value.terms
    )
    if any(terms):
        walk.softmaxes.append(Softmax(walk.at, terms, shape, axes))
    # A softmax over the outputs of a weight makes gates: those of a router, if others
    # are weighed by them, or probabilities, if it is the last.
    for f in value.factors():
        along = {d.dim for p in f.pieces for d in p.digits if d.axis is not None}
        if f.event & value.ends and along & set(axes):
            walk.gates |= f.event


def weigh(walk: Walk, weights: Value, other: Value, is_mixed: bool = False) -> None:
    """Notes where the weights of a softmax are multiplied with other activations.

    Data itself may be the value of attention, but only where its rows are mixed: what a
    loss multiplies with the labels is no attention.
    """
    if not (other.is_deep or (is_mixed and other.kind == Kind.ACTIVATION)):
        return
    for f in weights.factors("weights"):
        if not other.recent & f.event:
            walk.note("weighed", f.source.number)
    if weights.gates and not other.recent & weights.gates and other.is_deep:
        walk.note("chosen", events=weights.gates)
