"""Every mode of JAX: the same numbers as without it."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leaf_pairs, more, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def tree(seed):
    query, key = ({"kernel": normal((seed, i), 8, 2, 4)} for i in (2, 3))
    return {
        "attn": {"query": query, "key": key},
        "up": {"kernel": normal((seed, 0), 2, 6, 12), "bias": normal((seed, 1), 12)},
    }


PARAMS, GRADS = tree(0), tree(1)
STATS = {"attn": {"max_logits": jnp.asarray([50.0, 400.0])}}
FALLING = optax.linear_schedule(0.1, 0.0, 10)

SET_UPS = {
    "schedules": lambda: mc.muonclip(FALLING, weight_decay=FALLING),
    "int8": lambda: mc.muonclip(1e-2, mu_dtype="int8", neuron_b2=0.9),
    "float16": lambda: mc.muonclip(
        1e-2, mu_dtype="float16", consistent_rms=None, cautious_weight_decay=True
    ),
    "micro-batches, watched": lambda: mc.multi_steps(
        mc.muonclip(1e-2, threshold=float("inf")), 2
    ),
    "injected": lambda: optax.inject_hyperparams(mc.muonclip)(1e-2, alpha=0.3),
}
MODES = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
    "x64": lambda: jax.enable_x64(True),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "no jit": jax.disable_jit,
    "precision": lambda: jax.default_matmul_precision("highest"),
    "NaNs": lambda: jax.debug_nans(True),
    "infinities": lambda: jax.debug_infs(True),
}
#: Modes that look at single operations see them in eager calls only.
EAGER = ("no jit", "infinities", "NaNs")


def two_steps(tx, mode, is_eager=False):
    """The state after each step and before, and the updates."""
    wrap = (lambda f: f) if is_eager else jax.jit
    found = []
    with mode():
        state = wrap(tx.init)(PARAMS)
        update = wrap(lambda g, s, p, stats: tx.update(g, s, p, attention_stats=stats))
        for _ in range(2):
            updates, after = update(GRADS, state, PARAMS, STATS)
            found.append((updates, state, after))
            state = after
    return found


@pytest.mark.parametrize(
    "name, mode",
    [
        (name, mode)
        if name == "micro-batches, watched" and mode not in ("no jit", "precision")
        else more(name, mode)
        for name in SET_UPS
        for mode in MODES
    ],
)
def test_the_same_in_every_mode(name, mode):
    tx = SET_UPS[name]()
    expected = two_steps(tx, contextlib.nullcontext)
    actual = two_steps(tx, MODES[mode], is_eager=mode in EAGER)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    # A code of 8 bits may round to its neighbor where sums are in another order.
    for a, e in leaf_pairs(actual, expected):
        is_code = e.dtype == jnp.int8
        a, e = np.float64(a), np.float64(e)
        atol = 1 if is_code else 1e-3 * np.abs(e).max(initial=0)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", [*map(more, SET_UPS)])
def test_a_state_is_finite_from_the_start(name):
    tx = SET_UPS[name]()
    for _, *states in two_steps(tx, contextlib.nullcontext):
        assert all(np.isfinite(np.float64(x)).all() for x in jax.tree.leaves(states))
