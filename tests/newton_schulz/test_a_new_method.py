"""A polar method is one object, entered in one place: here one of a test."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, matrix_of, tolerance
from internals import METHODS

import muonclip_jax as mc


class Plain:
    """`X <- a X + (b R + c R^2) X`, with nothing kept apart and no units."""

    exact = True

    def cost(self, m, n, schedule, dtype):
        return len(schedule) * (2 * m * m * n + m**3)

    def run(self, x, schedule, products, *, in_loop):
        for slope, linear, square in schedule:
            r = yield products.gram(x)
            z = yield products.multiply(r, r, r, scale=square, keep=linear)
            x = yield products.apply(z, x, slope).astype(x.dtype)
        return x


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(METHODS, "plain", Plain())


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_it_is_known_everywhere_once_it_is_entered(plain, shape):
    x = matrix_of(np.linspace(1, 0.3, 8), *shape)
    expected = mc.newton_schulz(jnp.float32(x), method="standard")
    share = tolerance(jnp.float32, size=20, slopes=(3.4445,) * 5)
    y = mc.newton_schulz(jnp.float32(x), method="plain")
    assert_close(y, np.float64(expected), share)
    tx = mc.scale_by_muon(ns_method="plain", consistent_rms=None)
    params = {"w": jnp.float32(x)}
    updates, _ = tx.update(params, tx.init(params))
    scale = np.sqrt(max(1, shape[1] / shape[0]))
    assert_close(updates["w"] / scale, np.float64(expected), share)


def test_others_are_refused():
    with pytest.raises(ValueError, match="choose one of 'auto', 'standard', 'gram'$"):
        mc.newton_schulz(jnp.eye(2), method="plain")
