"""Independent references and small models that several test files share."""

import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import muonclip_jax as mc


# In place of `pytest.param`: a case that repeats a behavior at another size, dtype or
# layout. `pytest` alone leaves it out, `.ci/run` does not.
more = functools.partial(pytest.param, marks=pytest.mark.more)


def few(cases, *names) -> list:
    """All cases, of which `pytest` alone runs those that are named."""
    assert set(names) <= set(cases)

    def repeated(case):
        return more(*(case if isinstance(case, tuple) else (case,)))

    return [case if case in names else repeated(case) for case in cases]


def one_at_a_time(*values) -> list:
    """All combinations, of which `pytest` alone runs those near the first.

    These have at most one value that is not the first of its parameter.
    """
    cases = itertools.product(*(enumerate(of_one) for of_one in values))
    return [
        (pytest.param if sum(i > 0 for i, _ in case) < 2 else more)(
            *(value for _, value in case)
        )
        for case in cases
    ]


ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

# CANS as published (arXiv:2506.10935) diverges from 1.005 on, within bfloat16 rounding
# of 1.
UNSAFE_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def tolerance(dtype, *, size: int = 1, slopes=(1.0,), condition: float = 1.0) -> float:
    """How far two right results may differ, as a share of the largest entry.

    Every tolerance of a float follows from this, never from what one machine printed:
    processors add in other orders, and round a product and a sum once or twice.

    - `size`: how many products the longest sum has. Each is rounded by at most half of
        eps, evenly, so with a standard deviation of eps / sqrt(12); `size` of them add
        up to sqrt(size) of that, since signs are random (Higham and Mary, SIAM J. Sci.
        Comput. 41(5), 2019), and two results differ by sqrt(2) as much. Seven standard
        deviations, for the largest of many entries, are 3 sqrt(size) eps.
    - `slopes`: of the steps, one after the other. Each multiplies the errors before it
        by at most its slope and adds one of its own.
    - `condition`: how many times the result changes, relatively, as what it comes from:
        sum |x y| / |sum x y| where terms cancel, two for a square.

    The share is that of the largest entry since a product of matrices mixes them all:
    an entry near zero is as far off as its neighbors.
    """
    growth = functools.reduce(lambda error, slope: slope * error + 1, slopes, 0.0)
    return condition * growth * 3 * size**0.5 * float(jnp.finfo(dtype).eps)


def of_newton_schulz(size: int, schedule=mc.NS_COEFFS["keller"]) -> float:
    """In float32. A singular value near zero is where a step is steepest."""
    return tolerance(jnp.float32, size=size, slopes=[a for a, _, _ in schedule])


def assert_close(actual, expected, share: float) -> None:
    """Trees whose leaves differ by at most this share of their largest entry."""
    chex.assert_trees_all_equal_structs(actual, expected)

    def check(a, e):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(a, e, rtol=0, atol=share * np.abs(e).max(initial=0))

    jax.tree.map(check, actual, expected)


def matrix_of(singular_values, m: int, n: int, seed: int = 0) -> np.ndarray:
    """A float64 `(m, n)` matrix with the given singular values, or a Gaussian one."""
    generator = np.random.default_rng(seed)
    if singular_values is None:
        return generator.normal(size=(m, n))
    left, _ = np.linalg.qr(generator.normal(size=(m, m)))
    right, _ = np.linalg.qr(generator.normal(size=(n, n)))
    values = np.asarray(singular_values, np.float64)
    k = len(values)
    return left[:, :k] * values @ right[:, :k].T


def spectra(n):
    """Singular values by name, `n` at most; `None` is those of a Gaussian matrix."""
    return {
        "even": np.ones(n),
        "gaussian": None,
        "power law": 1 / np.arange(1, n + 1),
        "condition 1e4": np.geomspace(1, 1e-4, n),
        "condition 1e8": np.geomspace(1, 1e-8, n),
        "rank 1": [1.0],
        "rank 10": np.ones(10),
    }


@functools.cache
def matrix_with(spectrum, m=96, n=320):
    return matrix_of(spectra(m)[spectrum], m, n)


def polynomial_of(x: np.ndarray, schedule, norm: float | None = None) -> np.ndarray:
    """The composed odd polynomial applied to the singular values, in float64."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) if norm is None else norm)
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


def normal(seed, *shape, dtype=jnp.float32, scale: float = 1.0) -> jax.Array:
    """Drawn by NumPy: XLA would compile its generator for every shape, for seconds."""
    draw = scale * np.random.default_rng(seed).normal(size=shape)
    return jax.device_put(np.asarray(draw, dtype))


def is_numbers(x) -> bool:
    """Whether a node of a tree of dimension numbers is a leaf of it."""
    return x is None or isinstance(x, mc.MuonDimensionNumbers)


def ones(*shape, dtype=jnp.float32) -> jax.Array:
    """Made by NumPy, for the same reason: modules that tests import run no program."""
    return jax.device_put(np.ones(shape, dtype))


def bernoulli(seed, probability: float, shape) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).random(shape) < probability)


def naive_logits(query, key, mask=None):
    """`(batch, heads, q, k)` in float64, hidden pairs at -inf."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    return logits if mask is None else np.where(mask, logits, -np.inf)


def differ(one, other, share: float = 0.01) -> bool:
    """Whether every number differs from its counterpart, by more than this share.

    The share is far above every tolerance, so that a test that passes with one fails
    with the other.
    """
    return not np.isclose(one, other, rtol=share, atol=0).any()


def are_unlike(heads, share: float = 0.01) -> bool:
    """Whether all numbers of a row differ, so that none can stand for another."""
    row = np.sort(heads, axis=-1)
    return differ(row[..., 1:], row[..., :-1], share)


def first_that(distinguishes, draw):
    """The first draw, of seeds 0, 1, ..., that distinguishes right from wrong.

    Most draws do not: the largest logit of a head is a visible one, whatever the mask.
    """
    return next(drawn for drawn in map(draw, range(1000)) if distinguishes(drawn))


def randomize(tree, seed: int = 0, scale: float = 1.0):
    """The same tree with normal entries everywhere, so that no bias is zero."""
    leaves, treedef = jax.tree.flatten(tree)
    fresh = [
        normal((seed, i), *x.shape, dtype=x.dtype, scale=scale)
        for i, x in enumerate(leaves)
    ]
    return treedef.unflatten(fresh)


def linen_variables(model, *args, seed: int = 0, **kwargs):
    """What `model.init` returns, with normal entries; nothing is compiled for it."""
    init = functools.partial(model.init, **kwargs)
    return randomize(jax.eval_shape(init, jax.random.key(0), *args), seed)


def run_script(*arguments, check: bool = True) -> subprocess.CompletedProcess:
    """Python, as a user runs it, but compiled fast."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=check,
        env=script_environment(),
    )


def script_environment() -> dict[str, str]:
    """That of these tests, with their cache of compiled programs."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


class LinenAttention(nn.Module):
    """Attention whose output stays out of the residual: every layer sees `x`."""

    heads: int = 4
    options: tuple = ()

    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            attention_fn=mc.attention_fn,
            name="attention",
            **dict(self.options),
        )
        attention(x, x, mask=nn.make_causal_mask(x[..., 0]), sow_weights=True)
        return x, None


class LinenModel(nn.Module):
    """Two attention layers, one after the other."""

    options: tuple = ()

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x, _ = LinenAttention(options=self.options, name=f"layer_{i}")(x)
        return x


class ScannedModel(nn.Module):
    """Three scanned layers of attention, optionally rematerialised."""

    remat: bool = True

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(LinenAttention) if self.remat else LinenAttention
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scanned(name="layers")(x, None)
        return x


def nnx_attention(heads=4, width=16, rngs=None, **options):
    """Flax's own layer, which records its logits."""
    options = {"decode": False, "attention_fn": mc.attention_fn} | options
    return nnx.MultiHeadAttention(heads, width, rngs=rngs or nnx.Rngs(0), **options)


class NNXModel(nnx.Module):
    """Two attention layers on the same input."""

    def __init__(self, rngs, heads=4, kv_heads=None, **options):
        options |= {"rngs": rngs, "num_kv_heads": kv_heads}
        self.layers = nnx.List([nnx_attention(heads, **options) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            layer(x, mask=nnx.make_causal_mask(x[..., 0]), sow_weights=True)
        return x


def linen_stats(model, params, x):
    """Runs a Linen model and returns what `attention_fn` recorded."""
    _, recorded = model.apply({"params": params}, x, mutable=["intermediates"])
    return recorded["intermediates"]


def as_pure(tree):
    """`nnx.as_pure`, which Flax has since 0.12.7."""

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    return jax.tree.map(
        lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable
    )


def nnx_stats(model, x):
    _, stats = nnx.capture(model, nnx.Intermediate)(x)
    return stats


def nnx_model(**options):
    """An `NNXModel` with normal entries; nothing is compiled for it."""
    model = nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0), **options))
    graph, state = nnx.split(model)
    return nnx.merge(graph, randomize(state))


def step_of(tx):
    """A step of training: the params and the state after an update."""

    def step(gradients, state, params, **extra):
        updates, state = tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx, params, gradients, **extra):
    """The params and the state after a step for each of the gradients."""
    state, step = tx.init(params), jax.jit(step_of(tx))
    for each in gradients:
        params, state = step(each, state, params, **extra)
    return params, state


def updates_of(tx, gradients, params=None, **extra):
    """The last updates and the state after steps in which the params stay."""
    gradients = list(gradients)
    start = gradients[0] if params is None else params
    state, update, updates = tx.init(start), jax.jit(tx.update), None
    for each in gradients:
        updates, state = update(each, state, params, **extra)
    return updates, state


def first_update(tx, gradients, params=None, **extra):
    state = tx.init(gradients if params is None else params)
    return tx.update(gradients, state, params, **extra)[0]


def clip_at_rest(attention=None, model=None):
    """An update of zeros after `qk_clip`, compiled for all thresholds and shares."""

    @jax.jit
    def step(params, stats, threshold, alpha=0.5):
        tx = mc.qk_clip(threshold, alpha=alpha, model=model, attention=attention)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return step_of(tx)(zeros, tx.init(params), params, attention_stats=stats)

    return step


def query_and_key(*shape, draw=ones):
    """Kernels of a layer of attention as Flax names them, one for both."""
    kernel = draw(*shape)
    return {"query": {"kernel": kernel}, "key": {"kernel": kernel}}


def leaf_pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


def mesh_of(kind=AxisType.Auto, **sizes):
    """`mesh_of(data=2, tensor=4)`"""
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def on_mesh(mesh, specs):
    """The shardings of leaves from their specs."""
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def assert_where(tree, shardings) -> None:
    for x, sharding in leaf_pairs(tree, shardings):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.shape, x.sharding)


def largest(stats):
    """All heads of all layers in one row."""
    return np.concatenate([np.ravel(s) for s in jax.tree.leaves(stats)])


def of_heads(numbers, kind, layer):
    """Of `mc.scalars(..., heads=True)`, those of a layer: `(*stack, heads)`, or NaN."""
    found = {}
    for name, number in numbers.items():
        if match := re.fullmatch(rf"{kind}/{layer}/(.*?)head_(\d+)", name):
            found[tuple(map(int, f"{match[1]}{match[2]}".split("/")))] = number
    array = np.full(np.max(list(found), axis=0) + 1, np.nan)
    for at, number in found.items():
        array[at] = number
    return array


def inputs(seed: int = 9, shape=(2, 6, 16)):
    return normal(seed, *shape)


def head_apart(muon, rate, weight_decay):
    """The recipe of docs/tuning_rates.md: the output head by an AdamW of its own."""

    def head_or_rest(params):
        labels = mc.param_labels(params)
        return jax.tree.map(lambda x: "head" if x == "head" else "rest", labels)

    adamw = optax.adamw(rate, b2=0.95, weight_decay=weight_decay)
    return optax.partition({"rest": muon, "head": adamw}, head_or_rest)
