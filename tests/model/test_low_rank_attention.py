"""Projections with more than a kernel and a bias: factors of LoRA, gains, others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

D, H, K, E, R, L, T = 10, 4, 2, 6, 3, 2, 5
X = np.asarray(normal(0, T, D), np.float64)


def rand(*shape):
    return normal((*shape, 7), *shape)


def projection(heads, *, flat, lead=(), leaf="kernel", prefix=""):
    """A kernel, its bias and two factors, as nnx.LoRALinear and qwix name them."""
    outputs = (heads * E,) if flat else (heads, E)
    factors = {
        f"{prefix}lora_a": rand(*lead, D, R),
        f"{prefix}lora_b": rand(*lead, R, *outputs),
    }
    factors = {"lora": factors} if flat and not prefix else factors
    return {leaf: rand(*lead, D, *outputs), "bias": rand(*lead, *outputs)} | factors


def project(layer, heads):
    """In float64, the kernel and the product of the factors apart."""
    factors = layer.get("lora", layer)
    a, b = (
        np.asarray(next(x for n, x in factors.items() if n.endswith(end)), np.float64)
        for end in ("lora_a", "lora_b")
    )
    kernel = np.asarray(layer.get("kernel", layer.get("w")), np.float64)
    y = X @ kernel.reshape(D, -1) + X @ a @ b.reshape(R, -1)
    y = y + np.asarray(layer["bias"], np.float64).reshape(-1)
    return y.reshape(T, heads, E)


def logits(query, key, key_heads):
    """The largest logit of each head."""
    k = np.repeat(project(key, key_heads), H // key_heads, 1)
    return np.einsum("qhe,khe->hqk", project(query, H), k).max((1, 2))


def in_layer(attn, i):
    return attn if i is None else jax.tree.map(lambda x: x[i], attn)


CASES = {
    "Flax": (("query", "key"), {"flat": False}, None, K),
    "Flax, scanned": (("query", "key"), {"flat": False, "lead": (L,)}, None, H),
    "flat, as nnx.LoRALinear": (
        ("q_proj", "k_proj"), {"flat": True}, mc.named_attention(E), K,
    ),
    "flat, by names": (
        ("wq", "wk"), {"flat": True}, mc.flat_attention(E, query="wq", key="wk"), H,
    ),
    "qwix on tunix": (
        ("q_proj", "k_proj"),
        {"flat": False, "leaf": "w", "prefix": "w_"}, mc.named_attention(), K,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_factors_are_scaled_with_their_kernel(name, alpha):
    (query, key), options, find, key_heads = CASES[name]
    attn = {query: projection(H, **options), key: projection(key_heads, **options)}

    def measure(attn):
        stacked = range(L) if options.get("lead") else [None]
        layers = [in_layer(attn, i) for i in stacked]
        rows = [logits(x[query], x[key], key_heads) for x in layers]
        return np.array(rows if options.get("lead") else rows[0])

    before = measure(attn)
    tau = float(np.median(before))
    stats = {"attn": {"max_logits": jnp.asarray(before, jnp.float32)}}
    tx = mc.qk_clip(tau, alpha=alpha, attention=find)
    zeros = jax.tree.map(jnp.zeros_like, {"attn": attn})
    updates, _ = tx.update(
        zeros, tx.init({"attn": attn}), {"attn": attn}, attention_stats=stats
    )
    after = optax.apply_updates({"attn": attn}, updates)["attn"]
    # A product of two scaled float32 weights, each rounded once, summed over few.
    np.testing.assert_allclose(measure(after), np.minimum(before, tau), rtol=1e-5)


def test_fused_projections_scale_two_thirds_of_the_factor():
    fused = {"kernel": rand(D, 3 * H * E), "lora_a": rand(D, R)}
    params = {"attn": {"c_attn": fused | {"lora_b": rand(R, 3 * H * E)}}}
    stats = {"attn": {"max_logits": jnp.full(H, 40.0)}}
    find = mc.fused_attention(E)
    after = mc.clip_qk(params, stats, 10.0, attention=find)["attn"]["c_attn"]
    ratio = np.asarray(after["lora_b"] / params["attn"]["c_attn"]["lora_b"])
    expected = np.repeat([0.5, 0.5, 1.0], H * E)
    np.testing.assert_allclose(ratio, np.broadcast_to(expected, ratio.shape), rtol=1e-6)
    np.testing.assert_array_equal(after["lora_a"], fused["lora_a"])


def flax_params(**extra):
    return {
        "attn": {
            "query": projection(H, flat=False) | extra,
            "key": projection(H, flat=False),
        }
    }


def labels(params):
    def label(path, _):
        return "trained" if "lora" in jax.tree_util.keystr(path) else "frozen"

    return jax.tree_util.tree_map_with_path(label, params)


def test_a_frozen_base_is_clipped_behind_the_partition_alone():
    """The base is scaled, too: adapters alone could not hold the logits."""
    params = flax_params()
    frozen = optax.set_to_zero()
    inside = optax.partition({"trained": mc.muonclip(0.0), "frozen": frozen}, labels)
    with pytest.raises(ValueError, match=r"(?s)hides 'attn/query/kernel'.*optax.chain"):
        inside.init(params)
    trained = {"trained": mc.muon(0.0), "frozen": frozen}
    before = logits(params["attn"]["query"], params["attn"]["key"], H)
    tau = float(before.min()) / 2
    tx = optax.chain(optax.partition(trained, labels), mc.qk_clip(tau))
    stats = {"attn": {"max_logits": jnp.asarray(before, jnp.float32)}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    after = optax.apply_updates(params, updates)["attn"]
    np.testing.assert_allclose(logits(after["query"], after["key"], H), tau, rtol=1e-5)


@pytest.mark.parametrize("query", ["query", "q_proj", "wq"])
def test_adapters_alone_are_refused(query):
    factors = {"lora_a": rand(D, R), "lora_b": rand(R, H, E)}
    params = {"attn": {query: factors, "out": {"kernel": rand(H, E, D)}}}
    with pytest.raises(ValueError, match=f"attn/{query}/lora_a.*together"):
        mc.qk_clip().init(params)
    mc.qk_clip(attention=mc.flax_attention_layers).init(params)


@pytest.mark.parametrize(
    "extra",
    [
        {"scale": jnp.ones(E)},
        {"magnitude": jnp.ones((H, E))},  # DoRA
        {"adapter": {"down": jnp.ones((D, R)), "up": jnp.ones((R, H, E))}},
        {"kernel_scale": jnp.ones(H)},
        {"lora_b": jnp.ones((H, R, E))},  # of another layout
        {"lora_A": jnp.ones((D, R))},  # of a pair that is not there
    ],
)
def test_what_is_not_known_to_act_on_the_logits_is_refused(extra):
    (name,) = extra
    for find in (None, mc.named_attention()):
        with pytest.raises(ValueError, match=f"attn/query/{name}.*do to the logits"):
            mc.qk_clip(attention=find).init(flax_params(**extra))
    layer = mc.AttentionLayer(
        "attn", (mc.HeadLeaf("query/kernel", 3),), (mc.HeadLeaf("key/kernel", 3),)
    )
    mc.qk_clip(attention=[layer]).init(
        flax_params(**extra)
    )  # whoever writes a layer knows


def test_the_table_says_it_too():
    text = mc.describe(flax_params(scale=jnp.ones(E)))
    assert "attn/query/scale' do to the logits" in text.splitlines()[-1]


def test_factors_next_to_kernels_with_outputs_first_are_refused():
    """Their own layout does not show, and a square one would fit both."""
    weights = {"weight": rand(H * E, H * E), "lora_a": rand(H * E, R)}
    weights |= {"lora_b": rand(R, H * E)}
    params = {"attn": {"q_proj": weights, "k_proj": weights}}
    with pytest.raises(ValueError, match="attn/q_proj/lora_a"):
        mc.qk_clip(attention=mc.named_attention(E)).init(params)


def test_weight_norm_of_linen_is_refused():
    """It keeps its scale in a module of its own, and undoes a scaled kernel."""

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = [nn.DenseGeneral((H, E), name=name) for name in ("query", "key")]
            query, key = (nn.WeightNorm(layer)(x) for layer in heads)
            return mc.max_logits(query, key)

    variables = jax.eval_shape(Attention().init, jax.random.key(0), jnp.ones((1, T, D)))
    with pytest.raises(ValueError, match="WeightNorm_0/query/kernel/scale"):
        mc.muonclip(1e-3).init(variables["params"])


def test_lora_linear_of_nnx():
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.LoRALinear(D, H * E, lora_rank=R, rngs=rngs)
            self.k_proj = nnx.LoRALinear(D, K * E, lora_rank=R, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: Attention(nnx.Rngs(0))))
    text = mc.describe(state, attention=mc.named_attention(E))
    rows = {row.split()[0]: row for row in text.splitlines()}
    assert rows["q_proj/lora/lora_b"].endswith(f"query, {H} heads")
    assert rows["k_proj/lora/lora_b"].endswith(f"key, {K} heads")
    assert rows["q_proj/lora/lora_a"].endswith("-")
