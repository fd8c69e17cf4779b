"""Polar methods: singular values in [0, 1] to singular values near 1.

A step of Newton-Schulz multiplies X by `a I + b R + c R^2`, with `R = X X^H`. The
standard form does so step by step. The Gram form collects the steps of a pass on the
smaller R, and multiplies X once: the standard form is that with one step a pass.

A method is one object in `METHODS`; to add one is to write a class like `Standard` and
enter it there.
"""

import functools
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .coefficients import Schedule
from .products import add, Products, round_to, widen


_Result = TypeVar("_Result")

#: Yields each array that it stores, is sent the same back, and returns its result.
Iteration = Generator[jax.Array, Any, _Result]


class PolarMethod(Protocol):
    """An iteration that leaves singular vectors as they are."""

    #: Whether products of float32 have to keep all their bits.
    exact: bool

    def cost(self, m: int, n: int, schedule: Schedule, dtype: str) -> float:
        """Multiplications for a matrix of `(m, n)`, the short side first."""
        ...

    def run(
        self, x: jax.Array, schedule: Schedule, products: Products, *, in_loop: bool
    ) -> Iteration[jax.Array]:
        """From `x`, stored as `X / stored_size(dtype)`, to X after all steps.

        A generator that may yield what it stores, such as the result of each product,
        for others to take turns with it. What it returns need not be rounded to the
        dtype of `x`. `in_loop` asks for a program that does not grow with the number of
        steps, where that is possible.
        """
        ...


class Standard:
    """All steps on X: `(2 r + 1) m^3` multiplications a step, for an aspect ratio r."""

    exact = False

    def passes(self, schedule: Schedule, dtype: str) -> tuple[Schedule, ...]:
        del dtype
        return tuple((triple,) for triple in schedule)

    def cost(self, m: int, n: int, schedule: Schedule, dtype: str) -> float:
        # R and what it is applied to take m^2 n each. Of m^3 the first step of a pass
        # takes one (R^2), and each later one four: R Z, Z R Z, R^2 and Q Z.
        passes = self.passes(schedule, dtype)
        return sum(2 * m * m * n + (4 * len(steps) - 3) * m**3 for steps in passes)

    def run(
        self, x: jax.Array, schedule: Schedule, products: Products, *, in_loop: bool
    ) -> Iteration[jax.Array]:
        passes = self.passes(schedule, x.dtype.name)
        if in_loop and len(passes) == len(schedule):
            return run_in_loop(x, schedule, len(schedule), products)
        # Written out: a compiler then knows every coefficient. `most` bounds the size
        # for all matrices, and is known when compiling; the size of each may depend on
        # the mean of its diagonal.
        dtype, bounds = x.dtype, Range.of(x.dtype)
        size: Any = bounds.first_size
        most = bounds.first_size
        for i, triples in enumerate(passes):
            steps = [Step.of(triple) for triple in triples]
            before_last = math.prod(step.growth for step in steps[:-1])
            underflows = (most * before_last) ** 2 > bounds.unit
            # Where sums cost a pass over memory anyway, a multiple of one is free.
            if i and (not products.adds_for_free or underflows):
                x = size / bounds.size * widen(x)
                size = most = bounds.size
            x = yield round_to(x, dtype)
            x, growth = yield from _pass(x, size, most, steps, products)
            size, most = size * growth, most * before_last * steps[-1].growth
        return size * widen(x)


class Gram(Standard):
    """Steps collected on R, which is formed afresh as seldom as rounding allows.

    Its products are `exact`: R is the square of X, and so is the condition of R that
    of X, which takes all the bits that there are.
    """

    exact = True

    def passes(self, schedule: Schedule, dtype: str) -> tuple[Schedule, ...]:
        return cut_into_passes(schedule, dtype)


METHODS: dict[str, PolarMethod] = {"standard": Standard(), "gram": Gram()}


def take_turns(iterations: Sequence[Iteration[_Result]]) -> list[_Result]:
    """Runs iterations of equal length, of which none goes on before all have stored.

    Every product needs the one before, so while one runs nothing can be fetched for the
    next. Of two iterations in turns, one has its factors brought into fast memory while
    the other multiplies: by the compiler's estimates for TPU, GPT-2's update takes 0.79
    of the cycles and a quarter of the temporaries (`benchmarks/tpu_ahead_of_time.py`).
    """
    stored: list[Any] = [None] * len(iterations)  # a generator starts with None
    results: list[_Result] = []
    while not results:
        after, stored = stored, []
        for iteration, value in zip(iterations, after, strict=True):
            try:
                stored.append(iteration.send(value))
            except StopIteration as end:
                results.append(end.value)
        # Left to itself, a compiler runs one iteration after the other, or all at once
        # in as much memory; after a barrier of what all store they keep step.
        if len(stored) > 1:
            stored = list(jax.lax.optimization_barrier(stored))
    return results


class Step(NamedTuple):
    """`growth (z + keep I)` for X, with `growth z = linear R + square R^2`.

    X and R are stored in units: `X = size x` and `R = unit r`. A step of slope `a` that
    makes the size `a` times as large keeps `z x + x` of x: a product plus what is there
    already, which libraries for GPU form at once, in float32, and round once. With the
    slope as a factor of x, it would be a further pass over memory.
    """

    growth: Any
    keep: Any  # 1, unless the slope is 0
    linear: Any
    square: Any

    @staticmethod
    def of(triple: Any) -> "Step":
        a, b, c = triple
        return Step(a, 1.0, b, c) if a else Step(1.0, 0.0, b, c)


class Range(NamedTuple):
    """The sizes with which a dtype holds X, `X X^H = unit r`, and products of r.

    Beyond the largest units what is rounded below the smallest normal number would be
    more than what is rounded elsewhere.
    """

    first_size: float = 1.0  # before the first step, where the Frobenius norm of X is 1
    size: float = 1.0  # later, where its singular values are below 2
    unit: float = math.inf  # the largest for r
    unit_of_square: float = math.inf  # and for an r whose square is rounded too

    @staticmethod
    def of(dtype: DTypeLike) -> "Range":
        # bfloat16, float32 and float64 have exponents for all that there is to hold.
        #
        # float16 ends at 65,504. With these sizes r^2 is at most 15^4 = 50,625 in the
        # first step, where singular values are up to 1, and (2 * 7)^4 = 38,416 later,
        # where they are up to 2. Below 6e-5 it rounds to multiples of 2^-24, which for
        # a unit of 128 are multiples of 2^-17 of R, and of R^2 for one of 8 of 2^-18:
        # less than the 2^-12 by which an entry of 1 is rounded anyway.
        is_half = jnp.dtype(dtype) == jnp.float16
        return Range(1 / 15, 1 / 7, 128.0, 8.0) if is_half else Range()


def run_in_loop(
    x: jax.Array, schedule: Schedule, steps: int | jax.Array, products: Products
) -> jax.Array:
    """The standard form in a program as long as one step, for any number of steps.

    Beyond the end of the schedule its last triple repeats.
    """
    dtype, size = x.dtype, Range.of(x.dtype).first_size
    wide = np.promote_types(jnp.finfo(dtype).dtype, np.float32)
    table = np.asarray(schedule, wide)

    def one_step(i: jax.Array, x: jax.Array) -> jax.Array:
        last = len(table) - 1
        # Equal triples are compiled in.
        is_one = (table == table[0]).all()
        triple = table[0] if is_one else jnp.asarray(table)[jnp.minimum(i, last)]
        # Without growth: of a loop it is not known how far it would grow.
        step = Step(1.0, *triple)
        one = _pass(x, size, size, [step], products)
        ((x, _),) = take_turns([one])
        return round_to(x, dtype)

    return size * widen(jax.lax.fori_loop(0, steps, one_step, x))


def _pass(
    x: jax.Array, size: Any, most: float, steps: Sequence[Step], products: Products
) -> Iteration[tuple[jax.Array, Any]]:
    """Some steps from one R: what is stored of X afterwards, and the growth of X."""
    r = yield products.gram(x)
    factor = yield from _factor_of(r, size**2, most**2, steps, products)
    return products.apply(factor.q, x, factor.keep), factor.growth


class Factor(NamedTuple):
    """`growth (q + keep I)`, for each matrix of a stack.

    Multiples of the identity are kept apart, since rounded with the rest they would
    drown it (1e-5 in float32, against 3e-6): the slopes of the steps, and the mean of
    the diagonal of the product.
    """

    q: jax.Array
    keep: Any
    growth: Any


def _factor_of(
    r: jax.Array, unit: Any, most: float, steps: Sequence[Step], products: Products
) -> Iteration[Factor]:
    """The product of the steps' polynomials of `R = unit r`; unit is at most `most`."""
    wide_from = Range.of(r.dtype).unit_of_square
    factor = None
    for i, step in enumerate(steps):
        # growth z = linear R + square R^2, with R = unit r.
        scale, keep = step.square * unit**2, step.linear * unit
        z = yield products.multiply(
            r,
            r,
            r,
            scale=scale / step.growth,
            keep=keep / step.growth,
            wide=most > wide_from,
        )
        if factor is None:
            factor = Factor(z, step.keep, step.growth)
        else:
            factor = _times(factor, step, z, products)
            factor = factor._replace(q=(yield factor.q))
        if i < len(steps) - 1:
            # R of the next step is (z + keep I) R (z + keep I): both products are of
            # matrices that commute, and so are Hermitian.
            rz = yield products.multiply(r, z, r, keep=step.keep)
            r = yield products.multiply(z, rz, rz, keep=step.keep)
            unit, most = unit * step.growth**2, most * step.growth**2
    assert factor is not None
    return factor


def _times(factor: Factor, step: Step, z: jax.Array, products: Products) -> Factor:
    """A factor times `growth (z + keep I)`.

    Of `(q + keep I) (z + keep' I)` all but `keep keep' I` is `q z + keep' q + keep z`.
    """
    q, keep, growth = factor
    p = products.multiply(q, z, q, keep=step.keep, rounded=False)
    total = add(p, z, 1.0, keep)
    if products.adds_for_free:
        # p is stored: of it and of z the mean reads diagonals only.
        mean = _mean(jnp.diagonal(p, axis1=-2, axis2=-1))
        mean += keep * _mean(jnp.diagonal(z, axis1=-2, axis2=-1))
    else:
        # p is just being formed, and so are sums of it; a diagonal would be read again.
        one = jnp.broadcast_to(jnp.eye(total.shape[-1], dtype=bool), total.shape)
        mean = _mean(jnp.where(one, total, 0).sum(axis=-1))
    rest = step.keep * keep + mean
    # It is 0 only for a matrix of zeros, and with a slope of 0.
    rest = jnp.where(rest == 0, 1, rest)
    one = jnp.broadcast_to(jnp.eye(total.shape[-1], dtype=total.dtype), total.shape)
    q = round_to((total - mean * one) / rest, z.dtype)
    return Factor(q, 1.0, growth * step.growth * rest)


def _mean(diagonal: jax.Array) -> jax.Array:
    """In float32 or wider, as `(..., 1, 1)`."""
    return widen(diagonal).mean(axis=-1)[..., None, None]


#: The most that one pass may grow the rounding error of R = X X^H, in units of that of
#: an entry of 1: the first pass, and a later one. The squares of the singular values of
#: X add up to 1 before the first step, so that if many count each is far below 1, and
#: so is the error that the first pass starts with. The Gram form then stays within
#: twice the error of the standard one in bfloat16 whatever the spectrum, and within
#: 1e-5 of it in float32 (`benchmarks/accuracy.py`). Keller's five start afresh after
#: the third step, in bfloat16 after the first and the third.
MOST_ERROR_GROWTH = {"bfloat16": (60.0, 60.0)}
DEFAULT_ERROR_GROWTH = (200.0, 70.0)


@functools.lru_cache(maxsize=256)
def cut_into_passes(schedule: Schedule, dtype: str) -> tuple[Schedule, ...]:
    """Cuts a schedule into passes that each start from `X X^H`, as few as will do.

    In exact arithmetic that is one. But R is rounded as the square of X: where a step
    of slope `a` lifts the error of X by `a`, it lifts that of R by `a^2`.
    """
    # The largest eigenvalue that R can have before each step: a sweep over singular
    # values. Its error is as many units of rounding.
    values, largest = np.linspace(0.0, 1.0, 4097), []
    for a, b, c in schedule:
        largest.append(float(np.max(values**2)))
        values = a * values + b * values**3 + c * values**5

    def error_growth(start: int, end: int) -> float:
        """The error of R in the last step of a pass, for a singular value of 0.

        There the derivative of the polynomial is its slope `a`, the most it is
        anywhere, so that each step multiplies the error by `a^2` and rounds anew.
        """
        error = largest[start]
        for (a, _, _), square in zip(
            schedule[start : end - 1], largest[start + 1 : end], strict=True
        ):
            error = a * a * error + square
        return error

    # From the end, since what an early pass leaves wrong the later ones mend: each
    # takes as many steps as it may, and the first takes what is left.
    first, later = MOST_ERROR_GROWTH.get(dtype, DEFAULT_ERROR_GROWTH)
    cuts = [len(schedule)]
    while cuts[0] > 0:
        start, end = cuts[0] - 1, cuts[0]
        while start and error_growth(start - 1, end) <= (
            first if start == 1 else later
        ):
            start -= 1
        cuts.insert(0, start)
    return tuple(schedule[i:j] for i, j in itertools.pairwise(cuts))
