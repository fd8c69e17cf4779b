"""Every attention in use: the next forward gives min(S, tau), and needs every leaf."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    clip_at_rest,
    inputs,
    largest,
    linen_stats,
    linen_variables,
    nnx_model,
    nnx_stats,
    normal,
    randomize,
)
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._model import paths


pytestmark = pytest.mark.usefixtures("fast_compilation")


WIDTH, HEADS, HEAD_DIM = 16, 4, 8


def rotate(x):
    """Rotary embedding over the last axis of `(batch, length, heads, dim)`."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10.0 ** jnp.arange(half)
    a, b = x[..., :half], x[..., half:]
    turned = (
        a * jnp.cos(angle) - b * jnp.sin(angle),
        a * jnp.sin(angle) + b * jnp.cos(angle),
    )
    return jnp.concatenate(turned, axis=-1)


class Recorder(nn.Module):
    """Attention that sows its statistic; what it returns stays out of the residual."""

    def record(self, query, key, **options):
        self.sow(
            "intermediates",
            "max_logits",
            mc.max_logits(query, key, is_causal=True, **options),
        )


class LatentAttention(Recorder):
    """DeepSeek-V3's attention in MaxText's names."""

    query_rank: int = 6
    nope: int = 4
    rope: int = 2

    @nn.compact
    def __call__(self, x):
        def up(name, dim):
            return nn.DenseGeneral((HEADS, dim), use_bias=False, name=name)

        if self.query_rank:
            low = nn.RMSNorm(name="q_norm")(nn.Dense(self.query_rank, name="wq_a")(x))
            query = up("wq_b", self.nope + self.rope)(low)
        else:
            query = up("query", self.nope + self.rope)(x)
        low, rope_key = jnp.split(
            nn.Dense(6 + self.rope, name="wkv_a")(x), [6], axis=-1
        )
        key_value = up("wkv_b", self.nope + 3)(nn.RMSNorm(name="kv_norm")(low))
        query = jnp.concatenate(
            [query[..., : self.nope], rotate(query[..., self.nope :])], -1
        )
        shared = jnp.broadcast_to(
            rotate(rope_key[:, :, None]), (*query.shape[:-1], self.rope)
        )
        key = jnp.concatenate([key_value[..., : self.nope], shared], axis=-1)
        self.record(query, key, scale=0.3)
        return x


class FusedAttention(Recorder):
    @nn.compact
    def __call__(self, x):
        qkv = nn.Dense(3 * HEADS * HEAD_DIM, name="c_attn")(x)
        query, key, _ = jnp.moveaxis(
            qkv.reshape(*x.shape[:2], 3, HEADS, HEAD_DIM), 2, 0
        )
        self.record(query, key)
        return x


class FlatAttention(Recorder):
    key_heads: int = HEADS

    @nn.compact
    def __call__(self, x):
        query = nn.Dense(HEADS * HEAD_DIM, name="q_proj")(x)
        key = nn.Dense(self.key_heads * HEAD_DIM, name="k_proj")(x)

        def heads(y):
            return rotate(y.reshape(*y.shape[:2], -1, HEAD_DIM))

        self.record(heads(query), heads(key))
        return x


class GemmaAttention(Recorder):
    """Heads first, and key and value in one kernel."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal()
        wq = self.param("q_einsum", normal, (HEADS, WIDTH, HEAD_DIM))
        wkv = self.param("kv_einsum", normal, (2, HEADS, WIDTH, HEAD_DIM))
        self.record(
            jnp.einsum("btd,ndh->btnh", x, wq), jnp.einsum("btd,ndh->btnh", x, wkv[0])
        )
        return x


GEMMA = mc.AttentionLayer(
    "",
    query=(mc.HeadLeaf("q_einsum", 3, -3),),
    key=(mc.HeadLeaf("kv_einsum", 4, -3, part=(-4, slice(0, 1))),),
)


class StockAttention(nn.Module):
    """Flax's own, here as cross-attention with a padding mask."""

    @nn.compact
    def __call__(self, x):
        memory = x[:, ::-1, :] * jnp.linspace(0.5, 2, x.shape[1])[:, None]
        mask = nn.make_attention_mask(jnp.ones(x.shape[:2]), jnp.arange(x.shape[1]) < 4)
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=mc.attention_fn)
        layer(x, memory, mask=mask, sow_weights=True)
        return x


class SinkAttention(Recorder):
    """A learned sink competes in the softmax and is no logit of a query and a key."""

    @nn.compact
    def __call__(self, x):
        self.param("sink", nn.initializers.ones, (HEADS,))
        query = nn.DenseGeneral((HEADS, HEAD_DIM), name="query")(x)
        key = nn.DenseGeneral((HEADS, HEAD_DIM), name="key")(x)
        self.record(query, key)
        return x


class ParallelBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm()(x)
        FlatAttention(name="attention")(y)
        return x + nn.Dense(WIDTH)(y)


class NormalisedAttention(nn.Module):
    """Flax's own with `normalize_qk`: the heads share the gains of the norms."""

    @nn.compact
    def __call__(self, x):
        layer = nn.MultiHeadDotProductAttention(
            HEADS, attention_fn=mc.attention_fn, normalize_qk=True
        )
        layer(x, x, sow_weights=True)
        return x


class NormalisedHeads(Recorder):
    """A gain for every head, rotary embedding, and fewer keys than queries."""

    @nn.compact
    def __call__(self, x):
        def heads(name, count):
            y = nn.DenseGeneral((count, HEAD_DIM), name=name)(x)
            gain = self.param(f"{name}_gain", nn.initializers.ones, (count, HEAD_DIM))
            norm = nn.RMSNorm(use_scale=False, name=f"{name}_rms")
            return rotate(gain * norm(y))

        self.record(heads("query", HEADS), heads("key", 2))
        return x


GAINS = mc.AttentionLayer(
    "", query=(mc.HeadLeaf("query_gain", 2),), key=(mc.HeadLeaf("key_gain", 2),)
)


class Stacked(nn.Module):
    """Any of them, scanned; the stack axis of the params is free."""

    layer: type
    options: tuple = ()
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        layer = self.layer(**dict(self.options), name="layers")
        scanned = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": self.axis, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scanned(layer, x, None)[0]


AT_1 = {"layers": 1}
LATENT = mc.latent_attention(nope_head_dim=4)
FUSED = mc.fused_attention(HEAD_DIM)
FLAT = mc.flat_attention(HEAD_DIM, query="q_proj", key="k_proj")
CASES = {
    "latent": (LatentAttention(), LATENT),
    "latent without query LoRA": (LatentAttention(query_rank=0), LATENT),
    "latent, scanned": (Stacked(LatentAttention), LATENT),
    "fused": (FusedAttention(), FUSED),
    "fused, scanned": (Stacked(FusedAttention), FUSED),
    "flat, rotary": (FlatAttention(), FLAT),
    "flat, grouped queries": (FlatAttention(key_heads=2), FLAT),
    "flat, multi-query, scanned": (Stacked(FlatAttention, (("key_heads", 1),)), FLAT),
    "Gemma": (GemmaAttention(), [GEMMA]),
    "cross-attention": (StockAttention(), None),
    "sink": (SinkAttention(), None),
    "parallel block": (ParallelBlock(), FLAT),
    "normalised, a gain per head": (NormalisedHeads(), [GAINS]),
    "stacked at axis 1": (
        Stacked(StockAttention, axis=1),
        functools.partial(mc.flax_attention_layers, stack_axes=AT_1),
    ),
    "latent, stacked at axis 1": (
        Stacked(LatentAttention, axis=1),
        mc.latent_attention(nope_head_dim=4, stack_axes=AT_1),
    ),
    "fused, stacked at axis 1": (
        Stacked(FusedAttention, axis=1),
        mc.fused_attention(HEAD_DIM, stack_axes=AT_1),
    ),
    "flat multi-query, stacked at axis 1": (
        Stacked(FlatAttention, (("key_heads", 1),), axis=1),
        mc.flat_attention(HEAD_DIM, query="q_proj", key="k_proj", stack_axes=AT_1),
    ),
}


@functools.cache
def setup(case):
    model, attention = CASES[case]
    params = linen_variables(model, inputs(), seed=1)["params"]

    @jax.jit
    def measure(params):
        return linen_stats(model, params, inputs())

    logits = largest(measure(params))
    return params, measure, attention, float(np.median(logits[logits > 0]))


@functools.cache
def clip_of(case):
    return clip_at_rest(CASES[case][1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_next_forward_gives_min_of_logit_and_threshold(case, alpha):
    params, measure, _, tau = setup(case)
    before = largest(measure(params))
    assert (before > tau).any() and (before <= tau).any()
    clipped, _ = clip_of(case)(params, measure(params), tau, alpha)
    after = largest(measure(clipped))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


#: Of these a layer has but one part in query and key, or shares its key's.
WHOLE = {"Gemma", "normalised, a gain per head"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in WHOLE])
def test_forgetting_any_one_part_misses_the_threshold(case):
    params, measure, attention, tau = setup(case)
    before = largest(measure(params))
    layers = mc.flax_attention_layers(params) if attention is None else attention
    (layer,) = layers(params) if callable(layers) else layers
    shared = any(w in case for w in ("grouped", "multi-query"))
    forgotten = 0
    for role in ("query", "rotary_query", *(() if shared else ("key",))):
        leaves = getattr(layer, role)
        for i in range(len(leaves)):
            poorer = layer._replace(**{role: leaves[:i] + leaves[i + 1 :]})
            if not poorer.key or not poorer.query:
                continue  # a layer without one of them is refused, see below
            forgotten += 1
            after = largest(
                measure(mc.clip_qk(params, measure(params), tau, attention=[poorer]))
            )
            error = np.abs(after / np.minimum(before, tau) - 1).max()
            assert error > 1e-3, (role, leaves[i])  # ten times the bound above
    assert forgotten > 0


@pytest.mark.parametrize("role", ["query", "key"])
def test_a_layer_without_query_or_key_is_refused(role):
    params = {"q_einsum": jnp.ones((4, 16, 8)), "kv_einsum": jnp.ones((2, 4, 16, 8))}
    with pytest.raises(ValueError, match=f"names no {role}"):
        mc.clip_qk(
            params,
            {"max_logits": jnp.ones(4)},
            attention=[GEMMA._replace(**{role: ()})],
        )


def test_latent_attention_leaves_the_rest_alone():
    params, measure, attention, tau = setup("latent")
    after = mc.clip_qk(params, measure(params), tau, attention=attention)
    for name in ("wq_a", "q_norm", "wkv_a", "kv_norm"):
        jax.tree.map(np.testing.assert_array_equal, after[name], params[name])
    np.testing.assert_array_equal(
        after["wkv_b"]["kernel"][..., 4:], params["wkv_b"]["kernel"][..., 4:]
    )


def test_torchtitan_figures_for_latent_attention():
    """S = [100, 400], tau 200, alpha 1/4: .5^.25 nope, .5 rope, .5^.75 key, value 1."""
    params = {
        "wq_b": {"kernel": jnp.ones((3, 2, 3))},
        "wkv_b": {"kernel": jnp.ones((3, 2, 4))},
    }
    stats = {"max_logits": jnp.asarray([100.0, 400.0])}
    after = mc.clip_qk(
        params, stats, 200.0, alpha=0.25, attention=mc.latent_attention(2)
    )
    np.testing.assert_allclose(
        after["wq_b"]["kernel"][0, 1], [0.840896, 0.840896, 0.5], rtol=1e-5
    )
    np.testing.assert_allclose(
        after["wkv_b"]["kernel"][0, 1], [0.594604, 0.594604, 1, 1], rtol=1e-5
    )
    assert (after["wq_b"]["kernel"][:, 0] == 1).all() and (
        after["wkv_b"]["kernel"][:, 0] == 1
    ).all()


def linen_normalised():
    model = NormalisedAttention()
    params = linen_variables(model, inputs())["params"]
    return params, lambda p: linen_stats(model, p, inputs())


def nnx_normalised():
    graph, state = nnx.split(nnx_model(normalize_qk=True))
    return state, lambda s: nnx_stats(nnx.merge(graph, s), inputs())


@pytest.mark.parametrize("make", [linen_normalised, nnx_normalised])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gains_of_qk_norm_scale_all_heads_of_a_layer(make, alpha):
    """The largest head lands on the threshold, and the others keep their share."""
    params, measure = make()
    before = np.stack(jax.tree.leaves(measure(params)))
    tau = float(before.max(-1).mean() if len(before) > 1 else before.max() / 2)
    find = mc.normalised_attention()
    clipped, state = clip_at_rest(find)(params, measure(params), tau, alpha)
    after = np.stack(jax.tree.leaves(measure(clipped)))
    gamma = np.minimum(1, tau / before.max(-1, keepdims=True))
    np.testing.assert_allclose(after, gamma * before, rtol=1e-4)
    assert (gamma < 1).any()
    metrics = mc.qk_clip_metrics(state, params, attention=find)
    assert metrics["num_clipped"] == (gamma < 1).sum()
    assert "all heads" in mc.describe(params, attention=find)


def test_scaling_the_projections_under_qk_norm_does_nothing():
    """Why they are refused: a witness."""
    params, measure = linen_normalised()
    name = "MultiHeadDotProductAttention_0"
    smaller = jax.tree.map(lambda p: p, params)
    for role in ("query", "key"):
        smaller[name][role] = jax.tree.map(lambda p: 0.5 * p, params[name][role])
    chex.assert_trees_all_close(measure(smaller), measure(params), rtol=1e-3)


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


def test_per_head_matrices_from_the_description():
    """Latent and Gemma's kernels, in front and at axis 1 stacked."""
    latent = {
        "layers": {
            "wq_b": {"kernel": jnp.ones((6, 3, 4, 8))},
            "wkv_b": {"kernel": jnp.ones((5, 3, 4, 7))},
            "up": {"kernel": jnp.ones((2, 9))},
        }
    }
    find = mc.latent_attention(4, stack_axes=AT_1)
    table = mc.describe(
        latent, attention=find, dimension_numbers=mc.per_head_dimension_numbers(find)
    )
    for shape in ("12 x 6 x 8", "12 x 5 x 7", "1 x 2 x 9"):
        assert shape in table
    gemma = {"q_einsum": jnp.ones((4, 16, 8)), "kv_einsum": jnp.ones((2, 4, 16, 8))}
    per_head = mc.per_head_dimension_numbers(
        [GEMMA], dimension_numbers=MuonDimensionNumbers(-2, -1)
    )
    table = mc.describe(gemma, attention=[GEMMA], dimension_numbers=per_head)
    assert "4 x 16 x 8" in table and "8 x 16 x 8" in table


def test_per_head_matrices_need_an_axis_of_heads():
    params = linen_variables(FusedAttention(), inputs())["params"]
    with pytest.raises(ValueError, match="'c_attn/kernel' has no axis of heads"):
        mc.per_head_dimension_numbers(FUSED)(params)


def test_additive_bias_scales_the_product_alone():
    """With a bias the cap is not exact: only the product of query and key shrinks."""
    query = normal(0, 1, 3, 1, 4)
    bias = normal(1, 3, 3, scale=5.0)
    whole = float(mc.max_logits(query, query, bias=bias)[0])
    gamma = (whole / 2) / whole
    halved = mc.max_logits(query * gamma**0.5, query * gamma**0.5, bias=bias)
    expected = np.max(gamma * np.einsum("bqhd,bkhd->qk", query, query) / 2 + bias)
    np.testing.assert_allclose(halved, [expected], rtol=1e-5)


def test_nnx_modules_with_flat_kernels():
    class Flat(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.Linear(WIDTH, HEADS * HEAD_DIM, rngs=rngs)
            self.k_proj = nnx.Linear(WIDTH, HEADS * HEAD_DIM, rngs=rngs)

        def __call__(self, x):
            def heads(y):
                return y.reshape(*y.shape[:2], HEADS, HEAD_DIM)

            self.sow(
                nnx.Intermediate,
                "max_logits",
                mc.max_logits(heads(self.q_proj(x)), heads(self.k_proj(x))),
            )
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: Flat(nnx.Rngs(0))))
    state = randomize(state)

    def measure(s):
        return nnx.capture(nnx.merge(graph, s), nnx.Intermediate)(inputs())[1]

    before = largest(measure(state))
    tau = float(np.median(before))
    after = largest(measure(mc.clip_qk(state, measure(state), tau, attention=FLAT)))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


def test_latent_attention_kernels_are_matrices_over_fused_axes():
    params = jax.eval_shape(LatentAttention().init, jax.random.key(0), inputs())[
        "params"
    ]
    tree = paths.flatten(
        mc.flax_dimension_numbers(params),
        is_leaf=lambda n: n is None or hasattr(n, "output_axis"),
    )
    numbers = {paths.show(p): n for p, n in zip(tree.paths, tree.leaves, strict=True)}
    assert (
        numbers["wq_b/kernel"].output_axis
        == numbers["wkv_b/kernel"].output_axis
        == (-2, -1)
    )
    assert "query, 4 heads + rotary_query, 4 heads" in mc.describe(
        params, attention=LATENT
    )


def test_preset_that_finds_no_query_names_the_layer():
    params = {"mla": {"wkv_b": {"kernel": jnp.ones((3, 2, 4))}}}
    with pytest.raises(ValueError, match=r"'mla' has 'wkv_b/kernel' but no query"):
        mc.muonclip(
            1e-3, attention=mc.latent_attention(2), dimension_numbers=lambda p: None
        ).init(params)
