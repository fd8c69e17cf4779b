"""Attention layers in NNX: stacked, scanned, or with flat kernels of their own."""

import functools

import jax
import numpy as np
import pytest
from attention_zoo import HEAD_DIM, HEADS, WIDTH
from flax import nnx
from helpers import inputs, largest, randomize

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
    (after,) = jax.tree.leaves(
        measure(mc.clip_qk(state, measure(state), tau, attention=find))
    )
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


def test_nnx_modules_with_flat_kernels():
    class Flat(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.Linear(WIDTH, HEADS * HEAD_DIM, rngs=rngs)
            self.k_proj = nnx.Linear(WIDTH, HEADS * HEAD_DIM, rngs=rngs)

        def __call__(self, x):
            def heads(y):
                return y.reshape(*y.shape[:2], HEADS, HEAD_DIM)

            query, key = heads(self.q_proj(x)), heads(self.k_proj(x))
            self.sow(nnx.Intermediate, "max_logits", mc.max_logits(query, key))
            return jax.nn.dot_product_attention(query, key, key)

    model = nnx.eval_shape(lambda: Flat(nnx.Rngs(0)))
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state := randomize(state))
    reading = mc.read_model(Flat.__call__, model, inputs())
    _, stats = mc.record_attention(Flat.__call__)(model, inputs())

    def measure(s):
        return nnx.capture(nnx.merge(graph, s), nnx.Intermediate)(inputs())[1]

    before = largest(measure(state))
    np.testing.assert_allclose(largest(stats), before, rtol=1e-5)
    tau = float(np.median(before))
    after = largest(measure(mc.clip_qk(state, stats, tau, model=reading)))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)
