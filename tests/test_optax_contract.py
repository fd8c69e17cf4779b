"""Optax's own contributor suite, driven over our factories: a drift detector.

`optax.contrib._common_test` is private and ships with the wheel. Its absl-generated
methods keep the original in `__wrapped__`; each of the seven is run with our factory
in place of the look-up by name.
"""

import inspect

import jax
import optax
import pytest
from helpers import few
from optax.contrib import _common_test as common
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def _by_rank(params):
    """Muon on rank 2 and, as the first axes of the suite's rank-3 leaf, on rank 3."""
    return jax.tree.map(
        lambda p: MuonDimensionNumbers(-2, -1) if p.ndim > 1 else None, params
    )


def _with_empty_stats(tx):
    def update(updates, state, params=None, **extra):
        return tx.update(updates, state, params, attention_stats={}, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def muon(learning_rate: optax.ScalarOrSchedule, *, weight_decay=0.0, beta=0.95):
    return mc.muon(
        learning_rate,
        weight_decay=weight_decay,
        beta=beta,
        consistent_rms=None,
        dimension_numbers=_by_rank,
    )


def muonclip(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay=0.0,
    threshold=100.0,
    alpha=0.5,
):
    tx = mc.muonclip(
        learning_rate,
        weight_decay=weight_decay,
        threshold=threshold,
        alpha=alpha,
        consistent_rms=None,
        dimension_numbers=_by_rank,
    )
    return _with_empty_stats(tx)


def qk_clip(learning_rate: optax.ScalarOrSchedule, *, threshold=100.0, alpha=0.5):
    tx = optax.chain(optax.adam(learning_rate), mc.qk_clip(threshold, alpha=alpha))
    return _with_empty_stats(tx)


FACTORIES = {"muon": muon, "muonclip": muonclip, "qk_clip": qk_clip}
SETTINGS = dict(
    opt_kwargs={"learning_rate": 1e-2}, wrapper_name=None, wrapper_kwargs=None
)
BODIES = {
    method.__wrapped__.__name__: method.__wrapped__
    for method in vars(common.ContribTest).values()
    if hasattr(method, "__wrapped__")
}
DTYPES = {
    "test_preserve_dtype": ("bfloat16", "float32"),
    "test_gradient_accumulation": ("bfloat16", "float32"),
    "test_state_shape_dtype_shard_stability": (
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ),
}
TARGETS = (
    "_setup_parabola",
    "_setup_rosenbrock",
    "_setup_matrix_parabola",
    "_setup_mixed_tensor_target",
)


def _cases():
    for body in sorted(BODIES):
        if body == "test_optimizers":
            for target in TARGETS:
                yield body, {"target": getattr(common, target), "dtype": "float32"}
        elif body == "test_optimizers_accept_extra_args":
            yield body, {"wrap": False}
        else:
            for dtype in DTYPES.get(body, (None,)):
                yield body, {} if dtype is None else {"dtype": common.jnp.dtype(dtype)}


@pytest.mark.parametrize("name", few(FACTORIES, "muonclip"))
@pytest.mark.parametrize("body, options", list(_cases()))
def test_optax_suite(name, body, options, monkeypatch):
    if (
        "opt_name"
        not in inspect.signature(BODIES[body], follow_wrapped=False).parameters
    ):
        pytest.skip("Optax before 0.2.8 hides it in variants of chex")
    monkeypatch.setattr(common, "_get_opt_factory", FACTORIES.__getitem__)
    BODIES[body](common.ContribTest(), opt_name=name, **SETTINGS, **options)


def test_all_seven_properties_are_driven():
    assert len(BODIES) == 7
