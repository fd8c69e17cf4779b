"""Mamba-2, RWKV-7 and RecurrentGemma, written out: see `written_out`."""

import jax
import jax.numpy as jnp
from written_out import (
    Architecture,
    attend,
    B,
    CAUSAL,
    centered,
    convolved,
    cross_entropy,
    cut,
    D,
    gain,
    gain_and_shift,
    HEAD,
    joined,
    Layer,
    layer_norm,
    Leaf,
    linear,
    linear_leaves,
    matrix,
    normed,
    rms_norm,
    rotated,
    T,
    TABLE,
    TOKENS,
    unit,
    V,
    vector,
    window,
)


# Mamba-2 (arXiv:2405.21060), names of HuggingFace's Mamba2ForCausalLM.

MAMBA_HEADS, STATE, GROUPS, INNER = 4, 5, 2, 24


def _mamba_mixer():
    channels = INNER + 2 * GROUPS * STATE
    return {
        "in_proj": linear_leaves(INNER + channels + MAMBA_HEADS, D),  # z; x, B, C; dt
        "conv1d": {**window(channels), "bias": vector(channels)},
        "A_log": vector(MAMBA_HEADS),
        "D": vector(MAMBA_HEADS),
        "dt_bias": vector(MAMBA_HEADS),
        "norm": gain(INNER),
        "out_proj": linear_leaves(D, INNER),
    }


def _state_space_duality(p, x):
    """The quadratic form: `y = (L * C B^T) (dt x)`, as masked attention."""
    channels = INNER + 2 * GROUPS * STATE
    z, xbc, dt = jnp.split(linear(p["in_proj"], x), [INNER, INNER + channels], -1)
    xbc = jax.nn.silu(convolved(p["conv1d"]["weight"], xbc) + p["conv1d"]["bias"])
    x, b, c = jnp.split(xbc, [INNER, INNER + GROUPS * STATE], -1)
    x, b, c = cut(x, MAMBA_HEADS), cut(b, GROUPS), cut(c, GROUPS)
    b, c = (jnp.repeat(y, MAMBA_HEADS // GROUPS, -2) for y in (b, c))
    dt = jax.nn.softplus(dt + p["dt_bias"])
    passed = jnp.cumsum(-dt * jnp.exp(p["A_log"]), axis=1)
    since = passed[:, :, None] - passed[:, None]
    decay = jnp.exp(jnp.where(CAUSAL[..., None], since, -jnp.inf))
    scores = jnp.einsum("bqhn,bkhn->bqkh", c, b) * decay
    y = jnp.einsum("bqkh,bkhp->bqhp", scores, x * dt[..., None])
    y = joined(y + p["D"][:, None] * x)
    return linear(p["out_proj"], rms_norm(p["norm"], y * jax.nn.silu(z)))


def _mamba_2(params, tokens, seen):
    p = params["backbone"]
    x = p["embeddings"]["weight"][tokens]
    for layer in p["layers"].values():
        x = x + _state_space_duality(layer["mixer"], rms_norm(layer["norm"], x))
    return cross_entropy(linear(params["lm_head"], rms_norm(p["norm_f"], x)))


MAMBA_2 = Architecture(
    {
        "backbone": {
            "embeddings": TABLE,
            "layers": {i: {"norm": gain(), "mixer": _mamba_mixer()} for i in "01"},
            "norm_f": gain(),
        },
        "lm_head": HEAD,
    },
    _mamba_2,
    (TOKENS,),
)


# RWKV-7 (arXiv:2503.14456), names of BlinkDL/RWKV-LM, which keeps low-rank factors as
# `(inputs, outputs)`.

HEADS = 4
MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")


def _time_mix(has_value_residual: bool):
    leaves = {name: vector(1, 1, D) for name in (*MIXES, "w0", "a0", "k_k", "k_a")}
    for name, rank in (("w", 3), ("a", 5), ("g", 7), ("v", 9)):
        if name != "v" or has_value_residual:
            leaves |= {f"{name}1": matrix(D, rank), f"{name}2": matrix(rank, D)}
    leaves |= {"v0": vector(1, 1, D)} if has_value_residual else {}
    return leaves | {
        "r_k": vector(HEADS, D // HEADS),  # of heads, a bonus for the current token
        **dict.fromkeys(("receptance", "key", "value", "output"), linear_leaves(D, D)),
        "ln_x": gain_and_shift(),
    }


def _before(x):
    """Each token's predecessor, less itself."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] - x


def _generalized_delta_rule(receptance, decay, key, value, removed, added):
    """`S = S (diag(w) + a b^T) + v k^T`, read by the receptance at each step."""

    def step(state, inputs):
        r, w, k, v, a, b = inputs
        read = jnp.einsum("bhvk,bhk->bhv", state, a)
        state = state * w[..., None, :] + read[..., None] * b[..., None, :]
        state = state + v[..., None] * k[..., None, :]
        return state, jnp.einsum("bhvk,bhk->bhv", state, r)

    inputs = (receptance, decay, key, value, removed, added)
    steps = jax.tree.map(lambda y: jnp.moveaxis(cut(y, HEADS), 1, 0), inputs)
    start = jnp.zeros((B, HEADS, D // HEADS, D // HEADS))
    return jnp.moveaxis(jax.lax.scan(step, start, steps)[1], 0, 1)


def _rwkv_attention(p, x, first_value):
    shift = _before(x)
    xr, xw, xk, xv, xa, xg = (x + shift * p[name] for name in MIXES)
    receptance, key, value = (
        linear(p[n], y) for n, y in (("receptance", xr), ("key", xk), ("value", xv))
    )
    decay = -jax.nn.softplus(-(p["w0"] + jnp.tanh(xw @ p["w1"]) @ p["w2"])) - 0.5
    if first_value is None:
        first_value = value
    else:
        share = jax.nn.sigmoid(p["v0"] + xv @ p["v1"] @ p["v2"])
        value = value + (first_value - value) * share
    rate = jax.nn.sigmoid(p["a0"] + xa @ p["a1"] @ p["a2"])  # in-context learning rate
    gate = jax.nn.sigmoid(xg @ p["g1"]) @ p["g2"]
    removed = joined(unit(cut(key * p["k_k"], HEADS)))
    key = key * (1 + (rate - 1) * p["k_a"])
    state = (jnp.exp(-jnp.exp(decay)), key, value, -removed, removed * rate)
    out = joined(centered(_generalized_delta_rule(receptance, *state)))
    out = out * p["ln_x"]["weight"] + p["ln_x"]["bias"]
    r, k, v = (cut(y, HEADS) for y in (receptance, key, value))
    out = out + joined((r * k * p["r_k"]).sum(-1, keepdims=True) * v)
    return linear(p["output"], out * gate), first_value


def _rwkv_7(p, tokens, seen):
    x, first_value = p["emb"]["weight"][tokens], None
    for block in p["blocks"].values():
        x = layer_norm(block["ln0"], x) if "ln0" in block else x
        h = layer_norm(block["ln1"], x)
        out, first_value = _rwkv_attention(block["att"], h, first_value)
        x, ffn = x + out, block["ffn"]
        h = layer_norm(block["ln2"], x)
        hidden = jax.nn.relu(linear(ffn["key"], h + _before(h) * ffn["x_k"]))
        x = x + linear(ffn["value"], hidden**2)
    return cross_entropy(linear(p["head"], layer_norm(p["ln_out"], x)))


def _rwkv_block(i: int):
    ffn = {"key": linear_leaves(40, D), "value": linear_leaves(D, 40)}
    ffn |= {"x_k": vector(1, 1, D)}
    norms = {f"ln{j}": gain_and_shift() for j in ((0, 1, 2) if i == 0 else (1, 2))}
    return {"att": _time_mix(i > 0), "ffn": ffn, **norms}


RWKV_7 = Architecture(
    {
        "emb": TABLE,
        "blocks": {str(i): _rwkv_block(i) for i in range(2)},
        "ln_out": gain_and_shift(),
        "head": HEAD,
    },
    _rwkv_7,
    (TOKENS,),
)


# RecurrentGemma (arXiv:2402.19427, arXiv:2404.07839), names of google-deepmind/
# recurrentgemma in Flax: real gates in blocks, attention to the last tokens.

LRU, BLOCKS, GEMMA_HEADS, GEMMA_DIM = 20, 4, 3, 4


def _with_bias(inputs: int, outputs: int):
    return {"kernel": matrix(inputs, outputs), "bias": vector(outputs)}


def _gates():
    side = LRU // BLOCKS
    kernel = matrix(BLOCKS, side, side, inputs=1, outputs=2)
    return {"w": kernel, "b": vector(BLOCKS, side)}


def _scale(n: int = D):
    return {"scale": vector(n)}


def _griffin_block(**temporal):
    up = {"w": matrix(2, D, 30, inputs=1, outputs=2), "b": vector(2, 1, 1, 30)}
    return temporal | {
        "temporal_pre_norm": _scale(),
        "channel_pre_norm": _scale(),
        "mlp_block": {"ffw_up": up, "ffw_down": _with_bias(30, D)},
    }


def _recurrent_leaves():
    return {
        "linear_x": _with_bias(D, LRU),
        "linear_y": _with_bias(D, LRU),
        "linear_out": _with_bias(LRU, D),
        "conv_1d": {"w": vector(4, LRU), "b": vector(LRU)},
        "rg_lru": {"a_param": vector(LRU), "input_gate": _gates(), "a_gate": _gates()},
    }


def _local_attention_leaves():
    return {
        "proj_q": {"kernel": matrix(D, GEMMA_HEADS * GEMMA_DIM)},
        "proj_k": {"kernel": matrix(D, GEMMA_DIM)},
        "proj_v": {"kernel": matrix(D, GEMMA_DIM)},
        "proj_final": _with_bias(GEMMA_HEADS * GEMMA_DIM, D),
    }


def dense(p, x):
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def _in_blocks(p, x):
    return joined(jnp.einsum("bthi,hij->bthj", cut(x, BLOCKS), p["w"]) + p["b"])


def _real_gated_recurrence(p, x):
    """`h = a h + sqrt(1 - a^2) gate x` where `log a = -8 gate softplus(a_param)`."""
    step = -8 * jax.nn.sigmoid(_in_blocks(p["a_gate"], x))
    log_decay = step * jax.nn.softplus(p["a_param"])
    decay = jnp.exp(log_decay)
    x = x * jax.nn.sigmoid(_in_blocks(p["input_gate"], x))
    x = x * jnp.sqrt(1 - jnp.exp(2 * log_decay) + 1e-6)

    def both(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    return jax.lax.associative_scan(both, (decay, x), axis=1)[1]


def _recurrent_block(p, x):
    gate = jax.nn.gelu(dense(p["linear_y"], x))
    x = dense(p["linear_x"], x)
    # The window by hand, as the public code has it.
    padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    taps = p["conv_1d"]["w"]
    x = sum(padded[:, i : i + T] * taps[i] for i in range(4)) + p["conv_1d"]["b"]
    return dense(p["linear_out"], _real_gated_recurrence(p["rg_lru"], x) * gate)


def _local_attention(p, x, seen, path):
    query = rotated(cut(dense(p["proj_q"], x), GEMMA_HEADS))
    key = rotated(cut(dense(p["proj_k"], x), 1))
    value = cut(dense(p["proj_v"], x), 1)
    mask = CAUSAL & ~jnp.tril(CAUSAL, -3)
    out = attend(seen, path, query, key, value, mask=mask)
    return dense(p["proj_final"], joined(out))


def _recurrent_gemma(p, tokens, seen):
    table = p["embedder"]["input_embedding"]
    x = table[tokens] * D**0.5
    for name in [name for name in p if name.startswith("blocks.")]:
        block = p[name]
        h = normed(x) * (1 + block["temporal_pre_norm"]["scale"])
        if "recurrent_block" in block:
            x = x + _recurrent_block(block["recurrent_block"], h)
        else:
            at = f"{name}/attention_block"
            x = x + _local_attention(block["attention_block"], h, seen, at)
        h = normed(x) * (1 + block["channel_pre_norm"]["scale"])
        up = block["mlp_block"]["ffw_up"]
        gate, h = jnp.einsum("btd,cdf->cbtf", h, up["w"]) + up["b"]
        x = x + dense(block["mlp_block"]["ffw_down"], jax.nn.gelu(gate) * h)
    x = normed(x) * (1 + p["final_norm"]["scale"])
    return cross_entropy(jnp.tanh(x @ table.T / 30) * 30)


RECURRENT_GEMMA = Architecture(
    {
        "embedder": {"input_embedding": Leaf((V, D), "embedding")},
        "blocks.0": _griffin_block(recurrent_block=_recurrent_leaves()),
        "blocks.1": _griffin_block(recurrent_block=_recurrent_leaves()),
        "blocks.2": _griffin_block(attention_block=_local_attention_leaves()),
        "final_norm": _scale(),
    },
    _recurrent_gemma,
    (TOKENS,),
    {
        "blocks.2/attention_block": Layer(
            GEMMA_HEADS, ("proj_q/kernel",), ("proj_k/kernel",)
        )
    },
)
