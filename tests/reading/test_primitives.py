"""Marks go back through each primitive to the entries on which a result depends.

JAX's own derivatives say which entries these are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import call_of, Graph
from jax import lax


X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
PLACES = np.asarray([2, 0, 2])
ORDER = np.asarray([3, 2, 0, 1])
MIXED = np.asarray([5, 0, 0, 3, 2, 1])


def _windows(of, start, size, step, padding, base=(1, 1), dilation=(1, 1)):
    def function(x):
        return lax.reduce_window(x, start, of, size, step, padding, base, dilation)

    return function


def _convolved(x):
    """Convolves four features, in two groups, and sums over the places."""
    numbers, kernel = ("NCW", "OIW", "NCW"), jnp.ones((8, 2, 1))
    return lax.conv_general_dilated(
        x[None], kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=2
    ).sum(-1)


def _slope_of_maxima(at, *args):
    """Returns the slope along `x` of the maxima of windows of `at(x)`."""
    maxima = _windows(lax.max, -jnp.inf, *args)
    return lambda x: jax.jvp(maxima, (at(x),), (x,))[1]


#: Functions of a (4, 6) array whose results depend on just the entries with marks.
EXACT = {
    "add": lambda x: x + x[:1],
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 4, 6)),
    "concatenate": lambda x: jnp.concatenate([x, 2 * x[:, :2]], 1),
    "cumsum": lambda x: jnp.cumsum(x, 1)[:, -1:],
    "dot_general": lambda x: jnp.ones((2, 4)) @ x,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)),
    "gather": lambda x: x[jnp.asarray([1])],
    "grouped convolution": _convolved,
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), 1 + x**2),
    "zeta": lambda x: jax.scipy.special.zeta(2.0, 1 + x**2),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1))),
    "reduce_sum": lambda x: x.sum(0),
    "reshape": lambda x: x.reshape(2, 12),
    "rev": lambda x: jnp.flip(x, 1),
    "scatter in another order": lambda x: jnp.zeros((4, 6)).at[ORDER].set(x),
    "scatter-add in another order": lambda x: jnp.ones((4, 6)).at[ORDER].add(x),
    "scatter-mul": lambda x: x.at[1].multiply(3.0),
    "slice": lambda x: lax.slice(x, (1, 2), (4, 5), (2, 1)),
    "split": lambda x: jnp.split(x, 3, 1)[1],
    "squeeze": lambda x: x[:1].squeeze(0),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "transpose": lambda x: x.T,
    "windows": _windows(lax.add, 0.0, (2, 1), (2, 1), "VALID"),
    "windows that overlap": _windows(lax.add, 0.0, (1, 3), (1, 2), "SAME"),
    "windows with gaps": _windows(
        lax.add, 0.0, (2, 2), (1, 2), ((0, 1), (1, 1)), (2, 1), (1, 2)
    ),
}
#: Functions whose results may depend on entries with marks, and on no others.
AT_MOST = {
    "cummax": lambda x: lax.cummax(x, 1),
    "fft": lambda x: jnp.fft.rfft(x).real,
    "gather of rows": lambda x: x[PLACES],
    "maxima of windows": _windows(lax.max, -jnp.inf, (2, 2), (2, 1), "SAME"),
    "minima of windows": _windows(lax.min, jnp.inf, (1, 2), (1, 3), "VALID"),
    "reduce_max": lambda x: x.max(1),
    "reduce_prod": lambda x: x.prod(1),
    "scatter-add": lambda x: jnp.zeros((3, 6)).at[jnp.asarray([0, 2, 2, 1])].add(x),
    "scatter-max": lambda x: jnp.zeros((3, 6)).at[jnp.asarray([0, 2, 2, 1])].max(x),
    "scatter for each row": jax.vmap(lambda x: jnp.zeros(6).at[MIXED].add(x)),
    "scatter-mul of factors": lambda x: (
        jnp.ones((5, 6)).at[jnp.asarray([0, 4, 2, 1])].multiply(x, unique_indices=True)
    ),
    "scatter of a vmap": lambda x: jax.vmap(lambda y, i: jnp.zeros(6).at[i].add(y))(
        x, jnp.tile(MIXED, (4, 1))
    ),
    "slopes of maxima": _slope_of_maxima(lambda x: X, (2, 3), (2, 1), "SAME"),
    "slopes of maxima where they are": _slope_of_maxima(
        lambda x: x, (1, 2), (1, 2), "VALID"
    ),
    "sort": lambda x: jnp.sort(x, 0),
    "top_k": lambda x: lax.top_k(x, 2)[0],
}


def _marked(fun, x):
    """Returns whether each entry of a result has its mark at each entry of `x`."""
    with call_of(fun, x) as call:
        graph = Graph(call.body, [True])
    (result,) = graph.top.outputs
    count = int(np.prod(result.shape))
    bits = np.empty(count, object)
    bits[:] = [1 << i for i in range(count)]
    marked = np.zeros((count, *x.shape), bool)
    for origin in graph.walk(result, (bits.reshape(result.shape),)):
        if origin.parameter is not None:
            marks = np.broadcast_to(origin.all_marks[0], x.shape)
            marked |= [(marks >> i & 1).astype(bool) for i in range(count)]
    return marked


def _depends(fun, x):
    slopes = jax.jit(jax.jacrev(fun))(x)
    return np.asarray(slopes).reshape(-1, *x.shape) != 0


@pytest.mark.parametrize("name", EXACT)
def test_marks_are_where_a_derivative_is(name):
    depends = _depends(EXACT[name], X)
    assert not depends.all() and depends.any()
    np.testing.assert_array_equal(_marked(EXACT[name], X), depends)


@pytest.mark.parametrize("name", AT_MOST)
def test_no_derivative_is_without_a_mark(name):
    depends, marked = _depends(AT_MOST[name], X), _marked(AT_MOST[name], X)
    assert depends.any() and not marked.all()
    assert marked[depends].all()
