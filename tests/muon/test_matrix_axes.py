"""Leaves of several matrices: each is what a loop over matrices cut by hand makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, few, of_newton_schulz, polynomial_of, tolerance
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
    tx = mc.scale_by_muon(
        dimension_numbers={"w": case.axes}, beta=0.0, consistent_rms=rms
    )
    found, _ = jax.jit(tx.update)(params, tx.init(params))
    assert_close(
        found, {"w": naive(case, params["w"], rms)}, of_newton_schulz(max(case.shape))
    )


@pytest.mark.more
def test_all_of_them_in_one_tree():
    """Pieces of one shape share a stack, whichever leaves they come from."""
    params = {name: leaf_of(case, i) for i, (name, case) in enumerate(CASES.items())}
    axes = {name: case.axes for name, case in CASES.items()}
    tx = mc.scale_by_muon(dimension_numbers=axes, beta=0.0)
    found, _ = jax.jit(tx.update)(params, tx.init(params))
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
    state = tx.init({"w": leaves[0]})
    for leaf in leaves:
        found, state = jax.jit(tx.update)({"w": leaf}, state)
    # The same matrices come by in the same order in both steps.
    means: list = []
    by_hand(case, leaves[0], lambda x: means.append(neurons_by_hand(x, 0.0)[1]) or x)
    before = iter(means)
    expected = by_hand(case, leaves[1], lambda x: neurons_by_hand(x, next(before))[0])
    assert_close(found, {"w": expected}, tolerance(jnp.float32, size=200, condition=4))


def test_momentum_in_8_bits_and_cautious_decay_are_of_the_whole_leaf():
    case = CASES["fused, value whole"]
    params = {"w": leaf_of(case, 0)}
    grads = {"w": leaf_of(case, 1)}
    options = dict(
        orthogonalizer=mc.NewtonSchulz(steps=2), cautious_weight_decay=True, beta=0.5
    )
    updates = []
    for mu_dtype in ("int8", None):
        axes = {"w": case.axes}
        tx = mc.muon(0.1, dimension_numbers=axes, mu_dtype=mu_dtype, **options)
        state = tx.init(params)
        for _ in range(2):
            update, state = jax.jit(tx.update)(grads, state, params)
        updates.append(update["w"])
    # Of a code of 8 bits, on the scale of the largest entry of a row or a column.
    error = np.linalg.norm(updates[0] - updates[1]) / np.linalg.norm(updates[1])
    assert 0 < error < 0.05
    decays = np.sign(-updates[1]) == np.sign(params["w"])
    plain = mc.muon(
        0.1,
        dimension_numbers={"w": case.axes},
        orthogonalizer=mc.NewtonSchulz(steps=2),
        beta=0.5,
    )
    state = plain.init(params)
    for _ in range(2):
        everywhere, state = jax.jit(plain.update)(grads, state, params)
    np.testing.assert_allclose(
        updates[1][decays], everywhere["w"][decays], rtol=0, atol=1e-6
    )


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
