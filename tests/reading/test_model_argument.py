"""`model=` alone: a function is trained and clipped, no name of which says anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


HEADS, SIZE, WIDTH, LENGTH, WORDS = 4, 8, 16, 6, 11
TAU = 28.0

#: Flat projections, under names that no library has.
PARAMS = {
    "a": normal(0, WORDS, WIDTH),
    "b": {"u": normal(1, WIDTH, HEADS * SIZE), "v": normal(2, WIDTH, HEADS * SIZE)},
    "c": {"u": normal(3, WIDTH, HEADS * SIZE), "v": normal(4, HEADS * SIZE, WIDTH)},
    "d": normal(5, WIDTH, WORDS),
    "e": normal(6, WIDTH),
}
TOKENS = np.random.default_rng(7).integers(0, WORDS, (2, LENGTH))


def heads(kernel, x):
    return (x @ kernel).reshape(*x.shape[:-1], HEADS, SIZE)


def attention_logits(params, x):
    query, key = heads(params["b"]["u"], x), heads(params["b"]["v"], x)
    return jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(SIZE)


def loss(params, tokens):
    x = params["a"][tokens] * params["e"]
    weights = jax.nn.softmax(attention_logits(params, x))
    value = heads(params["c"]["u"], x)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:-1], -1)
    logits = (x + mixed @ params["c"]["v"]) @ params["d"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS, TOKENS)


def largest(params):
    x = params["a"][TOKENS] * params["e"]
    return np.asarray(attention_logits(params, x)).max((0, 2, 3))


def test_labels_and_the_table():
    assert mc.param_labels(PARAMS, model=reading()) == {
        "a": "embedding",
        "b": {"u": "matrix", "v": "matrix"},
        "c": {"u": "matrix", "v": "matrix"},
        "d": "head",
        "e": "vector",
    }
    assert f"query, {HEADS} heads" in mc.describe(PARAMS, model=reading())


@pytest.mark.more
def test_a_head_over_the_threshold_has_it_after_a_step_of_rate_zero():
    step = jax.jit(jax.value_and_grad(mc.record_attention(loss), has_aux=True))
    (value, stats), grads = step(PARAMS, TOKENS)
    np.testing.assert_allclose(value, loss(PARAMS, TOKENS), rtol=1e-6)
    before = largest(PARAMS)
    assert (before > TAU).any() and (before < TAU).any()
    tx = mc.muonclip(0.0, threshold=TAU, model=reading())
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS, attention_stats=stats)
    after = largest(optax.apply_updates(PARAMS, updates))
    np.testing.assert_allclose(after, np.minimum(before, TAU), rtol=1e-4)
    metrics = mc.scalars(state, PARAMS, model=reading())
    assert metrics["num_clipped"] == (before > TAU).sum()
    clipped = mc.clip_qk(PARAMS, stats, TAU, model=reading())
    np.testing.assert_allclose(largest(clipped), np.minimum(before, TAU), rtol=1e-4)


@pytest.mark.more
def test_muon_takes_what_was_read():
    matrices = {"b", "c"}
    numbers = {
        k: mc.MuonDimensionNumbers(0, 1) if k in matrices else None for k in PARAMS
    }
    grads = jax.grad(loss)(PARAMS, TOKENS)
    given = mc.muon(1e-2, dimension_numbers=numbers)
    by_model = mc.muon(1e-2, model=reading(), per_head=False)
    expected, _ = given.update(grads, given.init(PARAMS), PARAMS)
    found, _ = by_model.update(grads, by_model.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_patterns_override_it():
    tx = mc.muon(1e-2, model=reading(), dimension_numbers={"c/u": None})
    state = tx.init(PARAMS)
    momentum = state.inner_states["muon"].inner_state[0].mu
    assert isinstance(momentum["c"]["u"], optax.MaskedNode)
    assert momentum["c"]["v"].shape == PARAMS["c"]["v"].shape


def test_other_params_are_refused():
    others = {**PARAMS, "f": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match="read from other params: it has no 'f'"):
        mc.muon(1e-2, model=reading()).init(others)


TAKE_A_MODEL = {
    "muon": lambda p, r: mc.muon(1e-2, model=r).init(p),
    "muon, heads whole": lambda p, r: mc.muon(1e-2, model=r, per_head=False).init(p),
    "muonclip": lambda params, r: mc.muonclip(1e-2, model=r).init(params),
    "scale_by_muon": lambda params, r: mc.scale_by_muon(model=r).init(params),
    "qk_clip": lambda params, r: mc.qk_clip(model=r).init(params),
    "clip_qk": lambda params, r: mc.clip_qk(params, STATS, TAU, model=r),
    "multi_steps": lambda p, r: mc.multi_steps(mc.qk_clip(model=r), 2, model=r).init(p),
    "scalars": lambda params, r: mc.scalars(
        mc.muonclip(1e-2, model=reading()).init(PARAMS), params, model=r
    ),
    "normalize_neurons": lambda params, r: mc.normalize_neurons(model=r).init(params),
    "param_labels": lambda params, r: mc.param_labels(params, model=r),
    "matrix_mask": lambda params, r: mc.matrix_mask(params, model=r),
    "describe": lambda params, r: mc.describe(params, model=r),
}
STATS = {"b": {"max_logits": jnp.full(HEADS, 2 * TAU)}}


@pytest.mark.parametrize("name", TAKE_A_MODEL)
def test_other_shapes_are_refused(name):
    """More words, and a key whose heads are larger: neither moves a path or a rank."""
    wider = {**PARAMS, "b": {**PARAMS["b"], "v": jnp.ones((WIDTH, 2 * HEADS * SIZE))}}
    others = {**wider, "d": jnp.ones((2, WIDTH, WORDS))}
    with pytest.raises(ValueError, match="read from params of other shapes") as error:
        TAKE_A_MODEL[name](others, reading())
    assert "b/v (16, 64), read as (16, 32)" in str(error.value)
    assert "d (2, 16, 11), read as (16, 11)" in str(error.value)
    assert "b/u" not in str(error.value)


def test_a_part_of_what_was_read_and_blocks_of_it_are_served():
    part = {"b": PARAMS["b"], "e": optax.MaskedNode()}
    labels = mc.param_labels(part, model=reading())
    assert labels["b"] == {"u": "matrix", "v": "matrix"}
    clipped = mc.clip_qk(part, STATS, TAU, model=reading())
    scale = clipped["b"]["u"] / PARAMS["b"]["u"]
    np.testing.assert_allclose(scale, 0.5**0.5, rtol=1e-6)

    # In `shard_map` leaves are blocks, here of rows.
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    shardings = dict.fromkeys(PARAMS["b"], jax.sharding.NamedSharding(mesh, rows))
    tx = mc.scale_by_muon(model=reading(), shardings={"b": shardings})

    def direction(grads):
        return tx.update({"b": grads}, tx.init({"b": grads}))[0]["b"]

    of_blocks = jax.shard_map(direction, mesh=mesh, in_specs=rows, out_specs=rows)
    found = jax.eval_shape(of_blocks, PARAMS["b"])
    assert found["u"].shape == PARAMS["b"]["u"].shape


def normed(params, tokens):
    """Query and key are normalized, without a gain: no parameter scales the logits."""
    x = params["a"][tokens] * params["e"]
    kernels = (params["b"]["u"], params["b"]["v"], params["c"]["u"])
    made = (heads(kernel, x) for kernel in kernels)
    query, key, value = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in made)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", weights, value))


def test_logits_that_nothing_scales_are_refused_by_file_and_line():
    read = mc.read_model(normed, PARAMS, TOKENS)
    with pytest.raises(ValueError, match=r"test_model_argument\.py:\d+"):
        mc.qk_clip(model=read)
