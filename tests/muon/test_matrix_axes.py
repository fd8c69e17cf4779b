"""Leaves of several matrices, or of one for each head, against some cut by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    few,
    first_update,
    normal,
    of_newton_schulz,
    polynomial_of,
    tolerance,
    updates_of,
)
from optax.contrib import MuonDimensionNumbers as Numbers
from pieces import by_hand, Case, CASES, leaf_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

SCALES = {
    0.2: lambda m, n: 0.2 * np.sqrt(max(m, n)),
    None: lambda m, n: np.sqrt(max(1, n / m)),
    "mup": lambda m, n: np.sqrt(n / m),
}
ALL = [(name, rms) for rms in SCALES for name in CASES]


def naive(case: Case, leaf, rms=0.2):
    def orthogonalized(matrix):
        found = polynomial_of(matrix, mc.NS_COEFFS["keller"])
        return SCALES[rms](*matrix.shape) * found

    return by_hand(case, leaf, orthogonalized)


@pytest.mark.parametrize(
    "name, rms", few(ALL, ("fused, value whole", 0.2), ("heads of two sizes", "mup"))
)
def test_each_piece_is_a_matrix_of_its_own(name, rms):
    case = CASES[name]
    params = {"w": leaf_of(case, 0)}
    axes = {"w": case.axes}
    tx = mc.scale_by_muon(dimension_numbers=axes, beta=0.0, consistent_rms=rms)
    found, _ = updates_of(tx, [params])
    expected = {"w": naive(case, params["w"], rms)}
    assert_close(found, expected, of_newton_schulz(max(case.shape)))


@pytest.mark.more
def test_all_of_them_in_one_tree():
    """Pieces of one shape share a stack, whichever leaves they come from."""
    params = {name: leaf_of(case, i) for i, (name, case) in enumerate(CASES.items())}
    axes = {name: case.axes for name, case in CASES.items()}
    tx = mc.scale_by_muon(dimension_numbers=axes, beta=0.0)
    found, _ = updates_of(tx, [params])
    expected = {name: naive(case, params[name]) for name, case in CASES.items()}
    assert_close(found, expected, of_newton_schulz(96))


def neurons_by_hand(matrix, v, b2=0.9):
    """NorMuon's step (arXiv:2510.05491, Algorithm 1) along the longer side."""
    m, n = matrix.shape
    mean = np.square(matrix).mean(0 if m <= n else 1, keepdims=True)
    v = b2 * v + (1 - b2) * mean
    divided = matrix / np.sqrt(v)
    return divided * np.linalg.norm(matrix) / np.linalg.norm(divided), v


@pytest.mark.parametrize("name", few(CASES, "fused, value whole", "latent"))
def test_neurons_of_each_piece(name):
    case, axes = CASES[name], {"w": CASES[name].axes}
    tx = mc.normalize_neurons(0.9, dimension_numbers=axes)
    leaves = [leaf_of(case, seed) for seed in range(2)]
    found, _ = updates_of(tx, [{"w": leaf} for leaf in leaves])
    # The same matrices come by in the same order in both steps.
    means: list = []
    by_hand(case, leaves[0], lambda x: means.append(neurons_by_hand(x, 0.0)[1]) or x)
    before = iter(means)
    expected = by_hand(case, leaves[1], lambda x: neurons_by_hand(x, next(before))[0])
    assert_close(found, {"w": expected}, tolerance(jnp.float32, size=200, condition=4))


def test_momentum_in_8_bits_and_cautious_decay_are_of_the_whole_leaf():
    case = CASES["fused, value whole"]
    params, grads = ({"w": leaf_of(case, seed)} for seed in range(2))
    options = dict(
        dimension_numbers={"w": case.axes},
        orthogonalizer=mc.NewtonSchulz(steps=2),
        beta=0.5,
    )

    def updated(**how):
        tx = mc.muon(0.1, **options, **how)
        return updates_of(tx, [grads] * 2, params)[0]["w"]

    coded, cautious = (
        updated(mu_dtype=dtype, cautious_weight_decay=True) for dtype in ("int8", None)
    )
    # Of a code of 8 bits, on the scale of the largest entry of a row or a column.
    error = np.linalg.norm(coded - cautious) / np.linalg.norm(cautious)
    assert 0 < error < 0.05
    decays = np.sign(-cautious) == np.sign(params["w"])
    everywhere = updated()
    np.testing.assert_allclose(cautious[decays], everywhere[decays], rtol=0, atol=1e-6)


def wrong(**how):
    return lambda: mc.MatrixAxes(0, 1, **how)


@pytest.mark.parametrize(
    "make, says",
    [
        (wrong(parts=()), "parts must be a tuple of sizes"),
        (wrong(parts=(4, 0)), "a part must be at least 1"),
        (wrong(parts=(4, 4), head_dim=(2,)), "one entry for each of parts"),
        (wrong(parts=(4, 4), head_dim=3), "head_dim=3 does not divide the part of 4"),
        (wrong(head_dim=2.0), "head_dim must be a whole number"),
        (wrong(groups=0), "groups must be at least 1"),
    ],
)
def test_wrong_sizes_at_construction(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    "axes, says",
    [
        (
            mc.MatrixAxes(0, 1, parts=(4, 5)),
            r"'w'.*the parts \[4, 5\] are 9 outputs, but the leaf has 12",
        ),
        (mc.MatrixAxes(0, 1, head_dim=5), "'w'.*head_dim=5 does not divide the 12"),
        (mc.MatrixAxes(1, (0, 2), head_dim=2), "'w'.*adjacent axes, in order"),
        (mc.MatrixAxes(1, 3), "'w'.*axis 3 is out of range"),
    ],
)
def test_what_does_not_fit_a_leaf_at_init(axes, says):
    rank = 3 if axes.reduction_axis == 1 else 2
    params = {"w": jnp.ones((8, 12, 2)[:rank])}
    with pytest.raises(ValueError, match=says):
        mc.muon(0.1, dimension_numbers={"w": axes}).init(params)


PARAMS = {
    "attn": {
        "query": {"kernel": normal(0, 8, 2, 4)},
        "key": {"kernel": normal(1, 8, 2, 4)},
        "value": {"kernel": normal(2, 8, 2, 4)},
        "out": {"kernel": normal(3, 2, 4, 8)},
    },
    "moe": {"wi": normal(4, 3, 8, 16)},
}
RULES = {"moe/wi": Numbers(-2, -1)}
STATS = {"attn": {"max_logits": jnp.ones(2)}}


def update_of(make, params=PARAMS, **options):
    extra = {"attention_stats": STATS} if make is mc.muonclip else {}
    return first_update(make(0.1, **options), params, params, **extra)


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
def test_next_to_patterns(make):
    found = update_of(make, per_head=True, dimension_numbers=RULES)
    by_hand = functools.partial(
        mc.flax_dimension_numbers, per_head=True, dimension_numbers=RULES
    )
    expected = update_of(make, dimension_numbers=by_hand)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    whole = update_of(make, per_head=False, dimension_numbers=RULES)
    # Other stacks are multiplied in another order: the same matrices differ in bits.
    far = lambda a, b: bool((jnp.abs(a - b) > 1e-3 * jnp.abs(b).max()).any())  # noqa: E731
    changed = jax.tree.map(far, found, whole)
    assert changed["attn"]["value"]["kernel"] and not changed["moe"]["wi"]
    assert not changed["attn"]["out"]["kernel"]


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
def test_by_default_where_heads_are_known(make):
    found = update_of(make, dimension_numbers=RULES)
    expected = update_of(make, per_head=True, dimension_numbers=RULES)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_by_default_what_is_given_stays():
    given = RULES | {"attn/query": Numbers(0, (1, 2))}
    described = dict(attention=mc.flax_attention_layers)
    for options in ({}, described):
        found = update_of(mc.muonclip, dimension_numbers=given, **options)
        heads, whole = (
            update_of(mc.muonclip, per_head=x, dimension_numbers=RULES)
            for x in (True, False)
        )
        check = functools.partial(np.testing.assert_allclose, atol=1e-5)
        for name, expected in (("query", whole), ("key", heads)):
            kernels = found["attn"][name], expected["attn"][name]
            jax.tree.map(check, *kernels)
    # Numbers of all leaves leave nothing to find: True is refused, the default is not.
    everything = functools.partial(mc.flax_dimension_numbers, dimension_numbers=RULES)
    found = update_of(mc.muon, dimension_numbers=everything)
    whole = update_of(mc.muon, per_head=False, dimension_numbers=RULES)
    jax.tree.map(check, found, whole)


def test_of_described_layers():
    heads = {"attn": {"q": normal(0, 2, 8, 4), "k": normal(1, 2, 8, 4)}}
    query, key = ((mc.HeadLeaf(name, 3, axis=-3),) for name in "qk")
    options = {"attention": [mc.AttentionLayer("attn", query, key)], "params": heads}
    joined, each = ({"attn": Numbers(*x)} for x in (((-3, -2), -1), (-2, -1)))
    found = update_of(mc.muonclip, per_head=True, dimension_numbers=joined, **options)
    expected = update_of(mc.muonclip, dimension_numbers=each, **options)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_not_next_to_numbers_of_all_leaves():
    numbers = mc.flax_dimension_numbers(PARAMS, dimension_numbers=RULES, per_head=True)
    with pytest.raises(ValueError, match="per_head=True has no effect"):
        mc.muon(0.1, per_head=True, dimension_numbers=numbers).init(PARAMS)
