"""Flax models of HuggingFace's `transformers`, read and clipped as they are."""

import functools

import clipping
import jax.numpy as jnp
import numpy as np
import pytest
import transformers  # 4.57, since 5 has no Flax models
from reading_checks import check_model
from transformers.models.bloom import modeling_flax_bloom as bloom


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

    def run(params):
        return model(TOKENS, attention_mask=ATTENDED, params=params).logits

    return run, clipping.randomize(model.params_shape_tree, scale=3.0)


@pytest.mark.parametrize("bias", [False, True])
def test_llama(bias):
    """Flat projections, rotated, with queries in groups."""
    run, params = model_and_params(
        "Llama",
        hidden_size=D,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=H,
        num_key_value_heads=K,
        max_position_embeddings=2 * E,  # the least that its rotation is made for
        attention_bias=bias,
    )
    modules = [f"model/layers/{i}/self_attn" for i in range(2)]
    leaves = ["kernel", "bias"] if bias else ["kernel"]
    # Keys that a group of queries shares stay.
    may_change = {f"q_proj/{leaf}": ... for leaf in leaves}
    numbers = {
        "embed_tokens/embedding": None,
        "[qkvo]_proj/kernel": INWARDS,
        "(gate|up|down)_proj/kernel": INWARDS,
        "(input_layernorm|post_attention_layernorm|norm)/weight": None,
        "lm_head/kernel": None,
    }
    numbers |= {"bias": None} if bias else {}
    check_model(run, params, modules, may_change, numbers)


def test_gpt2():
    """One kernel, turned: queries of all heads, keys, values; its embedding writes."""
    run, params = model_and_params(
        "GPT2", n_embd=D, n_head=H, n_layer=2, n_positions=LENGTH
    )
    modules = [f"transformer/h/{i}/attn/c_attn" for i in range(2)]
    may_change = {"c_attn/kernel": np.s_[: 2 * D], "c_attn/bias": np.s_[: 2 * D]}
    numbers = {
        "(wte|wpe)/embedding": None,
        "(c_attn|c_proj|c_fc)/kernel": TURNED,
        "scale": None,
        "bias": None,
    }
    check_model(run, params, modules, may_change, numbers)


def test_bloom():
    """One kernel with query, key and value of each head side by side.

    Its ALiBi only lowers logits, by nothing where a query meets its own token; the
    largest logit of a head that a clip scales need not be there, so that Bloom has no
    slopes here.
    """
    run, params = model_and_params("Bloom", hidden_size=D, n_head=H, n_layer=2)

    def without_slopes(params):
        build = bloom.build_alibi_tensor
        bloom.build_alibi_tensor = lambda *args, **options: jnp.zeros_like(
            build(*args, **options)
        )
        try:
            return run(params)
        finally:
            bloom.build_alibi_tensor = build

    modules = [f"transformer/h/{i}/self_attention/query_key_value" for i in range(2)]
    part = np.arange(3 * D).reshape(H, 3, E)[:, :2].ravel()
    may_change = {f"query_key_value/{x}": np.s_[..., part] for x in ("kernel", "bias")}
    numbers = {
        "word_embeddings/embedding": None,
        "(query_key_value|dense|dense_h_to_4h|dense_4h_to_h)/kernel": INWARDS,
        "scale": None,
        "bias": None,
    }
    check_model(without_slopes, params, modules, may_change, numbers)
