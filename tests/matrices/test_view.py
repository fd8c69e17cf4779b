"""A leaf as a stack of matrices, and back."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import matrix_view
from optax.contrib import MuonDimensionNumbers as Numbers


@pytest.mark.more
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_matrices_and_back_is_the_identity(data):
    rank = data.draw(st.integers(2, 5))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    axes = data.draw(st.permutations(range(rank)))
    cuts = sorted(
        data.draw(st.lists(st.integers(1, rank), min_size=2, max_size=2, unique=True))
    )
    reduction, output = axes[: cuts[0]], axes[cuts[0] : cuts[1]]
    leaf = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(
        shape, Numbers(tuple(reduction), tuple(a - rank for a in output))
    )
    matrices = jax.jit(view.to_matrices)(leaf)
    assert matrices.shape == (view.count, view.fan_in, view.fan_out)
    np.testing.assert_array_equal(jax.jit(view.from_matrices)(matrices), leaf)
    order = tuple(sorted(axes[cuts[1] :])) + tuple(reduction) + tuple(output)
    np.testing.assert_array_equal(
        np.asarray(matrices).ravel(), leaf.transpose(order).ravel()
    )
