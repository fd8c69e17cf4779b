"""Models as libraries have them: verdicts, logits and clips, by an expert's account."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few
from library_models import MODELS

import muonclip_jax as mc


def ignored(logits):
    pass


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *parts, name = path.split("/")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def flattened(tree, at=()):
    """`None` is a leaf, too."""
    if not isinstance(tree, dict):
        return {"/".join(at): tree}
    return {k: x for n in tree for k, x in flattened(tree[n], (*at, n)).items()}


def loss_of(model):
    return lambda tree, *args: model.loss(flattened(tree), ignored, *args)


def letters(numbers, rank):
    """A verdict as the models write it."""
    sides = {"i": numbers.reduction_axis, "o": numbers.output_axis}
    found = ["s"] * rank
    for letter, axes in sides.items():
        for axis in (axes,) if isinstance(axes, int) else axes:
            found[axis] = letter
    return "".join(found)


def reader(model):
    """From params to `[(heads,)]`, of one call after the other, by the model itself."""
    rows = []

    def record(logits):
        largest = logits.max((0, -2, -1)).ravel()
        jax.debug.callback(lambda x: rows.append(np.asarray(x)), largest, ordered=True)

    run = jax.jit(lambda params: model.loss(params, record, *model.args))

    def largest_logits(params):
        rows.clear()
        jax.block_until_ready(run(params))
        jax.effects_barrier()
        return list(rows)

    return largest_logits


def by_layer(model, rows):
    """A layer that a scan runs has a row for each trip, one that runs twice the larger.

    All layers of a model here are of one of these kinds.
    """
    if not model.runs_once:
        return {model.layers[0]: np.max(rows, 0)}
    if len(rows) > len(model.layers):
        return {model.layers[0]: np.stack(rows)}
    return dict(zip(model.layers, rows, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_what_an_expert_says(name):
    model = MODELS[name]
    params = nested(model.values())
    reading = mc.read_model(loss_of(model), params, *model.args)
    assert not reading.unknown and not reading.refused
    labels = flattened(reading.labels)
    numbers = flattened(reading.dimension_numbers)
    found = {
        path: labels[path]
        if numbers[path] is None
        else letters(numbers[path], len(shape))
        for path, (shape, _) in model.params.items()
    }
    assert found == {path: verdict for path, (_, verdict) in model.params.items()}
    assert sorted(layer.path for layer in reading.attention) == sorted(model.layers)
    table = reading.table(collapse=False)
    assert all(path in table for path in model.params)


WITH_ATTENTION = [name for name in MODELS if MODELS[name].layers]


@pytest.mark.more
@pytest.mark.parametrize("name", few(WITH_ATTENTION, "gpt_neox"))
def test_recorded_and_clipped(name):
    model = MODELS[name]
    params = model.values()
    loss = loss_of(model)
    step = jax.jit(jax.value_and_grad(mc.record_attention(loss), has_aux=True))
    (value, stats), grads = step(nested(params), *model.args)
    plain = jax.jit(jax.value_and_grad(loss))(nested(params), *model.args)
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain[1]))
    for new, old in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6 * scale)

    largest_logits = reader(model)
    before = by_layer(model, largest_logits(params))
    seen = {f"{k}/max_logits".lstrip("/"): rows for k, rows in before.items()}
    assert set(flattened(stats)) == set(seen)
    for path, row in flattened(stats).items():
        np.testing.assert_allclose(row, seen[path], rtol=1e-5)
    if not model.runs_once:
        return  # the second call sees what a clip makes of the first
    reading = mc.read_model(loss, nested(params), *model.args)
    for layer, rows in before.items():
        for at in np.ndindex(rows.shape[:-1]):
            # A layer alone, since the next sees what a clip makes of this one's output.
            tau = float(np.median(rows[at]))
            assert 0 < tau < rows[at].max(), "draw other numbers"
            alone = {k: np.zeros_like(x) for k, x in seen.items()}
            alone[f"{layer}/max_logits"][at] = rows[at]
            clipped = mc.clip_qk(nested(params), nested(alone), tau, model=reading)
            after = by_layer(model, largest_logits(flattened(clipped)))
            expected = np.minimum(rows[at], tau)
            if model.shares:
                expected = rows[at] * tau / rows[at].max()
            np.testing.assert_allclose(after[layer][at], expected, rtol=1e-4)
