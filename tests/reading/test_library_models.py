"""Models as libraries have them: verdicts, logits and clips, by an expert's account."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numbers import by_path, label_faults, largest, verdict_of
from helpers import few
from library_models import MODELS

import muonclip_jax as mc


@pytest.mark.parametrize("name", MODELS)
def test_what_an_expert_says(name):
    model = MODELS[name]
    reading = mc.read_model(model.fun, model.params, *model.args)
    assert not reading.unknown and not reading.refused
    assert label_faults(model, reading) == []
    assert sorted(layer.path for layer in reading.attention) == sorted(model.layers)
    table = reading.table(collapse=False)
    assert all(path in table for path in by_path(model.params))


WITH_ATTENTION = [name for name in MODELS if MODELS[name].layers]


@pytest.mark.more
@pytest.mark.parametrize("name", few(WITH_ATTENTION, "gpt_neox"))
def test_recorded_and_clipped(name):
    model = MODELS[name]
    params, args = model.params, model.args
    if name != "albert":  # its second call sees what a clip makes of the first
        verdict = verdict_of(model)
        assert not verdict.is_fault, f"{verdict.kind}: {verdict.why}"
    recorded = jax.value_and_grad(mc.record_attention(model.fun), has_aux=True)
    (value, stats), grads = jax.jit(recorded)(params, *args)
    plain = jax.jit(jax.value_and_grad(model.fun))(params, *args)
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain[1]))
    for new, old in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6 * scale)
    found = by_path(stats)
    assert found.keys() == {f"{path}/max_logits".lstrip("/") for path in model.layers}
    every = (
        np.sort(np.concatenate([np.ravel(row) for row in rows]))
        for rows in (found.values(), largest(model, params))
    )
    np.testing.assert_allclose(*every, rtol=1e-5)
