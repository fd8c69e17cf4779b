"""One update of muonclip in every dtype and small size, against float64 NumPy.

Two steps of Newton-Schulz: each may magnify a rounding 3.4 times. The reference
rounds the momentum as documented, to the dtype of the params.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import polynomial_of
from seeds import chance, family, pick, told

import muonclip_jax as mc


DTYPES = ("float16", "bfloat16", "float32", "float64")
RATE, DECAY, STEPS = 0.5, 0.25, 2


def draw(generator):
    return {
        "params": pick(generator, *DTYPES),
        "updates": pick(generator, *DTYPES),
        "statistics": pick(generator, *DTYPES),
        "promotion": pick(generator, "standard", "strict"),
        "is_jitted": chance(generator, 0.5),
        "nesterov": chance(generator, 0.5),
        # Tall or wide, a stack, and one of nothing or of one entry.
        "shape": pick(generator, (3, 4), (4, 2), (1, 1), (0, 3), (2, 3, 3), (0, 2, 2)),
        "heads": pick(generator, 0, 1, 2),
        "logit": pick(generator, 50.0, 400.0, 5e4),
    }


def tree(generator, case, dtype):
    kernel = (3, case["heads"], 2)
    shapes = {
        "mlp": {"kernel": case["shape"]},
        "norm": {"scale": (case["shape"][-1],)},
        "attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(generator.normal(size=s), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def accumulated(gradient, dtype, nesterov):
    """What is orthogonalized in the first step, in float64."""
    wide = np.promote_types(np.promote_types(dtype, np.float32), gradient.dtype)
    gradient, beta = np.asarray(gradient, wide), wide.type(0.95)
    # In float16 it is stored in units of 32.
    gradient = gradient / 32 if dtype == np.float16 else gradient
    momentum = gradient.astype(dtype)
    if nesterov:
        momentum = (beta * momentum.astype(wide) + gradient).astype(dtype)
    return np.asarray(momentum, np.float64)


def direction(momentum):
    """`0.2 sqrt(max(m, n))` times the polynomial of each matrix."""
    rows, columns = momentum.shape[-2:]
    flat = momentum.reshape(-1, rows, columns) if momentum.size else ()
    schedule = mc.NS_COEFFS["keller"][:1] * STEPS
    found = [polynomial_of(x, schedule) for x in flat]
    rho = 0.2 * np.sqrt(max(rows, columns))
    return rho * np.reshape(found, momentum.shape), rho


def precision(case):
    """The coarsest rounding on the way: those of both trees, and float32's norms."""
    names = (case["params"], case["updates"])
    wide = all(name == "float64" for name in names)
    coarsest = max(float(jnp.finfo(name).eps) for name in names)
    # The factors are sums of squares in float32 unless all is double.
    return coarsest if wide else max(coarsest, float(jnp.finfo("float32").eps))


def compare_matrices(case, params, updates, gradients):
    param, gradient = params["mlp"]["kernel"], gradients["mlp"]["kernel"]
    momentum = accumulated(np.asarray(gradient), param.dtype, case["nesterov"])
    exact, rho = direction(momentum)
    exact = -RATE * (exact + DECAY * np.float64(param))
    actual = updates["mlp"]["kernel"]
    assert actual.dtype == case["updates"] and actual.shape == param.shape
    largest = rho + DECAY * np.abs(np.float64(param)).max(initial=0)
    # The momentum may round the other way: times 3.4 for each step.
    bound = (4 + 3.5**STEPS) * precision(case) * largest
    assert (np.abs(np.float64(actual) - exact) <= bound).all(), (actual, exact, bound)


def compare_heads(case, params, updates, moved):
    """The clip of what `muon` alone gives, rounded once."""
    gamma = min(1.0, 100 / np.float64(case["logit_as_given"]))
    for name in ("query", "key"):
        param = params["attn"][name]["kernel"]
        exact = np.float64(param) + np.float64(updates["attn"][name]["kernel"])
        exact = np.sqrt(gamma) * exact
        actual = moved["attn"][name]["kernel"]
        assert actual.dtype == case["params"]
        # Sums of apply_updates are in the wider of both dtypes, float32 at least.
        sums = max(precision(case) if gamma == 1 else 0, 2.0**-22)
        allowed = float(jnp.finfo(param.dtype).eps) / 2 * np.abs(exact) + 1e-7
        allowed = allowed + sums * (np.abs(exact) + np.abs(np.float64(param)))
        assert (np.abs(np.float64(actual) - exact) <= allowed).all(), (actual, exact)


def step_of(tx, **extra):
    def step(params, gradients):
        state = tx.init(params)
        updates, after = tx.update(gradients, state, params, **extra)
        return updates, state, after

    return step


@contextlib.contextmanager
def settings(case):
    with jax.enable_x64(True), jax.numpy_dtype_promotion(case["promotion"]):
        yield


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    with settings(case), told(seed, **case):
        params = tree(generator, case, case["params"])
        gradients = tree(generator, case, case["updates"])
        logits = np.full(case["heads"], case["logit"])
        stats = {"attn": {"max_logits": jnp.asarray(logits, case["statistics"])}}
        case["logit_as_given"] = float(jnp.asarray(case["logit"], case["statistics"]))
        options = {
            "orthogonalizer": mc.NewtonSchulz(steps=STEPS),
            "nesterov": case["nesterov"],
        }
        options |= {"weight_decay": DECAY, "beta": 0.95}
        whole = step_of(mc.muonclip(RATE, **options), attention_stats=stats)
        plain = step_of(mc.muon(RATE, **options))
        if case["is_jitted"]:
            whole, plain = jax.jit(whole), jax.jit(plain)
        updates, before, after = whole(params, gradients)
        alone, *_ = plain(params, gradients)
        # optax adds in the dtype that both promote to, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            moved = optax.apply_updates(params, updates)
        for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), "the state changes"
        compare_matrices(case, params, updates, gradients)
        compare_heads(case, params, alone, moved)


test_dtypes_and_sizes = family(check, 160)
