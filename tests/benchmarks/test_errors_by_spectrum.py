"""Errors of Newton-Schulz as the benchmark has them, and the matrices it takes."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from accuracy import Case, FORM_NAMES
from evidence.texts import Text
from flax import nnx
from helpers import matrix_of
from spectra import MODEL, momentum, schedule, synthetic

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def test_errors_of_the_exact_answer_are_those_of_the_polynomial():
    x = matrix_of(np.geomspace(1, 1e-4, 24), 24, 40).astype(np.float32)
    case = Case(x, "keller")
    exact = case.errors_of(case.exact)
    assert (exact.relative, exact.largest) == (0, 0)
    assert exact.distances == pytest.approx(case.polynomial_distances())
    off = case.errors_of(1.5 * case.exact)
    assert off.relative == pytest.approx(0.5)
    assert off.norm == pytest.approx(1.5 * exact.norm)


def test_polar_factor_has_no_distance_on_the_significant_singular_vectors():
    x = matrix_of([1, 0.5, 0.1, 5e-3], 6, 9).astype(np.float32)
    case = Case(x, "keller")
    three = case.left[:, :3] @ case.right[:3]
    assert case.errors_of(three).distances == pytest.approx((0, 1))


@pytest.mark.more
def test_lower_precision_shows_in_the_errors():
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    errors = dict(zip(FORM_NAMES, Case(x, "quintic").errors(), strict=True))
    assert errors["standard float32"].relative < 1e-5
    assert errors["gram float32"].relative < 1e-4
    assert 1e-3 < errors["standard bfloat16"].relative < 0.1


def test_spectra_are_what_they_are_called():
    matrices = synthetic()
    singular = {k: np.linalg.svd(x, compute_uv=False) for k, x in matrices.items()}
    assert all(x.shape == (256, 1024) for x in matrices.values())
    assert singular["1 to 1e-4"][-1] == pytest.approx(1e-4, rel=0.01)
    assert singular["power law 1/k"][9] == pytest.approx(0.1, rel=1e-3)
    assert singular["rank 10"][9] > 0.99 and singular["rank 10"][10] < 1e-5


@pytest.mark.more
def test_momentum_is_that_of_the_example(monkeypatch, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(np.random.default_rng(0).bytes(1 << 15))
    small = MODEL._replace(layers=1, width=16, context=16)
    ours = momentum(2, small, Text(str(file), validation=15))
    theirs = momentum_of_example(monkeypatch, file, "--width=16", "--context=16")
    assert [name.split()[0] for name in ours] == list(theirs)
    for x, kernel in zip(ours.values(), theirs.values(), strict=True):
        expected = np.asarray(kernel).reshape(x.shape)
        np.testing.assert_allclose(x, expected, atol=1e-5 * abs(expected).max())


def momentum_of_example(monkeypatch, file, *options, steps=2):
    # The benchmark's rates are those of the example when it was first run.
    options = "--layers=1", "--learning-rate=0.02", *options
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *options])
    args, corpus = train_lm.parse_args(), train_lm.Corpus(file)
    model = train_lm.make_model(args)
    # The benchmark's momentum has one beta, whatever the default is.
    settings = dict(beta=0.95, per_head=False, adam_learning_rate=schedule(6e-3))
    monkeypatch.setattr(train_lm.mc, "muon", functools.partial(mc.muon, **settings))
    tx = train_lm.make_optimizer("muon", args)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step in range(steps):
        batch = corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
        train_lm.train_step(model, optimizer, jnp.asarray(batch))

    def is_muon(node):
        return isinstance(node, mc.ScaleByMuonState)

    nodes = jax.tree.leaves(optimizer.opt_state, is_leaf=is_muon)
    (state,) = filter(is_muon, nodes)
    block = nnx.to_pure_dict(state.mu)["blocks"][0]
    layers = {"query": block["attention"]["query"], "up": block["up"]}
    return {k: v["kernel"] for k, v in (layers | {"down": block["down"]}).items()}


def test_an_overflow_is_no_error_of_the_script():
    case = Case(np.eye(3, 5, dtype=np.float32), "keller")
    assert np.isnan(case.errors_of(np.full((3, 5), np.inf)).relative)
