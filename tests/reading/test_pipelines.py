"""Layers on the stages of a pipeline, as MaxText runs them, against a loop of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal, tolerance
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

STAGES, REPEATS = 2, 2
MICROBATCHES, ROWS, LENGTH, WIDTH, HEADS, DEPTH = 3, 2, 3, 8, 2, 4
THRESHOLD = 3.45  # of four heads two are above
#: Logits of two layers, in float32: sums of 8 products, each of what came before.
SHARE = tolerance(jnp.float32, size=WIDTH, slopes=[2.0] * STAGES)


def layer(p, x):
    """Of rows of zeros, which a pipeline starts with, all logits are zero."""
    unit = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("btd,dhk->bthk", unit, p[name]) for name in "qkv")
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / DEPTH**0.5
    weights = jax.nn.softmax(logits)
    return x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["o"])


def params_of(*stack):
    heads = (WIDTH, HEADS, DEPTH)
    shapes = {"q": heads, "k": heads, "v": heads, "o": (HEADS, DEPTH, WIDTH)}
    return {
        name: normal(i, *stack, *shape, scale=0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }


def microbatches():
    return normal(9, MICROBATCHES, ROWS, LENGTH, WIDTH)


def looped(params, x):
    """Every layer on the whole batch, one after the other."""
    stack = params["q"].ndim - 3
    flat = jax.tree.map(lambda p: p.reshape(-1, *p.shape[stack:]), params)
    x = x.reshape(-1, LENGTH, WIDTH)
    for i in range(flat["q"].shape[0]):
        x = layer(jax.tree.map(lambda p, i=i: p[i], flat), x)
    return jnp.mean(x * x)


def constrained(x):
    return lax.with_sharding_constraint(x, P("stage"))


def rolled(params, x):
    """Stages by `vmap`, and what they pass on by a circular shift."""
    steps = MICROBATCHES + STAGES - 1

    def iteration(state, i):
        first = lax.dynamic_index_in_dim(x, jnp.minimum(i, MICROBATCHES - 1), 0)
        is_first = lax.broadcasted_iota(jnp.int32, state.shape, 0) == 0
        state = constrained(jnp.where(is_first, first, state))
        out = constrained(jax.vmap(layer, spmd_axis_name="stage")(params, state))
        return jnp.roll(out, 1, axis=0), out[-1]

    state = constrained(jnp.zeros((STAGES, *x.shape[1:])))
    _, found = lax.scan(iteration, state, jnp.arange(steps))
    return jnp.mean(found[STAGES - 1 :] ** 2)


def circular(params, x):
    """Each stage has a layer of every repeat, and takes the one that is due."""
    steps = MICROBATCHES * REPEATS + STAGES - 1

    def due(weights, repeat):
        return lax.dynamic_index_in_dim(weights, repeat, 0, keepdims=False)

    def iteration(carry, i):
        state, queue = carry
        # Microbatches that have been through all stages wait for the next repeat.
        at = i % MICROBATCHES
        waiting = lax.dynamic_index_in_dim(queue, at, 0)
        is_first = lax.broadcasted_iota(jnp.int32, state.shape, 0) == 0
        state = constrained(jnp.where(is_first, waiting, state))
        turns = jnp.maximum(i - jnp.arange(STAGES), 0) // MICROBATCHES
        turns = jnp.minimum(turns, REPEATS - 1)
        chosen = jax.vmap(due, in_axes=(1, 0), spmd_axis_name="stage")
        weights = jax.tree.map(lambda w: chosen(w, turns), params)
        out = constrained(jax.vmap(layer, spmd_axis_name="stage")(weights, state))
        done = (i - STAGES + 1) % MICROBATCHES
        kept = lax.dynamic_update_index_in_dim(queue, out[-1], done, 0)
        queue = jnp.where(i >= STAGES - 1, kept, queue)
        return (jnp.roll(out, 1, axis=0), queue), None

    state = constrained(jnp.zeros((STAGES, *x.shape[1:])))
    (_, queue), _ = lax.scan(iteration, (state, x), jnp.arange(steps))
    return jnp.mean(queue**2)


def permuted(params, x):
    """A stage on each device, which passes on what it made by `ppermute`."""

    def on_device(params, x):
        own = jax.tree.map(lambda p: p[0], params)
        stage = lax.axis_index("stage")

        def iteration(state, i):
            first = lax.dynamic_index_in_dim(
                x, jnp.minimum(i, MICROBATCHES - 1), 0, keepdims=False
            )
            out = layer(own, jnp.where(stage == 0, first, state))
            ring = [(j, (j + 1) % STAGES) for j in range(STAGES)]
            return lax.ppermute(out, "stage", ring), out

        # That of a stage, as what it receives is.
        zeros = jnp.zeros(x.shape[1:]) * stage
        _, found = lax.scan(iteration, zeros, jnp.arange(MICROBATCHES + STAGES - 1))
        last = jnp.where(stage == STAGES - 1, found[STAGES - 1 :], 0)
        return jnp.mean(lax.psum(last, "stage") ** 2)

    specs = P("stage"), P()
    return jax.shard_map(on_device, in_specs=specs, out_specs=P())(params, x)


def on_stages(stack):
    mesh = jax.make_mesh(
        (STAGES, 2),
        ("stage", "data"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: 2 * STAGES],
    )
    spec = P(*(None,) * (len(stack) - 1), "stage")
    return mesh, jax.device_put(params_of(*stack), NamedSharding(mesh, spec))


@pytest.mark.more
@pytest.mark.parametrize("pipeline", [rolled, permuted])
def test_recorded_and_clipped_as_in_a_loop(pipeline):
    params, x = params_of(STAGES), microbatches()
    value, stats = mc.record_attention(looped)(params, x)
    expected = mc.clip_qk(
        params, stats, THRESHOLD, model=mc.read_model(looped, params, x)
    )
    logits = np.stack(jax.tree.leaves(stats))
    assert (logits > THRESHOLD).any() and (logits < THRESHOLD).any()
    mesh, placed = on_stages((STAGES,))
    with jax.set_mesh(mesh):
        reading = mc.read_model(pipeline, placed, x)
        found, stats = jax.jit(mc.record_attention(pipeline))(placed, x)
        clipped = mc.clip_qk(placed, stats, THRESHOLD, model=reading)
    np.testing.assert_allclose(found, value, rtol=SHARE)
    # The first stage waits for nobody, the others begin with rows of zeros.
    assert_close(jax.tree.leaves(stats), [np.maximum(logits, 0).ravel()], SHARE)
    assert_close(clipped, expected, SHARE)


def test_a_layer_that_is_looked_up_is_refused():
    """Statistics of a stage are of the layers of all its repeats."""
    mesh, placed = on_stages((REPEATS, STAGES))
    x = microbatches()
    value = looped(placed, x)
    with jax.set_mesh(mesh):
        reading = mc.read_model(circular, placed, x)
        found, stats = jax.jit(mc.record_attention(circular))(placed, x)
        np.testing.assert_allclose(found, value, rtol=SHARE)
        assert not reading.attention and not jax.tree.leaves(stats)
        with pytest.raises(ValueError, match=r"test_pipelines.py:\d+: an index"):
            mc.muonclip(1e-2, model=reading).init(placed)
