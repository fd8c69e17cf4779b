"""A library's model, untouched: read, recorded, clipped, and compared with its own.

The library's own softmax says what the logits are (`clipping.watched`), so that nothing
here depends on what a reading found.
"""

import re

import clipping
import jax
import jax.numpy as jnp
import numpy as np

import muonclip_jax as mc


def check_model(run, params, modules, may_change, numbers, *, shared=False, **where):
    """Reads the forward pass `run(params)`, and checks all that the reading claims.

    - `modules`: the paths of the attention layers, in order.
    - `may_change`: as of `clipping.check_clip`, the entries that a clip may change.
    - `numbers`: by regular expression for the end of a path, the axes `(inputs,
        outputs)` from the end, or `None` for AdamW.
    - `shared`: the heads of a layer follow the largest of them.
    - `where`: how `clipping.reader` finds the library's softmax.
    """

    def loss(params):
        logits = run(params).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    reading = mc.read_model(loss, params)
    assert not reading.unknown and not reading.refused, str(reading)
    assert [layer.path for layer in reading.attention] == modules
    _check_numbers(params, reading.dimension_numbers, numbers)
    recorded = _recorded(loss, params)
    # Libraries jit parts of their models: no cached trace may pass the watch by.
    jax.clear_caches()
    logits = clipping.reader(run, modules, **where)
    clipping.check_statistics(recorded, logits(params))
    clipping.check_clip(params, logits, may_change, shared=shared, model=reading)


def _recorded(loss, params):
    """The statistics; value and gradients are those of the loss."""
    plain = jax.jit(jax.value_and_grad(loss))(params)
    step = jax.jit(jax.value_and_grad(mc.record_attention(loss), has_aux=True))
    (value, stats), grads = step(params)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain[1]))
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    for new, old in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6 * largest)
    return stats


def _check_numbers(params, found, expected):
    leaves, treedef = jax.tree.flatten(params)
    met = set()
    rows = zip(
        clipping.paths_of(params), treedef.flatten_up_to(found), leaves, strict=True
    )
    for path, answer, leaf in rows:
        (held,) = [x for x in expected if re.search(f"(^|/){x}$", path)]
        met.add(held)
        if answer is not None:
            sides = (answer.reduction_axis, answer.output_axis)
            answer = tuple(_from_the_end(side, leaf.shape) for side in sides)
        wanted = expected[held]
        if wanted is not None:
            wanted = tuple(_from_the_end(side, leaf.shape) for side in wanted)
        assert answer == wanted, (path, answer, wanted)
    assert met == set(expected)


def _from_the_end(axes, shape):
    """Axes of size 1 hold nothing, on whichever side they are."""
    axes = (axes,) if isinstance(axes, int) else axes
    counted = (axis % len(shape) - len(shape) for axis in axes)
    return tuple(sorted(axis for axis in counted if shape[axis] != 1))
