"""What each primitive does with the values of its operands: all but products."""

import itertools
import math
from collections.abc import Callable
from typing import Any

from . import jaxprs
from .jaxprs import shape_of
from .pieces import flipped, PICKED, Shape, shifted
from .values import added, Factor, mixed, multiplied, nonlinear, summed, union, Value
from .walk import rule, Softmax, Walk


# Entries stay what they are, and go elsewhere.


@rule(
    "convert_element_type copy copy_p reduce_precision neg real imag conj pvary pcast "
    "optimization_barrier mesh_cast reshard sharding_constraint abs pbroadcast "
    "layout_constraint stop_gradient device_put bitcast_convert_type ppermute "
    "sharding_barrier name"
)  # `abs` is one: |2x| = 2 |x|
def same(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """The same entries in the same places, for factors above zero at least."""
    if jaxprs.is_statistic(eqn):
        for factor in values[0].factors("maxima"):
            walk.recorded[factor.number] = walk.at
    return [
        v if v.shape == shape_of(y) else walk.unknown([v])
        for v, y in zip(values, eqn.outvars, strict=False)
    ]


def _broadcast(value: Value, new: Shape, params: Any) -> Value:
    is_spread = value.is_spread or math.prod(value.shape) < math.prod(new)
    pairs = zip(params["broadcast_dimensions"], value.shape, strict=True)
    to = [i if new[i] == n else None for i, n in pairs]
    return value.moved(to, new, is_spread=is_spread)


def _tile(value: Value, new: Shape, params: Any) -> Value:
    pairs = zip(params["reps"], value.shape, strict=True)
    apart = tuple(itertools.chain(*pairs))
    spread = value.moved(range(1, len(apart), 2), apart, is_spread=True)
    return spread.reshaped(new)


def _along(value: Value, new: Shape, params: Any) -> Value:
    """After what mixes entries along a dimension or all."""
    axes = [params["axis"]] if "axis" in params else range(len(value.shape))
    return value.lost_along(axes, new)


_OF_ONE: dict[str, Callable[[Value, Shape, Any], Value]] = {
    "iota": lambda v, new, params: Value(is_counter=True),
    "transpose": lambda v, new, params: v.moved(
        [params["permutation"].index(i) for i in range(len(new))], new
    ),
    "rev": lambda v, new, params: v.mapped(
        lambda p: flipped(p, params["dimensions"], new), new
    ),
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"), lambda v, new, params: v.reshaped(new)
    ),
    **dict.fromkeys(("cumsum", "reduce_window_sum", "fft"), _along),
}


@rule(" ".join(_OF_ONE))
def of_one(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    value = values[0] if values else Value()
    return _OF_ONE[eqn.primitive.name](value, shape_of(eqn.outvars[0]), eqn.params)


@rule("slice")
def slice_(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    value, new = values[0], shape_of(eqn.outvars[0])
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    for i, (start, n, stride) in enumerate(zip(starts, new, strides, strict=True)):
        before, after = value.shape[:i], value.shape[i + 1 :]
        if stride == 1:
            value = _cut(walk, value, i, int(start), n)
        elif value.shape[i] == n * stride and start < stride:
            # Every other entry: one of each pair, as rotary embeddings cut them.
            apart = value.reshaped((*before, n, stride, *after))
            value = apart.sliced(i + 1, int(start), 1).reshaped((*before, n, *after))
        else:
            value = value.lost_along([i], (*before, n, *after))
    return value


@rule("split unstack")
def split(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    axis, at, outs = eqn.params["axis"], 0, []
    sizes = eqn.params.get("sizes", (1,) * values[0].shape[axis])
    for size, atom in zip(map(int, sizes), eqn.outvars, strict=True):
        part = _cut(walk, values[0], axis, at, size)
        outs.append(part.reshaped(shape_of(atom)))  # `unstack`: the axis goes
        at += size
    return outs


@rule("pad")
def pad(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    (value, fill), config = values, eqn.params["padding_config"]
    new = shape_of(eqn.outvars[0])
    if any(low < 0 or high < 0 or gap for low, high, gap in config):
        moved = value.lost_along((i for i, c in enumerate(config) if any(c)), new)
    else:
        moved = value.mapped(lambda p: shifted(p, [low for low, *_ in config]), new)
    return mixed((moved, fill), added((moved, fill)))


@rule("concatenate stack")
def concatenate(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A sum of what is placed next to one another, with zeros around."""
    values = walk.together(values)
    new, terms, at = shape_of(eqn.outvars[0]), [], 0
    is_new = "axis" in eqn.params  # `stack` has the dimension from JAX 0.12 on
    dim = eqn.params["axis" if is_new else "dimension"]
    for value in values:
        size = 1 if is_new else value.shape[dim]
        value = value.reshaped((*new[:dim], size, *new[dim + 1 :]))
        low = [at if i == dim else 0 for i in range(len(new))]
        terms += value.mapped(lambda p, low=low: shifted(p, low), new).terms
        at += size
    return mixed(values, summed(terms))


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
        rows = [v for v in cases if v.number != 0]  # between masked ones
        is_onehot = mask.is_onehot or (bool(rows) and all(v.is_onehot for v in rows))
        return mixed(values, added(cases), is_onehot=is_onehot, trip=trip)
    note_features(walk, *values)
    out = mixed(values, added(values))
    if len(deep) < 2 or math.prod(shape_of(eqn.outvars[0])) == 1:
        return out  # a sum of losses, one number, is none of layers

    def before(ends: int) -> int:
        """All that these events come from, but themselves."""
        return union(past & ~bit for bit, past in walk.past_of.items() if bit & ends)

    # After a residual sum, of which one summand comes from the other, the layer has not
    # the last word: the output is written by what comes later, if anything.
    a, b = (v.ends for v in deep[:2])
    is_after = not (a and b) or before(a) & b or before(b) & a
    is_residual = len(deep) == 2 and a != b and is_after
    return out._replace(ends=0) if is_residual else out


@rule("mul")
def mul(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    return times(walk, *_of_one_shape(walk, eqn, values))


def times(walk: Walk, a: Value, b: Value) -> Value:
    """The product of two values entry by entry."""
    a, b = walk.together([a, b])
    note_scales(walk, a, b)
    weigh(walk, a, b)
    weigh(walk, b, a)
    return mixed((a, b), multiplied(a, b), is_onehot=a.is_onehot or b.is_onehot)


@rule("div")
def div(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    a, b = _of_one_shape(walk, eqn, values)
    # What divides the logits, sqrt(head_dim) or a softcap, is a number as a factor is.
    number = 1 / b.number if b.number else None
    return mixed((a, b), multiplied(a, b._replace(terms=nonlinear([b]), number=number)))


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
    is_equal, is_and = (eqn.primitive.name == name for name in ("eq", "and"))
    is_onehot = any(v.is_counter & is_equal | v.is_onehot & is_and for v in values)
    return mixed(values, nonlinear(values), is_onehot=is_onehot)


@rule("tanh exp")
def softcap_or_softmax(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A softcap, or the weights of a softmax, if of logits: these are followed on.

    Those that enter a softcap are to be known, and the maximum came before the weights.
    """
    (value,), is_cap = values, eqn.primitive.name == "tanh"
    found = value.factors("logits", *([] if is_cap else ["capped"]))
    what = "capped" if is_cap else "weights"
    terms = summed(
        (Factor(what, f.number, f.event, f.pieces),) for f in found if f.is_linear
    )
    if is_cap:
        walk.caps.update((f.number, walk.at) for term in terms for f in term)
    gates = 0 if is_cap else value.ends & walk.gates
    return mixed([value], terms or nonlinear([value]), gates=gates)


# Reductions.


@rule("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod reduce_xor")
def reduce(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    (value,), name, axes = values, eqn.primitive.name, tuple(eqn.params["axes"])
    kinds = {"reduce_sum": ("weights",), "reduce_max": ("logits", "capped")}.get(name)
    if kinds:
        # What a softmax may be, of logits or of a product with a parameter.
        terms = tuple(
            tuple(f for f in term if f.kind in kinds and f.is_linear)
            for term in value.terms
        )
        if any(terms):
            walk.softmaxes.append(Softmax(walk.at, terms, value.shape, axes))
        # A softmax over the outputs of a weight makes gates: those of a router, if
        # others are weighed by them, or probabilities, if it is the last.
        for f in value.factors():
            if f.event & value.ends and any(d.dim in axes for d in f.digits):
                walk.gates |= f.event
    note_features(walk, value, dims={*axes})
    left = itertools.count()
    to = [None if i in axes else next(left) for i in range(len(value.shape))]
    out = value.moved(to, shape_of(eqn.outvars[0]))
    if name == "reduce_sum":
        return out
    # The maximum of a kernel's maxima is one, too.
    maxima = tuple((f,) for f in out.factors("maxima"))
    return out._replace(terms=maxima or nonlinear([out]))


@rule("argmax argmin top_k approx_top_k sort")
def choose(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Whatever decides an order may decide where activations go.

    So the outputs of a router do, which are seen in the array. Distances to the codes
    of a vector quantizer are sums over outputs: no kernel before them is a router.
    """
    for f in values[0].factors():
        if f.event & values[0].ends and f.seen:
            walk.note("chosen", events=f.event)
    values, outs = [walk.as_activation(v) for v in values], []
    for i, atom in enumerate(eqn.outvars):
        of, shape = values[i if eqn.primitive.name == "sort" else 0], shape_of(atom)
        out = mixed(values)
        if shape == of.shape:
            out = of.lost_along([eqn.params.get("dimension", len(shape) - 1)], shape)
        outs.append(out._replace(is_spread=False))
    return outs


# Indexing by numbers; lookups in parameters are products.


@rule("dynamic_slice")
def dynamic_slice(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A part whose place may be known, or that of a loop's trip; else it may be any."""
    value, *starts = values
    out = picked(value, dict(enumerate(starts)), shape_of(eqn.outvars[0]))
    if value.is_activation:
        return mixed((out, *starts), out.terms)
    # A parameter is one still, whatever picks its entries.
    for start in starts:
        out = out._replace(past=out.past | start.past)
    return out


def picked(value: Value, starts: dict[int, Value], new: Shape) -> Value:
    """The entries along dimensions from a start on, as many as the new shape has."""
    to: list[int | None] = list(range(len(new)))
    for i, start in starts.items():
        if new[i] == value.shape[i]:
            continue
        if start.number is not None:
            # XLA moves a slice that would end outside back inside.
            at = min(max(int(start.number), 0), value.shape[i] - new[i])
            value = value.sliced(i, at, new[i])
        elif new[i] == 1:
            to[i] = PICKED if start.trip is None else start.trip
        else:
            to[i] = None
    return value.moved(to, new)


@rule("dynamic_update_slice scatter scatter-add scatter_add")
def update(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """A sum, of which the second summand may be anywhere."""
    is_slice = eqn.primitive.name == "dynamic_update_slice"
    operand, new = walk.together([values[0], values[1 if is_slice else 2]])
    pairs = enumerate(zip(operand.shape, new.shape, strict=False))
    to = [i if n == small and is_slice else None for i, (n, small) in pairs]
    to += [None] * (len(new.shape) - len(to))
    new = new.moved(to, operand.shape)
    return mixed([*values, new], added((operand, new)))


# What several rules share.


def _cut(walk: Walk, value: Value, dim: int, start: int, size: int) -> Value:
    """A slice; of one entry along a parameter's own axis it may be a matrix's outputs.

    `gate, up = jnp.einsum("btd,cdf->cbtf", x, w)` has two matrices in w.
    """
    for f in value.factors() if size == 1 and value.is_activation else ():
        along = {d for p in f.pieces for d in p.digits if d.dim == dim}
        for d in along if len(along) == 1 else ():
            if d.axis is not None and d.size == walk.shapes[f.number][d.axis]:
                roles = ((d.axis, "cut"),)
                walk.note("cut", f.number, events=1 << start, roles=roles)
    return value.sliced(dim, start, size)


def _of_one_shape(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Operands as activations if one is, and numbers spread over the shape.

    From JAX 0.12 on, an operation broadcasts axes of one entry, too.
    """
    shape, spread = shape_of(eqn.outvars[0]), []
    for v in values:
        if v.shape != shape:
            to = [i if n == shape[i] else None for i, n in enumerate(v.shape)]
            is_spread = v.is_spread or bool(v.shape)
            v = v.moved(to, shape, is_spread=is_spread)
        spread.append(v)
    return walk.together(spread)


def weigh(walk: Walk, weights: Value, other: Value, is_mixed: bool = False) -> None:
    """Notes where the weights of a softmax are multiplied with other activations.

    Data itself may be the value of attention, but only where its rows are mixed: what a
    loss multiplies with the labels is no attention.
    """
    if not (other.is_deep or (is_mixed and other.is_activation)):
        return
    for f in weights.factors("weights"):
        if not other.recent & f.event:
            walk.note("weighed", f.number)
    if weights.gates and not other.recent & weights.gates and other.is_deep:
        walk.note("chosen", events=weights.gates)


# Kernels whose outputs are one number for each head, gates, steps and decays, are
# trained by AdamW (Qwen). The trace shows them where they first meet the outputs of
# other kernels: they are multiplied with them, along fewer dimensions, one number for
# all features of a head. What GLU, adaLN and squeeze-and-excitation multiply has as
# many dimensions as what it is multiplied with, and of a key and a value in an outer
# product neither has those of the other.


def _outputs(walk: Walk, value: Value) -> dict[int, list[int]]:
    """The dimensions that tell the outputs of each kernel apart, in its own order."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for f in value.factors():
        if f.number in walk.kernels:
            own = [(d.axis, -d.stride, d.dim) for d in f.seen if d.size > 1]
            found[f.number] = found.get(f.number, []) + own
    return {i: list(dict.fromkeys(x[-1] for x in sorted(found[i]))) for i in found}


def note_scales(walk: Walk, a: Value, b: Value) -> None:
    """Notes what outputs are that are multiplied with others for the first time."""
    for kernel, value, other in ((a.sole, a, b), (b.sole, b, a)):
        if kernel in (None, -1) or other.sole in (None, kernel):
            continue
        own, others = _outputs(walk, value).get(kernel, []), _outputs(walk, other)
        theirs = [dims for i, dims in others.items() if i != kernel and dims]
        if own and theirs:
            # Heads come before their features in every kernel.
            n = len(own)
            is_scale = all(n < len(x) and {*own} == {*x[:n]} for x in theirs)
            walk.note("scales" if is_scale else "features", kernel)


def note_features(walk: Walk, *values: Value, dims: set[int] | None = None) -> None:
    """Notes that outputs are features: here they are added, or summed over."""
    soles = {v.sole for v in values} - {None}
    for value in values if len(values) == 1 or len(soles) > 1 else ():
        if value.sole not in (None, -1) and (
            dims is None or dims & {*_outputs(walk, value).get(value.sole, ())}
        ):
            walk.note("features", value.sole)
