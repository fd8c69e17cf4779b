"""Momentum in 16 bits: what is orthogonalized is made of what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from internals import accumulate


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ahead_is_made_of_rounded_momentum(dtype):
    m, g = normal(0, 64, 64, dtype=dtype), normal(1, 64, 64)
    kept, ahead = jax.jit(lambda m, g: accumulate(0.95, m, g, True))(m, g)
    step = np.float32(g) / (32 if dtype == "float16" else 1)
    exact = np.asarray(np.float32(0.95) * np.float32(m) + step)
    rounded = np.asarray(exact.astype(kept.dtype), np.float32)
    # A product and a sum may be rounded together, so a tie goes either way.
    ulp = float(jnp.finfo(dtype).eps) * np.abs(exact)
    np.testing.assert_array_less(np.abs(np.float32(kept) - rounded), ulp + 1e-12)
    assert (np.float32(kept) == rounded).mean() > 0.99
    twice = np.float32(0.95) * np.float32(kept) + step
    expected = np.asarray(twice.astype(kept.dtype), np.float32)
    assert (np.float32(ahead) == expected).mean() > 0.99
    # Of momentum that was not rounded it would be something else.
    other = np.asarray((np.float32(0.95) * exact + step).astype(kept.dtype), np.float32)
    assert (np.float32(ahead) == other).mean() < 0.9


def test_a_tpu_rounds_what_it_does_not_store():
    """It reads the gradient once; elsewhere a barrier keeps what was rounded."""
    m, g = normal(0, 8, 8, dtype="bfloat16"), normal(1, 8, 8)
    traced = jax.jit(lambda m, g: accumulate(0.95, m, g, True)).trace(m, g)
    for platform, is_stored in (("tpu", False), ("cuda", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) == is_stored
        assert ("reduce_precision" in text) != is_stored
