"""Params in boxes: one answer in every public function, and boxes that stay."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from containers import unwrapped, WRAP
from flax.training.train_state import TrainState
from helpers import few, normal, one_at_a_time
from trees import is_shape

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

D, H, E, V = 12, 3, 4, 20
SHAPES = {
    "embed": {"embedding": (V, D)},
    "block": {
        "attn": {
            "query": {"kernel": (D, H, E), "bias": (H, E)},
            "key": {"kernel": (D, H, E), "bias": (H, E)},
            "value": {"kernel": (D, H, E)},
            "out": {"kernel": (H, E, D)},
        },
        "norm": {"scale": (D,)},
        "up": {"kernel": (D, 16), "bias": (16,)},
    },
    "lm_head": {"kernel": (D, V)},
}
PARAMS = jax.tree.map(lambda x: normal(x, *x), SHAPES, is_leaf=is_shape)
GRADS = jax.tree.map(lambda x: normal((*x.shape[::-1], 1), *x.shape), PARAMS)
STATS = {"block": {"attn": {"max_logits": jnp.array([3.0, 50.0, 200.0])}}}

CALLS = {
    "describe": lambda p: mc.describe(p, per_head=True, stacks=True),
    "flax_attention_layers": mc.flax_attention_layers,
    "matrix_mask": mc.matrix_mask,
    "heads of layers": lambda p: mc.describe(
        p, attention=mc.flax_attention_layers, per_head=True
    ),
    "dimension_numbers": lambda p: mc.flax_dimension_numbers(
        p, dimension_numbers={"block/up/kernel": None}
    ),
    "numbers of numbers": lambda p: mc.describe(
        p, dimension_numbers=mc.flax_dimension_numbers(p)
    ),
    "clip_qk": lambda p: mc.clip_qk(p, STATS),
    "scalars": lambda p: mc.scalars(mc.qk_clip().init(p), p, heads=True),
}


@pytest.mark.parametrize("call, kind", one_at_a_time(CALLS, WRAP))
def test_what_is_said_of_the_params(kind, call):
    found, expected = (CALLS[call](p) for p in (WRAP[kind](PARAMS), PARAMS))
    found = unwrapped(found)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def masked(is_matrix):
    return lambda p: jax.tree.map(lambda x: x == is_matrix, mc.matrix_mask(p))


TRANSFORMATIONS = {
    "everything": mc.muonclip(
        1e-2,
        mu_dtype="int8",
        neuron_b2=0.9,
        weight_decay_mask={"embed": False, "block": True, "lm_head": True},
        dimension_numbers={"block/up/kernel": None},
    ),
    "masked": optax.chain(
        optax.masked(mc.scale_by_muon(), masked(True)),
        optax.masked(optax.scale_by_adam(), masked(False)),
        mc.qk_clip(),
    ),
}


def after_two_steps(tx, params, grads):
    @jax.jit
    def run(params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params, attention_stats=STATS)
            params = optax.apply_updates(params, updates)
        return params, updates

    return run(params, grads)


@pytest.mark.parametrize(
    "kind", few([x for x in WRAP if x != "plain"], "NNX variables")
)
@pytest.mark.parametrize("name", few(TRANSFORMATIONS, next(iter(TRANSFORMATIONS))))
def test_updates_keep_the_boxes(kind, name):
    tx, wrap = TRANSFORMATIONS[name], WRAP[kind]
    params = wrap(PARAMS)
    found = after_two_steps(tx, params, wrap(GRADS))
    expected = after_two_steps(tx, PARAMS, GRADS)
    for after in found:
        assert jax.tree.structure(after) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


class Model(nn.Module):
    """As in Flax's guide to several devices, all of its kernels in boxes."""

    @nn.compact
    def __call__(self, tokens):
        def boxed(*names):
            return nn.with_logical_partitioning(nn.initializers.normal(0.3), names)

        x = nn.Embed(V, D, embedding_init=boxed("vocabulary", None), name="embed")(
            tokens
        )
        x = x + nn.MultiHeadDotProductAttention(
            H, kernel_init=boxed(None, "heads", None), attention_fn=mc.attention_fn
        )(x, sow_weights=True)
        return nn.Dense(V, kernel_init=boxed(None, "words"), name="lm_head")(x)


@pytest.mark.more
@pytest.mark.parametrize("unboxed_after", [0, 2, 4])
def test_a_train_state_boxed_and_unboxed_on_the_way(unboxed_after):
    model, tokens = Model(), jnp.arange(10).reshape(2, 5) % V
    tx = mc.muonclip(1e-2, threshold=0.1)

    def create(unbox):
        params = model.init(jax.random.key(0), tokens)["params"]
        params = nn.unbox(params) if unbox else params
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        def loss(params):
            y, variables = Model().apply(
                {"params": params}, tokens, mutable=["intermediates"]
            )
            return (y**2).mean(), variables["intermediates"]

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, attention_stats=stats
        )
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state)

    def train(state, unboxed_after):
        for i in range(4):
            state = nn.unbox(state) if i == unboxed_after else state
            state = step(state)
        return nn.unbox(state)

    found = train(create(unbox=False), unboxed_after)
    expected = train(create(unbox=True), 4)
    assert optax.tree.get(expected.opt_state, "last_clip").max() >= 0
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
