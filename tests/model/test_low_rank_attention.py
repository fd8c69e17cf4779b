"""Projections with more than a kernel and a bias: factors of LoRA, gains, others.

A reading knows what they do to the logits; names do not, and say so.
"""

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

D, H, K, E, R, T = 10, 4, 2, 6, 3, 5
X = np.asarray(normal(0, T, D), np.float64)


def rand(*shape):
    return normal((*shape, 7), *shape)


def projection():
    """A kernel, its bias and two factors, as nnx.LoRALinear names them."""
    factors = {"lora_a": rand(D, R), "lora_b": rand(R, H, E)}
    return {"kernel": rand(D, H, E), "bias": rand(H, E)} | factors


def project(layer, x, xp):
    """The kernel and the product of the factors apart."""
    if xp is np:
        layer = {name: np.asarray(w, np.float64) for name, w in layer.items()}
    low = x @ layer["lora_a"] @ layer["lora_b"].reshape(R, -1)
    y = x @ layer["kernel"].reshape(D, -1) + low + layer["bias"].reshape(-1)
    return y.reshape(T, H, E)


def logits(attn, x=X, xp=np):
    """`(heads, query, key)`, by NumPy in float64."""
    q, k = (project(attn[name], x, xp) for name in ("query", "key"))
    return xp.einsum("qhe,khe->hqk", q, k)


def attend(params, x):
    """The same as a function to read, in JAX."""
    attn = params["attn"]
    value = project(attn["key"], x, jnp)[:, :1]
    return jnp.einsum("hqk,khe->qhe", jax.nn.softmax(logits(attn, x, jnp)), value)


def largest(attn):
    return logits(attn).max((1, 2))


def flax_params():
    return {"attn": {"query": projection(), "key": projection()}}


def labels(params):
    def label(path, _):
        return "trained" if "lora" in jax.tree_util.keystr(path) else "frozen"

    return jax.tree_util.tree_map_with_path(label, params)


@pytest.mark.more
def test_a_frozen_base_is_clipped_after_the_partition_alone():
    """The base is scaled, too: adapters alone could not hold the logits."""
    params, x = flax_params(), jnp.asarray(X, jnp.float32)
    reading = mc.read_model(attend, params, x)
    _, stats = mc.record_attention(attend)(params, x)
    frozen = optax.set_to_zero()
    inside = mc.muonclip(0.0, model=reading)
    inside = optax.partition({"trained": inside, "frozen": frozen}, labels)
    with pytest.raises(ValueError, match="not given 'attn/query/kernel'"):
        inside.init(params)
    trained = {"trained": mc.muon(0.0, model=reading), "frozen": frozen}
    before = largest(params["attn"])
    tau = float(before.min()) / 2
    clip = mc.qk_clip(tau, model=reading)
    tx = optax.chain(optax.partition(trained, labels), clip)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    after = optax.apply_updates(params, updates)["attn"]
    np.testing.assert_allclose(largest(after), tau, rtol=1e-5)


@pytest.mark.parametrize("query", ["query", "q_proj", "wq"])
def test_adapters_alone_are_refused(query):
    factors = {"lora_a": rand(D, R), "lora_b": rand(R, H, E)}
    params = {"attn": {query: factors, "out": {"kernel": rand(H, E, D)}}}
    with pytest.raises(ValueError, match=rf"attn/{query}/lora_a.*mc\.read_model"):
        mc.qk_clip().init(params)
    mc.qk_clip(attention=mc.flax_attention_layers).init(params)


@pytest.mark.parametrize(
    "extra",
    [
        {"scale": jnp.ones(E)},
        {"magnitude": jnp.ones((H, E))},  # DoRA
        {"adapter": {"down": jnp.ones((D, R)), "up": jnp.ones((R, H, E))}},
        {"kernel_scale": jnp.ones(H)},
        {"lora_a": jnp.ones((D, R)), "lora_b": jnp.ones((R, H, E))},
    ],
)
def test_what_is_not_known_to_act_on_the_logits_is_refused(extra):
    (name, *_) = extra
    kernels = {"attn": {n: {"kernel": rand(D, H, E)} for n in ("query", "key")}}
    kernels["attn"]["query"] |= extra
    for call in (mc.qk_clip().init, mc.flax_attention_layers):
        message = rf"attn/query/{name}.*do to the logits.*mc\.read_model"
        with pytest.raises(ValueError, match=message):
            call(kernels)
    query, key = ((mc.HeadLeaf(f"{x}/kernel", 3),) for x in ("query", "key"))
    layer = mc.AttentionLayer("attn", query, key)
    mc.qk_clip(attention=[layer]).init(kernels)  # who writes a layer knows


def test_the_table_says_it_too():
    kernels = {"attn": {n: {"kernel": rand(D, H, E)} for n in ("query", "key")}}
    kernels["attn"]["query"]["scale"] = jnp.ones(E)
    text = mc.describe(kernels)
    assert "attn/query/scale' do to the logits" in text.splitlines()[-1]


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

        def __call__(self, x):
            query = self.q_proj(x).reshape(1, T, H, E)
            key = self.k_proj(x).reshape(1, T, K, E)
            return jax.nn.dot_product_attention(query, key, key)

    model = nnx.eval_shape(lambda: Attention(nnx.Rngs(0)))
    reading = mc.read_model(Attention.__call__, model, jnp.ones((1, T, D)))
    text = mc.describe(nnx.state(model), model=reading)
    rows = {row.split()[0]: row for row in text.splitlines() if row}
    assert rows["q_proj/lora/lora_b"].endswith(f"query, {H} heads")
    assert rows["k_proj/lora/lora_b"].endswith(f"key, {K} heads, stays")
    assert rows["q_proj/lora/lora_a"].endswith("-")
