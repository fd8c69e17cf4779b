"""Any float dtype of params, gradients and momentum, however strict JAX is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal, one_at_a_time, polynomial_of
from internals import accumulate

import muonclip_jax as mc


SHORT = ("float16", "bfloat16", "float32")


@pytest.fixture
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def reference(gradients, nesterov=True, beta=0.95):
    """The last direction, in float64."""
    momentum = np.zeros(gradients[0].shape)
    for g in gradients:
        g = np.asarray(g, np.float64)
        momentum = beta * momentum + g
    ahead = g + beta * momentum if nesterov else momentum
    return polynomial_of(ahead, mc.NS_COEFFS["keller"])


@pytest.mark.parametrize("nesterov", [True, more(False)])
@pytest.mark.parametrize(("momentum", "scale"), [("float16", 8e3), ("float16", 1e-3)])
@pytest.mark.parametrize("gradients", SHORT)
def test_momentum_in_float16_stays_finite(gradients, momentum, scale, nesterov):
    """Gradients near the largest float16, all of one sign, so that they add up."""
    draws = [jnp.abs(normal(i, 4, 6)) * scale for i in range(30)]
    draws = [{"w": x.astype(gradients)} for x in draws]
    options = dict(beta=0.95, nesterov=nesterov, consistent_rms=None)
    tx = mc.scale_by_muon(mu_dtype=momentum, **options)
    state = tx.init(draws[0])
    update = jax.jit(tx.update)
    for g in draws:
        updates, state = update(g, state)
        assert state.mu["w"].dtype == momentum
        assert np.isfinite(state.mu["w"]).all()
    scale_by_shape = np.sqrt(6 / 4)
    expected = scale_by_shape * reference([g["w"] for g in draws], nesterov)
    np.testing.assert_allclose(np.float64(updates["w"]), expected, atol=0.06)


BETAS = {
    "rises": np.linspace(0.3, 0.95, 12),
    "starts from nothing": [0.0, *[0.97] * 11],
    "restarts": [0.95, 0.95, 0.95, 0.5, 0.5, 0.5] * 2,
    "keeps all": [1.0] * 12,
}


@pytest.mark.parametrize(
    "betas, scale, nesterov, params",
    one_at_a_time(BETAS, [1e-2, 3e3], [True, False], ["float16", "float32"]),
)
def test_momentum_in_float16_when_beta_changes(betas, scale, nesterov, params):
    betas, once = BETAS[betas], (1.5, -0.5, 0.0)
    tx = optax.inject_hyperparams(mc.scale_by_muon, static_args=("mu_dtype",))(
        beta=lambda count: jnp.asarray(np.float32(betas))[count],
        mu_dtype="float16",
        nesterov=nesterov,
        orthogonalizer=mc.NewtonSchulz(once, steps=1),
        consistent_rms=None,
    )
    state, update = tx.init({"w": jnp.zeros((8, 6), params)}), jax.jit(tx.update)
    momentum, bound = np.zeros((8, 6)), 0.0
    for i, beta in enumerate(betas):
        g = {"w": normal(i, 8, 6, dtype=jnp.dtype(params), scale=scale)}
        updates, state = update(g, state)
        exact = np.asarray(g["w"], np.float64)
        momentum = beta * momentum + exact
        ahead = exact + beta * momentum if nesterov else momentum
        # Half a unit of float16 in each step, and one more of what is ahead and of the
        # update. The step lifts a difference by 1.5, and dividing by the norm by 2.
        bound = beta * bound + 2.0**-11 * np.linalg.norm(momentum)
        allowed = 3 * (bound / np.linalg.norm(ahead) + 2 * 2.0**-11)
        found = np.float64(updates["w"])
        assert np.linalg.norm(found - polynomial_of(ahead, [once])) <= allowed


@pytest.mark.parametrize("way", ["jit", more("eager"), more("disable_jit")])
@pytest.mark.parametrize(
    ("params", "gradients", "momentum"),
    [*itertools.product(SHORT, SHORT, [None]), ("float32", "bfloat16", "float16")],
)
def test_every_pair_of_dtypes(strict, way, params, gradients, momentum):
    p, g = ({"w": normal(i, 3, 5)} for i in range(2))
    p, g = optax.tree.cast(p, params), optax.tree.cast(g, gradients)
    tx = mc.scale_by_muon(
        mu_dtype=momentum, consistent_rms=None, orthogonalizer=mc.NewtonSchulz(steps=5)
    )
    with jax.disable_jit(way == "disable_jit"):
        update = jax.jit(tx.update) if way == "jit" else tx.update
        updates, state = update(g, tx.init(p), p)
    assert updates["w"].dtype == gradients
    assert state.mu["w"].dtype == (momentum or params)
    expected = np.sqrt(5 / 3) * reference([g["w"]])
    np.testing.assert_allclose(np.float64(updates["w"]), expected, atol=0.03)


@pytest.mark.parametrize("statistics", ["float16", "float64"])
@pytest.mark.parametrize(
    "params, gradients",
    [*itertools.product(["float64"], ["bfloat16", "float64"]), ("float32", "float64")],
)
def test_doubles_next_to_a_clip(strict, params, gradients, statistics):
    with jax.enable_x64(True):
        shapes = {"mlp": (3, 4), "query": (3, 2, 2), "key": (3, 2, 2)}
        p, g = (
            {k: {"kernel": normal((i, k == "key"), *s)} for k, s in shapes.items()}
            for i in range(2)
        )
        p, g = optax.tree.cast(p, params), optax.tree.cast(g, gradients)
        stats = {"max_logits": jnp.full(2, 400.0, statistics)}
        options = {"orthogonalizer": mc.NewtonSchulz(steps=2), "beta": 0.95}
        muon, whole = (make(0.5, **options) for make in (mc.muon, mc.muonclip))
        plain, _ = jax.jit(muon.update)(g, muon.init(p), p)
        found, _ = jax.jit(whole.update)(g, whole.init(p), p, attention_stats=stats)
    # The update, below 1, is rounded to the dtype of the gradient.
    bound = 1e-14 if params == gradients else 1e-6 + float(jnp.finfo(gradients).eps)
    w, momentum = (np.float64(x["mlp"]["kernel"]) for x in (p, g))
    direction = 0.4 * polynomial_of(momentum, mc.NS_COEFFS["keller"][:1] * 2)
    expected = -0.5 * (direction + 0.1 * w)
    np.testing.assert_allclose(found["mlp"]["kernel"], expected, rtol=0, atol=bound)
    assert found["mlp"]["kernel"].dtype == gradients
    for name in ("query", "key"):
        w, a, b = (np.float64(x[name]["kernel"]) for x in (p, plain, found))
        rounding = 1e-12 if params == "float64" else 1e-6
        np.testing.assert_allclose(w + b, 0.5 * (w + a), rtol=0, atol=rounding)


def test_two_matrices_of_one_shape_without_jit():
    params = {"a": normal(0, 3, 4), "b": normal(1, 3, 4)}
    tx = mc.scale_by_muon()
    expected, _ = tx.update(params, tx.init(params))
    with jax.disable_jit():
        updates, _ = tx.update(params, tx.init(params))
    for name, x in expected.items():
        np.testing.assert_allclose(updates[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("param", "gradient"), list(itertools.permutations(SHORT, 2)))
def test_the_averages_of_adam_keep_their_dtypes(param, gradient):
    params = {"bias": normal(0, 3, dtype=jnp.dtype(param))}
    tx = mc.muon(1e-2)
    state = tx.init(params)
    _, after = tx.update(optax.tree.cast(params, gradient), state, params)
    for x, y in zip(*map(jax.tree.leaves, (state, after)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


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
