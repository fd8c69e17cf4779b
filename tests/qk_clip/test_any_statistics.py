"""Whatever heads and statistics there are, each head gets its share and no more."""

import chex
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import muonclip_jax as mc


STATISTICS = st.one_of(
    st.floats(-50, 2000, width=32),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40]),
    st.just("tau"),
)


@st.composite
def clips(draw):
    """Grouped queries of any size, with the statistics that a bad step may bring."""
    key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = key_heads * group
    tau = draw(st.floats(0.5, 500, width=32))
    drawn = draw(st.lists(STATISTICS, min_size=heads, max_size=heads))
    logits = np.asarray([tau if x == "tau" else x for x in drawn], np.float32)
    return key_heads, tau, draw(st.floats(0, 1, width=32)), logits


clip_qk = jax.jit(mc.clip_qk)


@settings(max_examples=60, deadline=None)
@given(clips())
def test_of_any_heads_and_statistics(clip):
    key_heads, tau, alpha, logits = clip
    heads = len(logits)
    query, key = np.ones((2, heads, 2), np.float32), np.ones((2, key_heads, 2))
    params = {
        "query": {"kernel": query, "bias": query[0]},
        "key": {"kernel": key.astype(np.float32)},
    }
    after = clip_qk(params, {"max_logits": logits}, tau, alpha=alpha)
    for leaf in jax.tree.leaves(after):
        assert np.isfinite(leaf).all()
    gamma = np.ones(heads)
    over = np.isfinite(logits) & (logits > tau)
    gamma[over] = tau / logits[over].astype(np.float64)
    factor = np.asarray(after["query"]["kernel"])[0, :, 0]
    shared = np.repeat(np.asarray(after["key"]["kernel"])[0, :, 0], heads // key_heads)
    np.testing.assert_allclose(factor * shared, gamma, rtol=1e-5, atol=1e-37)
    np.testing.assert_array_equal(after["query"]["bias"][:, 0], factor)
    # Of heads that do not exceed, not a bit changes.
    assert (factor[~over] == 1).all() and (shared[~over] == 1).all()
    again = clip_qk(
        after, {"max_logits": np.where(over, np.float32(tau), logits)}, tau, alpha=alpha
    )
    chex.assert_trees_all_equal(again, after)
