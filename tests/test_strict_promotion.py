"""Every public function under JAX's strictest flags: no rank or dtype is promoted."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import clip_at_rest, more, nnx_attention, normal, ones
from layers import flat_layer, fused_layer, gains_layer, latent_layer

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def attention_params(*stack, bias=True, seed=0):
    def projection(i):
        kernel = {"kernel": normal((seed, i), *stack, 8, 2, 4)}
        return kernel | ({"bias": normal((seed, i, 1), *stack, 2, 4)} if bias else {})

    return {"query": projection(0), "key": projection(1), "value": projection(2)}


#: Two matrices of one shape, tall and wide ones, stacks, heads and vectors.
PARAMS = {
    "attn": attention_params(),
    "layers": {"attn": attention_params(3, seed=1)},
    "up": {"kernel": normal(2, 8, 16), "bias": normal(3, 16)},
    "down": {"kernel": normal(4, 16, 8), "bias": normal(5, 8)},
    "embed": {"embedding": normal(6, 11, 8)},
    "large": {"kernel": normal(7, 90, 80)},
    "back": {"kernel": normal(8, 80, 90)},
    "output": {"kernel": normal(8, 8, 11)},
}
STATS = {
    "attn": {"max_logits": jnp.asarray([90.0, 400.0])},
    "layers": {"attn": {"max_logits": jnp.asarray([[90.0, 400.0]] * 3)}},
}
MATRICES = {"a": normal(9, 6, 10), "b": normal(10, 10, 6), "c": normal(11, 4, 6, 10)}


def run(tx, params=PARAMS, **extra):
    state = tx.init(params)
    return tx.update(params, state, params, **extra)


def muon(**options):
    return lambda: run(mc.muon(1e-2, **options))


def clipped(**options):
    return lambda: run(mc.muonclip(1e-2, **options), attention_stats=STATS)


def heads_of(params, x):
    query, key, value = (
        jnp.einsum("td,dhk->htk", x, leaf["kernel"]) for leaf in params.values()
    )
    return jnp.sum(jax.nn.softmax(query @ key.mT) @ value)


def recorded():
    x = normal(12, 5, 8)
    return mc.record_attention(heads_of)(attention_params(), x)


def sizes(dtype=jnp.float32):
    shapes = ((2, 9, 4, 3), (2, 9, 2, 3), (2, 9, 2, 5))
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


FLOAT = jnp.float32
IDS = jnp.asarray(np.arange(9, dtype=np.int32) // 4)
ROW = jnp.asarray(np.asarray(IDS)[None])
MASKS = [(9,), (9, 9), (4, 9, 9), (1, 4, 9, 9), (2, 1, 1, 9), (2, 4, 9, 9)]
ATTENTION = [
    {},
    dict(is_causal=True, local_window_size=(3, 1)),
    dict(query_segment_ids=IDS),
    dict(query_segment_ids=IDS, key_segment_ids=ROW),
    dict(query_segment_ids=ROW, key_segment_ids=jnp.asarray(np.tile(ROW, (2, 1)))),
    *(dict(mask=ones(*m, dtype=bool), bias=ones(*m)) for m in MASKS),
    dict(bias=ones(9, 9, dtype=jnp.bfloat16)),
]


def attend(function, arrays, options):
    """Value, gradient and statistic."""

    def loss(*arrays):
        out = function(*arrays, **options)
        out = out if isinstance(out, tuple) else (out, out)
        return jnp.sum(out[0].astype(jnp.float32)), out

    return jax.grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)


def each(function, count, options=ATTENTION, dtypes=(FLOAT, jnp.bfloat16)):
    return lambda: [
        attend(function, sizes(dtype)[:count], o) for o in options for dtype in dtypes
    ]


blocks = functools.partial(mc.blockwise_attention, block_size=4)


def in_linen():
    layer = nn.MultiHeadDotProductAttention(3, attention_fn=mc.attention_fn)
    x = normal(0, 2, 9, 12)
    mask = nn.make_causal_mask(x[..., 0])
    variables = layer.init(jax.random.key(0), x, mask=mask)
    return layer.apply(
        variables, x, mask=mask, sow_weights=True, mutable=["intermediates"]
    )


def in_nnx():
    layer, x = nnx_attention(3, 12), normal(0, 2, 9, 12)
    call = nnx.capture(lambda m, x: m(x, sow_weights=True), nnx.Intermediate)
    return call(layer, x)


def described():
    """The clip of layers in every kind of layout."""
    of_layers = [
        (flat_layer("attn", 3), {"q_proj/kernel": (8, 6), "k_proj/kernel": (8, 6)}),
        (
            fused_layer("attn", 3, bias=True),
            {"c_attn/kernel": (8, 18), "c_attn/bias": (18,)},
        ),
        (
            latent_layer("attn", 4),
            {"wq_b/kernel": (6, 2, 6), "wkv_b/kernel": (8, 2, 7)},
        ),
        (gains_layer("attn"), {"query_ln/scale": (4,), "key_ln/scale": (4,)}),
    ]
    stats = {"attn": {"max_logits": jnp.asarray([50.0, 400.0])}}
    for layer, shapes in of_layers:
        params: dict = {"attn": {}}
        for i, (name, shape) in enumerate(shapes.items()):
            module, leaf = name.split("/")
            params["attn"].setdefault(module, {})[leaf] = normal(i, *shape)
        tx, traced = mc.qk_clip(60.0, attention=[layer]), clip_at_rest([layer])
        yield functools.partial(run, tx, params, attention_stats=stats)
        yield functools.partial(traced, params, stats, 60.0)


def newton_schulz(**options):
    shapes = [(4, 4), (4, 8), (8, 4), (3, 4, 4), (3, 4, 8), (2, 3, 8, 4), (0, 3, 4)]
    shapes += [(1, 300, 300), (2, 260, 520)]  # in blocks
    return lambda: [mc.newton_schulz(normal(0, *s), **options) for s in shapes]


#: By public name, calls that between them take every branch of the arithmetic.
CALLS = {
    "newton_schulz": [
        newton_schulz(**options)
        for options in (
            *(dict(method=method) for method in ("auto", "standard", "gram")),
            dict(dtype="bfloat16", method="gram"),
            dict(coeffs="turbo_muon", preconditioning="aol"),
            dict(preconditioning="equilibrated"),
        )
    ],
    "muon": [
        muon(),
        muon(mu_dtype="bfloat16", nesterov=False),
        muon(
            mu_dtype="float16",
            weight_decay_mask={"attn": False}
            | dict.fromkeys(PARAMS.keys() - {"attn"}, True),
        ),
        muon(mu_dtype="int8"),
        muon(neuron_b2=0.9, cautious_weight_decay=True),
        muon(per_head=True, consistent_rms=None),
        lambda: run(optax.inject_hyperparams(mc.muon)(1e-2, beta=lambda count: 0.9)),
    ],
    "scale_by_muon": [lambda: run(mc.scale_by_muon(), MATRICES | {"c": None})],
    "normalize_neurons": [lambda: run(mc.normalize_neurons(), {"a": MATRICES["a"]})],
    "add_cautious_decayed_weights": [
        lambda: run(mc.add_cautious_decayed_weights(0.1), MATRICES)
    ],
    "muonclip": [clipped(), clipped(threshold=100.0, alpha=0.3, per_head=True)],
    "qk_clip": [lambda: run(mc.qk_clip(), attention_stats=STATS)],
    "clip_qk": [lambda: mc.clip_qk(PARAMS, STATS), *described()],
    "multi_steps": [
        lambda: run(mc.multi_steps(mc.muonclip(1e-2), 2), attention_stats=STATS)
    ],
    "scalars": [lambda: mc.scalars(clipped()()[1], PARAMS, heads=True)],
    "max_logits": [
        each(mc.max_logits, 2),
        lambda: mc.max_logits(*normal(0, 2, 1, 1100, 2, 4), is_causal=True),
    ],
    "blockwise_attention": [each(mc.blockwise_attention, 3), each(blocks, 3)],
    "splash_attention": [
        lambda: mc.splash_attention(
            *sizes()[:2], sizes()[1], query_segment_ids=IDS, interpret=True
        )
    ],
    "attention_fn": [in_linen, in_nnx],
    "record_attention": [recorded],
}
#: These look at shapes and names alone.
NO_ARITHMETIC = {
    "attention_rule",
    *("describe", "flax_attention_layers", "flax_dimension_numbers", "matrix_mask"),
    "param_labels",
    "read_model",
}


def test_every_public_function_is_called():
    functions = {name for name, _ in inspect.getmembers(mc, inspect.isfunction)}
    assert CALLS.keys() == functions - NO_ARITHMETIC


@pytest.mark.parametrize(
    "name, i",
    [
        more(name, i) if i > 1 else (name, i)
        for name, calls in CALLS.items()
        for i in range(len(calls))
    ],
)
def test_nothing_is_promoted(name, i):
    """Where it is, tracing raises."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda: [CALLS[name][i](), None][1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_nothing_is_promoted_of_other_params(dtype):
    """Statistics stay float32."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
        tx = mc.muonclip(1e-2, neuron_b2=0.9)
        jax.eval_shape(lambda: run(tx, params, attention_stats=STATS)[0])
        jax.eval_shape(lambda: mc.clip_qk(params, STATS))
