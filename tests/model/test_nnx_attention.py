"""Attention layers in NNX: stacked, scanned, or with flat kernels of their own."""

import functools

import jax
import numpy as np
import pytest
from attention_zoo import HEADS, WIDTH
from flax import nnx
from helpers import inputs, randomize

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("scanned", [False, True])
def test_layers_stacked_by_nnx(axis, scanned):
    """`nnx.vmap` over the layers, and `nnx.scan` through them, each its own gamma."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, attention_fn=mc.attention_fn, rngs=rngs
            )

        def __call__(self, x):
            self.attention(x, sow_weights=True)
            return x

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.split_rngs(splits=3)(
                nnx.vmap(Layer, in_axes=(0,), out_axes=STATE)
            )
            self.layers = make(rngs)

        def __call__(self, x):
            if scanned:
                step = nnx.scan(
                    lambda x, layer: layer(x),
                    in_axes=(nnx.Carry, STATE),
                    out_axes=nnx.Carry,
                )
                return step(x, self.layers)
            return nnx.vmap(Layer.__call__, in_axes=(STATE, None))(self.layers, x)

    STATE = nnx.StateAxes({nnx.Intermediate: 0, ...: axis})
    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    state = randomize(state)
    find = functools.partial(
        mc.flax_attention_layers, stack_axes={"layers": axis} if axis else {}
    )

    def measure(s):
        return nnx.capture(nnx.merge(graph, s), nnx.Intermediate)(inputs())[1]

    (before,) = jax.tree.leaves(measure(state))
    assert before.shape == (3, HEADS)
    tau = float(np.median(before))
    clipped = mc.clip_qk(state, measure(state), tau, attention=find)
    (after,) = jax.tree.leaves(measure(clipped))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)
