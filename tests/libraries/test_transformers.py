"""QK-Clip and dimension numbers on Flax models of HuggingFace's `transformers`."""

import functools

import clipping
import jax.numpy as jnp
import numpy as np
import pytest
import transformers  # 4.57, since 5 has no Flax models
from transformers.models.bloom import modeling_flax_bloom as bloom
from transformers.models.llama import modeling_flax_llama as llama

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

D, H, K, E, LENGTH = 24, 4, 2, 6, 7
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 23, (2, LENGTH)))
ATTENDED = jnp.ones_like(TOKENS)
INWARDS, TURNED = (-2, -1), (-1, -2)


@functools.cache
def model_and_params(name, **options):
    config = getattr(transformers, f"{name}Config")(vocab_size=23, **options)
    model = getattr(transformers, f"Flax{name}ForCausalLM", None)
    model = model or getattr(transformers, f"Flax{name}LMHeadModel")
    model = model(config, _do_init=False, input_shape=(1, LENGTH))
    return model, clipping.randomize(model.params_shape_tree, scale=3.0)


def logits_of(model, modules, **where):
    def run(params):
        return model(TOKENS, attention_mask=ATTENDED, params=params).logits

    return clipping.reader(run, modules, **where)


def llama_of(bias):
    return model_and_params(
        "Llama",
        hidden_size=D,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=H,
        num_key_value_heads=K,
        max_position_embeddings=2 * E,  # the least that its rotation takes
        attention_bias=bias,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_llama(bias):
    model, params = llama_of(bias)
    modules = [f"model/layers/{i}/self_attn" for i in range(2)]
    may_change = {"q_proj/kernel": ..., "k_proj/kernel": ...}
    if bias:
        may_change |= {"q_proj/bias": ..., "k_proj/bias": ...}
    named = mc.flat_attention(E, query="q_proj", key="k_proj")
    for find in (mc.named_attention(E), named):
        clipping.check_clip(params, logits_of(model, modules), find, may_change)
    numbers = {
        "embed_tokens/embedding": None,
        "[qkvo]_proj/kernel": INWARDS,
        "(gate|up|down)_proj/kernel": INWARDS,
        "(input_layernorm|post_attention_layernorm|norm)/weight": None,
        "lm_head/kernel": None,
    }
    numbers |= {"bias": None} if bias else {}
    clipping.check_numbers(params, numbers)


def test_captured_statistics_of_llama():
    """From outside, with the rotation said, they are what enters the softmax."""
    model, params = llama_of(True)
    _, state = model.module.apply(
        {"params": params},
        TOKENS,
        ATTENDED,
        jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape),
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    table = llama.create_sinusoidal_positions(2 * E, E)
    sine, cosine = jnp.split(table[:LENGTH], 2, -1)

    def rotate(x):
        return llama.apply_rotary_pos_emb(x, sine, cosine)

    stats = mc.captured_attention_stats(
        state["intermediates"],
        scale=None,
        is_causal=True,
        head_dim=E,
        transform=lambda q, k: (rotate(q), rotate(k)),
    )
    modules = [f"model/layers/{i}/self_attn" for i in range(2)]
    clipping.check_statistics(stats, logits_of(model, modules)(params))


def test_gpt2():
    """One kernel, turned: queries of all heads, keys, values."""
    sizes = dict(n_embd=D, n_head=H, n_layer=2, n_positions=LENGTH)
    model, params = model_and_params("GPT2", **sizes)
    modules = [f"transformer/h/{i}/attn" for i in range(2)]
    may_change = {"c_attn/kernel": np.s_[: 2 * D], "c_attn/bias": np.s_[: 2 * D]}
    find = mc.fused_attention(E)
    clipping.check_clip(params, logits_of(model, modules), find, may_change)
    numbers = {
        "(wte|wpe)/embedding": None,
        "(c_attn|mlp/c_proj|c_fc)/kernel": TURNED,
        "attn/c_proj/kernel": INWARDS,  # square, so that either way is the same
        "scale": None,
        "bias": None,
    }
    clipping.check_numbers(params, numbers)


def query_and_key(attention):
    (fused,) = attention["c_attn"]["__call__"]
    query, key, _ = jnp.split(fused, 3, axis=-1)
    return {"query": {"__call__": (query,)}, "key": {"__call__": (key,)}}


def test_captured_statistics_of_gpt2():
    """The output of the one module is cut apart, as the manual says it."""
    sizes = dict(n_embd=D, n_head=H, n_layer=2, n_positions=LENGTH)
    model, params = model_and_params("GPT2", **sizes)
    _, state = model.module.apply(
        {"params": params},
        TOKENS,
        ATTENDED,
        jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape),
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    layers = state["intermediates"]["transformer"]["h"]
    projected = {i: {"attn": query_and_key(layers[i]["attn"])} for i in ("0", "1")}
    stats = mc.captured_attention_stats(
        {"transformer": {"h": projected}}, scale=None, is_causal=True, head_dim=E
    )
    modules = [f"transformer/h/{i}/attn" for i in range(2)]
    clipping.check_statistics(stats, logits_of(model, modules)(params))


def product(query, key):
    """Bloom adds its slopes to this inside the same function, before the softmax."""
    logits = jnp.einsum("bqhe,bkhe->bhqk", query, key) * E**-0.5
    return jnp.where(jnp.tri(LENGTH, dtype=bool), logits, -jnp.inf).max((0, 2, 3))


def test_bloom():
    """One kernel with query, key and value of each head side by side."""
    model, params = model_and_params("Bloom", hidden_size=D, n_head=H, n_layer=2)
    modules = [f"transformer/h/{i}/self_attention" for i in range(2)]
    where = {"module": bloom, "name": "dot_product_attention_weights"}
    logits = logits_of(model, modules, largest=product, **where)
    part = np.arange(3 * D).reshape(H, 3, E)[:, :2].ravel()
    may_change = {f"query_key_value/{x}": np.s_[..., part] for x in ("kernel", "bias")}
    find = mc.fused_attention(E, name="query_key_value", heads_first=True)
    clipping.check_clip(params, logits, find, may_change)
    numbers = {
        "word_embeddings/embedding": None,
        "(query_key_value|dense|dense_h_to_4h|dense_4h_to_h)/kernel": INWARDS,
        "scale": None,
        "bias": None,
    }
    clipping.check_numbers(params, numbers)
