"""The iteration as loops, in a program as long as one step whatever their number.

CPUs are as fast with it, and need less memory: in steps that are written out XLA forms
each X anew for every later step, from the products of all before.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .coefficients import Schedule, Triple
from .hermitian_blocks import add_to_diagonal, Hermitian, join, Rows, split
from .products import Products, round_to, widen
from .steps import range_of, Step


#: The triples of a pass: known, or looked up when it runs.
Triples = np.ndarray | jax.Array


def iterate_in_loops(
    x: jax.Array, passes: Sequence[Schedule], products: Products, blocks: int
) -> jax.Array:
    """What `iterate` returns, but rounded.

    All passes are as long as the longest; the last steps of shorter ones are skipped.
    """
    lengths, longest = np.array([*map(len, passes)]), max(map(len, passes))
    filled = [[*steps, *[steps[-1]] * (longest - len(steps))] for steps in passes]
    table = _as_table(filled, x.dtype)

    def one_pass(i: jax.Array, rows: Rows) -> Rows:
        return _pass(rows, _at(table, i), _at(lengths, i), products)

    rows = jax.lax.fori_loop(0, len(passes), one_pass, split(x, blocks))
    return _joined(rows).reshape(x.shape)


def iterate_traced(
    x: jax.Array,
    schedule: Schedule,
    products: Products,
    blocks: int,
    ns_steps: jax.Array,
) -> jax.Array:
    """The standard form for a number of steps known only when it runs."""
    table = _as_table([[triple] for triple in schedule], x.dtype)

    def one_step(i: jax.Array, rows: Rows) -> Rows:
        return _pass(rows, _at(table, jnp.minimum(i, len(table) - 1)), 1, products)

    rows = jax.lax.fori_loop(0, ns_steps, one_step, split(x, blocks))
    return _joined(rows).reshape(x.shape)


def _pass(rows: Rows, triples: Triples, length: ArrayLike, products: Products) -> Rows:
    """The first `length` steps, in the Gram form if there may be several."""
    r = products.gram(rows)
    unit, step = _size(r[0][0]) ** 2, Step.of_traced(triples[0])
    z = products.polynomial(r, *step.polynomial(unit), widened=False)
    q, keep = z, step.keep
    if len(triples) > 1:
        q, keep = _later_steps(r, z, unit, triples, length, products)
    return round_to(products.apply(q, rows, keep), rows[0].dtype)


def _later_steps(
    r: Hermitian,
    z: Hermitian,
    unit: float,
    triples: Triples,
    length: ArrayLike,
    products: Products,
) -> tuple[Hermitian, jax.Array]:
    """The product of all steps, with the identity apart: `q + keep I`."""

    def one_step(i: jax.Array, state: tuple) -> tuple:
        r, z, q, keep = state
        before = Step.of_traced(_at(triples, i - 1))
        step = Step.of_traced(_at(triples, i))
        rz = products.combine(r, z, r, before.keep)
        r = products.combine(z, rz, rz, before.keep)
        z = products.polynomial(r, *step.polynomial(unit), widened=False)
        qz = products.combine(q, z, q, step.keep, rounded=False)
        return r, z, *_without_mean(qz, z, keep, keep * step.keep, products)

    def unless_skipped(i: jax.Array, state: tuple) -> tuple:
        if not isinstance(length, jax.Array):
            return one_step(i, state)
        return jax.lax.cond(i < length, one_step, lambda _, state: state, i, state)

    state = r, z, *_without_mean(z, z, 0.0, Step.of_traced(triples[0]).keep, products)
    _, _, q, keep = jax.lax.fori_loop(1, len(triples), unless_skipped, state)
    return q, keep


def _without_mean(
    p: Hermitian, z: Hermitian, factor: Any, keep: Any, products: Products
) -> tuple[Hermitian, jax.Array]:
    """`p + factor z + keep I`, with the mean of its diagonal in `keep`."""
    total, mean = products.sum_and_mean(p, z, factor)
    return round_to(add_to_diagonal(total, -mean), z[0][0].dtype), keep + mean


def _as_table(passes: Sequence[Sequence[Triple]], dtype: jnp.dtype) -> np.ndarray:
    """`(passes, steps, 3)`, in float32 or better."""
    real = jnp.finfo(dtype).dtype
    return np.asarray(passes, np.promote_types(real, np.float32))


def _at(table: Triples, i: jax.Array) -> Any:
    """An entry of a table, which is known where all entries are the same."""
    if isinstance(table, np.ndarray) and (table == table[0]).all():
        return table[0]
    return jnp.asarray(table)[i]


def _size(x: jax.Array) -> float:
    """Of what matrices are stored as a multiple, throughout."""
    return range_of(x.dtype).first_size


def _joined(rows: Rows) -> jax.Array:
    return join(tuple(_size(x) * widen(x) for x in rows))
