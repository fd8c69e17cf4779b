"""The gradient through Newton-Schulz against float64, at every scale and at zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, one_at_a_time

import muonclip_jax as mc


X, WEIGHTS = normal(0, 3, 4, 7), normal(1, 3, 4, 7)


def gradient(x, **options):
    def loss(x):
        return jnp.sum(mc.newton_schulz(x, steps=3, **options) * WEIGHTS)

    return np.asarray(jax.grad(loss)(x), np.float64)


def by_differences(x, step=1e-5):
    """Of the naive loop, in float64."""

    def loss(x):
        y = x / np.sqrt((x**2).sum((-2, -1), keepdims=True))
        for a, b, c in mc.NS_COEFFS["keller"][:3]:
            gram = y @ y.swapaxes(-2, -1)
            y = a * y + (b * gram + c * gram @ gram) @ y
        return (y * np.asarray(WEIGHTS, np.float64)).sum()

    x, found = np.asarray(x, np.float64), np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        shift = np.zeros(x.shape)
        shift[i] = step
        found[i] = (loss(x + shift) - loss(x - shift)) / (2 * step)
    return found


@pytest.mark.parametrize(
    "method, scale",
    one_at_a_time(["standard", "gram"], [1.0, 1e-30, 1e-16, 1e16, 1e30]),
)
def test_every_scale(scale, method):
    expected = by_differences(X)
    actual = gradient(X * scale, method=method) * scale
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("preconditioning", ["frobenius", "aol", "equilibrated"])
def test_zero_matrices_have_none(preconditioning):
    for x in (X.at[1].set(0.0), X.at[:].set(0.0), X.at[1, 2].set(0.0)):
        found = gradient(x, preconditioning=preconditioning)
        assert np.isfinite(found).all()
        is_zero = ~np.asarray(x).any((1, 2))
        assert not found[is_zero].any() and found[~is_zero].any((1, 2)).all()
