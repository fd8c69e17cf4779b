"""Every attention in use: the next forward gives min(S, tau), and needs every leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_zoo import CASES, GEMMA, HEADS, WIDTH
from flax import nnx
from helpers import (
    clip_at_rest,
    inputs,
    largest,
    linen_stats,
    linen_variables,
    more,
    nnx_attention,
    randomize,
)
from layers import latent_layer
from trees import tree_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


@functools.cache
def setup(case):
    model = CASES[case]
    params = linen_variables(model, inputs(), seed=1)["params"]

    def run(params, x):
        return model.apply({"params": params}, x)

    reading = mc.read_model(run, params, inputs())
    record = jax.jit(lambda p: mc.record_attention(run)(p, inputs())[1])

    @jax.jit
    def measure(params):
        return linen_stats(model, params, inputs())

    logits = largest(measure(params))
    return params, measure, record, reading, float(np.median(logits[logits > 0]))


@functools.cache
def clip_of(case):
    *_, reading, _ = setup(case)
    return clip_at_rest(model=reading)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alpha", [more(0.0), more(0.25), 0.5, more(1.0)])
def test_next_forward_gives_min_of_logit_and_threshold(case, alpha):
    params, measure, record, _, tau = setup(case)
    before = largest(measure(params))
    np.testing.assert_allclose(largest(record(params)), before, rtol=1e-5)
    assert (before > tau).any() and (before <= tau).any()
    clipped, _ = clip_of(case)(params, record(params), tau, alpha)
    after = largest(measure(clipped))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case != "Gemma"])
def test_forgetting_any_one_part_misses_the_threshold(case):
    params, measure, record, reading, tau = setup(case)
    before = largest(measure(params))
    (layer,) = reading.attention
    shared = any(w in case for w in ("grouped", "multi-query"))
    forgotten = 0
    for role in ("query", "rotary_query", *(() if shared else ("key",))):
        leaves = getattr(layer, role)
        for i in range(len(leaves)):
            poorer = layer._replace(**{role: leaves[:i] + leaves[i + 1 :]})
            if not poorer.key or not poorer.query:
                continue  # a layer without one of them is refused, see below
            forgotten += 1
            clipped = mc.clip_qk(params, record(params), tau, attention=[poorer])
            after = largest(measure(clipped))
            error = np.abs(after / np.minimum(before, tau) - 1).max()
            assert error > 1e-3, (role, leaves[i])  # ten times the bound above
    assert forgotten > 0


@pytest.mark.parametrize("role", ["query", "key"])
def test_a_layer_without_query_or_key_is_refused(role):
    params = {"q_einsum": jnp.ones((4, 16, 8)), "kv_einsum": jnp.ones((2, 4, 16, 8))}
    layer, stats = GEMMA._replace(**{role: ()}), {"max_logits": jnp.ones(4)}
    with pytest.raises(ValueError, match=f"names no {role}"):
        mc.clip_qk(params, stats, attention=[layer])


def test_latent_attention_leaves_the_rest_alone():
    params, _, record, reading, tau = setup("latent")
    after = mc.clip_qk(params, record(params), tau, model=reading)
    for name in ("wq_a", "q_norm", "wkv_a", "kv_norm"):
        jax.tree.map(np.testing.assert_array_equal, after[name], params[name])
    before, after = (x["wkv_b"]["kernel"][..., 4:] for x in (params, after))
    np.testing.assert_array_equal(after, before)


def test_torchtitan_figures_for_latent_attention():
    """S = [100, 400], tau 200, alpha 1/4: .5^.25 nope, .5 rope, .5^.75 key, value 1."""
    params = tree_of({"wq_b/kernel": (3, 2, 3), "wkv_b/kernel": (3, 2, 4)})
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    stats, layer = {"max_logits": jnp.asarray([100.0, 400.0])}, latent_layer("", 2)
    after = mc.clip_qk(params, stats, 200.0, alpha=0.25, attention=[layer])
    query, key = (after[name]["kernel"] for name in ("wq_b", "wkv_b"))
    assert (query[:, 0] == 1).all() and (key[:, 0] == 1).all()
    np.testing.assert_allclose(query[0, 1], [0.840896, 0.840896, 0.5], rtol=1e-5)
    np.testing.assert_allclose(key[0, 1], [0.594604, 0.594604, 1, 1], rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("scanned", [False, True])
def test_layers_stacked_by_nnx(axis, scanned):
    """`nnx.vmap` over the layers, and `nnx.scan` through them, each its own gamma."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx_attention(HEADS, WIDTH, rngs)

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
