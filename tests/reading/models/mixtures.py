"""Mixtures of experts, written out: Qwen3-Next, Kimi Linear and DeepSeek-V3."""

import jax
import jax.numpy as jnp
from written_out import (
    Architecture,
    attend,
    B,
    CAUSAL,
    convolved,
    cross_entropy,
    cut,
    D,
    gain,
    HEAD,
    joined,
    Layer,
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
    vector,
    weight,
    window,
)


def _causal_model(layers, run, clipped=(), layer=None, norm=rms_norm, refused=()):
    """A model by its layers, as HuggingFace names it.

    `run(leaves, x, seen, path)` is one layer, `norm` the last one; of `layer` are the
    layers that are `clipped`.
    """

    def loss(params, tokens, seen):
        p = params["model"]
        x = p["embed_tokens"]["weight"][tokens]
        for i, leaves in p["layers"].items():
            x = run(leaves, x, seen, f"model/layers/{i}/self_attn")
        return cross_entropy(linear(params["lm_head"], norm(p["norm"], x)))

    numbered = {str(i): leaves for i, leaves in enumerate(layers)}
    model = {"embed_tokens": TABLE, "layers": numbered, "norm": gain()}
    return Architecture(
        {"model": model, "lm_head": HEAD},
        loss,
        (TOKENS,),
        {f"model/layers/{i}/self_attn": layer for i in clipped},
        tuple(f"model/layers/{i}/self_attn" for i in refused),
    )


def _layer(**leaves):
    return leaves | {"input_layernorm": gain(), "post_attention_layernorm": gain()}


# Gated DeltaNet (arXiv:2412.06464) and gated attention (arXiv:2505.06708) with experts,
# names of HuggingFace's Qwen3NextForCausalLM.

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3, 5
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
EXPERTS, EXPERT_GROUPS, INSIDE = 6, 2, 10


def _delta_net():
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    return {
        "in_proj_qkvz": linear_leaves(2 * keys + 2 * values, D),
        "in_proj_ba": weight("vector", 2 * VALUE_HEADS, D),  # numbers of heads
        "conv1d": window(2 * keys + values),
        "dt_bias": vector(VALUE_HEADS),
        "A_log": vector(VALUE_HEADS),
        "norm": gain(VALUE_DIM),
        "out_proj": linear_leaves(D, values),
    }


def _gated_attention():
    return {
        "q_proj": linear_leaves(2 * HEADS * HEAD_DIM, D),  # each head's query and gate
        "k_proj": linear_leaves(KV_HEADS * HEAD_DIM, D),
        "v_proj": linear_leaves(KV_HEADS * HEAD_DIM, D),
        "o_proj": linear_leaves(D, HEADS * HEAD_DIM),
        "q_norm": gain(HEAD_DIM),
        "k_norm": gain(HEAD_DIM),
    }


def _gated_mlp(inside: int = INSIDE):
    return {
        "gate_proj": linear_leaves(inside, D),
        "up_proj": linear_leaves(inside, D),
        "down_proj": linear_leaves(D, inside),
    }


def _qwen_experts():
    return {
        "gate": weight("router", EXPERTS, D),
        "experts": {str(i): _gated_mlp() for i in range(EXPERTS)},
        "shared_expert": _gated_mlp(),
        "shared_expert_gate": weight("vector", 1, D),
    }


def one_plus_norm(p, x):
    """With a gain that starts at zero: no scaling of it scales the result."""
    return normed(x) * (1 + p["weight"])


def delta_rule(query, key, value, decay, beta):
    """`S = decay S + k beta (v - decay S k)`, read by the query at each step."""

    def step(state, inputs):
        q, k, v, g, beta = inputs
        state = state * g
        error = (v - jnp.einsum("bhkv,bhk->bhv", state, k)) * beta
        state = state + k[..., None] * error[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    steps = tuple(jnp.moveaxis(y, 1, 0) for y in (query, key, value, decay, beta))
    start = jnp.zeros((B, query.shape[2], query.shape[3], value.shape[3]))
    return jnp.moveaxis(jax.lax.scan(step, start, steps)[1], 0, 1)


def _gated_delta_net(p, x):
    each = VALUE_HEADS // KEY_HEADS
    qkvz = cut(linear(p["in_proj_qkvz"], x), KEY_HEADS)
    ends = [KEY_DIM, 2 * KEY_DIM, 2 * KEY_DIM + each * VALUE_DIM]
    query, key, value, z = jnp.split(qkvz, ends, -1)
    b, a = jnp.split(cut(linear(p["in_proj_ba"], x), KEY_HEADS), 2, -1)
    mixed = jnp.concatenate([joined(y) for y in (query, key, value)], -1)
    mixed = jax.nn.silu(convolved(p["conv1d"]["weight"], mixed))
    keys = KEY_HEADS * KEY_DIM
    query, key, value = jnp.split(mixed, [keys, 2 * keys], -1)
    query, key = (jnp.repeat(unit(cut(y, KEY_HEADS)), each, -2) for y in (query, key))
    beta = jax.nn.sigmoid(joined(b))[..., None]
    step = jax.nn.softplus(joined(a) + p["dt_bias"])
    decay = jnp.exp(-jnp.exp(p["A_log"]) * step)[..., None, None]
    out = delta_rule(query, key, cut(value, VALUE_HEADS), decay, beta)
    out = rms_norm(p["norm"], out) * jax.nn.silu(z.reshape(out.shape))
    return linear(p["out_proj"], joined(out))


def _attention_with_gate(p, x, seen, path):
    query, gate = jnp.split(cut(linear(p["q_proj"], x), HEADS), 2, -1)
    query = one_plus_norm(p["q_norm"], query)
    key = one_plus_norm(p["k_norm"], cut(linear(p["k_proj"], x), KV_HEADS))

    def turned(y):  # the first entries alone
        return jnp.concatenate([rotated(y[..., :2]), y[..., 2:]], -1)

    value = cut(linear(p["v_proj"], x), KV_HEADS)
    out = attend(seen, path, turned(query), turned(key), value, mask=CAUSAL)
    return linear(p["o_proj"], joined(out * jax.nn.sigmoid(gate)))


def gated_mlp(p, x):
    hidden = jax.nn.silu(linear(p["gate_proj"], x)) * linear(p["up_proj"], x)
    return linear(p["down_proj"], hidden)


def _mixture(p, x):
    """Softmax, the best two; a shared expert with a gate of one number."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(linear(p["gate"], x)), 2)
    gates = gates / gates.sum(-1, keepdims=True)
    weights = jnp.einsum("btke,btk->bte", jax.nn.one_hot(chosen, EXPERTS), gates)
    shared = jax.nn.sigmoid(linear(p["shared_expert_gate"], x))
    out = shared * gated_mlp(p["shared_expert"], x)
    for i, expert in p["experts"].items():
        out = out + weights[..., int(i), None] * gated_mlp(expert, x)
    return out


def _qwen_layer(p, x, seen, path):
    h = one_plus_norm(p["input_layernorm"], x)
    if "linear_attn" in p:
        x = x + _gated_delta_net(p["linear_attn"], h)
    else:
        x = x + _attention_with_gate(p["self_attn"], h, seen, path)
    return x + _mixture(p["mlp"], one_plus_norm(p["post_attention_layernorm"], x))


QWEN3_NEXT = _causal_model(
    [
        _layer(linear_attn=_delta_net(), mlp=_qwen_experts()),
        _layer(self_attn=_gated_attention(), mlp=_qwen_experts()),
    ],
    _qwen_layer,
    norm=one_plus_norm,
    refused=(1,),
)


# Kimi Delta Attention with latent attention without positions (arXiv:2510.26692), names
# of moonshotai/Kimi-Linear-48B-A3B-Instruct.

LATENT, NOPE, ROPE, RANK = 7, 4, 2, 3


def _kimi_delta_attention():
    flat = HEADS * HEAD_DIM
    return {
        **{f"{n}_proj": linear_leaves(flat, D) for n in "qkv"},
        **{f"{n}_conv1d": window(flat) for n in "qkv"},
        "A_log": vector(1, 1, HEADS, 1),
        "f_a_proj": linear_leaves(RANK, D),
        "f_b_proj": linear_leaves(flat, RANK),
        "dt_bias": vector(flat),
        "b_proj": weight("vector", HEADS, D),  # one number for each head
        "g_a_proj": linear_leaves(RANK, D),
        "g_b_proj": linear_leaves(flat, RANK),
        "o_norm": gain(HEAD_DIM),
        "o_proj": linear_leaves(D, flat),
    }


def _latent_attention(query: dict):
    return query | {
        "kv_a_proj_with_mqa": linear_leaves(LATENT + ROPE, D),
        "kv_a_layernorm": gain(LATENT),
        "kv_b_proj": linear_leaves(HEADS * (NOPE + HEAD_DIM), LATENT),
        "o_proj": linear_leaves(D, HEADS * HEAD_DIM),
    }


def _sigmoid_router():
    return {
        "weight": Leaf((EXPERTS, D), "router"),
        "e_score_correction_bias": Leaf((EXPERTS,), "frozen"),  # it only chooses
    }


def sigmoid_gates(p, x, groups: int = 1):
    """A bias that only the choice sees balances the load (arXiv:2408.15664)."""
    scores = jax.nn.sigmoid(x @ p["weight"].T)
    biased = scores + p["e_score_correction_bias"]
    if groups > 1:  # the one whose best two experts have most
        of_groups = cut(biased, groups)
        best = jnp.argmax(jax.lax.top_k(of_groups, 2)[0].sum(-1), -1)
        is_kept = jax.nn.one_hot(best, groups, dtype=bool)[..., None]
        biased = joined(jnp.where(is_kept, of_groups, -jnp.inf))
    _, chosen = jax.lax.top_k(biased, 2)
    gates = jnp.take_along_axis(scores, chosen, -1)
    gates = gates / gates.sum(-1, keepdims=True)
    return jnp.einsum("btke,btk->bte", jax.nn.one_hot(chosen, EXPERTS), gates)


def _kimi_experts():
    expert = {
        "w1": linear_leaves(INSIDE, D),
        "w2": linear_leaves(D, INSIDE),
        "w3": linear_leaves(INSIDE, D),
    }
    return {
        "gate": _sigmoid_router(),
        "experts": {str(i): expert for i in range(EXPERTS)},
        "shared_experts": _gated_mlp(),
    }


def _delta_attention(p, x):
    def made(n):
        y = convolved(p[f"{n}_conv1d"]["weight"], linear(p[f"{n}_proj"], x))
        return cut(jax.nn.silu(y), HEADS)

    query, key, value = map(made, "qkv")
    step = linear(p["f_b_proj"], linear(p["f_a_proj"], x)) + p["dt_bias"]
    step = jax.nn.softplus(cut(step, HEADS))
    decay = jnp.exp(-jnp.exp(p["A_log"]) * step)[..., None]
    beta = jax.nn.sigmoid(linear(p["b_proj"], x))[..., None]
    out = delta_rule(unit(query), unit(key), value, decay, beta)
    gate = cut(linear(p["g_b_proj"], linear(p["g_a_proj"], x)), HEADS)
    out = rms_norm(p["o_norm"], out) * jax.nn.sigmoid(gate)
    return linear(p["o_proj"], joined(out))


def latent_attention(p, query, x, seen, path, turn=lambda y: y):
    low, shared = jnp.split(linear(p["kv_a_proj_with_mqa"], x), [LATENT], -1)
    kv = cut(linear(p["kv_b_proj"], rms_norm(p["kv_a_layernorm"], low)), HEADS)
    key, value = jnp.split(kv, [NOPE], -1)
    query = cut(query, HEADS)
    query = jnp.concatenate([query[..., :NOPE], turn(query[..., NOPE:])], -1)
    shared = jnp.broadcast_to(turn(shared[:, :, None]), (B, T, HEADS, ROPE))
    key = jnp.concatenate([key, shared], -1)
    out = attend(seen, path, query, key, value, mask=CAUSAL)
    return linear(p["o_proj"], joined(out))


def _kimi_mixture(p, x):
    weights = sigmoid_gates(p["gate"], x)
    out = gated_mlp(p["shared_experts"], x)
    for i, e in p["experts"].items():
        hidden = jax.nn.silu(linear(e["w1"], x)) * linear(e["w3"], x)
        out = out + weights[..., int(i), None] * linear(e["w2"], hidden)
    return out


def _kimi_layer(p, x, seen, path):
    h, q = rms_norm(p["input_layernorm"], x), p["self_attn"]
    if "A_log" in q:
        x = x + _delta_attention(q, h)
    else:
        x = x + latent_attention(q, linear(q["q_proj"], h), h, seen, path)
    h = rms_norm(p["post_attention_layernorm"], x)
    return x + _kimi_mixture(p["block_sparse_moe"], h)


FLAT_QUERY = {"q_proj": linear_leaves(HEADS * (NOPE + ROPE), D)}
KIMI_LINEAR = _causal_model(
    [
        _layer(self_attn=attention, block_sparse_moe=_kimi_experts())
        for attention in (_kimi_delta_attention(), _latent_attention(FLAT_QUERY))
    ],
    _kimi_layer,
    clipped=(1,),
    layer=Layer(HEADS, ("q_proj/weight",), ("kv_b_proj/weight",), ("q_proj/weight",)),
)


# DeepSeek-V3 (arXiv:2412.19437): experts in groups, of which the best is kept. Names of
# HuggingFace's DeepseekV3ForCausalLM, which has all experts in one leaf.


def _deepseek_experts():
    return {
        "gate": _sigmoid_router(),
        "experts": {
            "gate_up_proj": matrix(EXPERTS, 2 * INSIDE, D, inputs=2, outputs=1),
            "down_proj": matrix(EXPERTS, D, INSIDE, inputs=2, outputs=1),
        },
        "shared_experts": _gated_mlp(),
    }


def _deepseek_mixture(p, x):
    weights = sigmoid_gates(p["gate"], x, EXPERT_GROUPS)
    gate_up = jnp.einsum("btd,efd->ebtf", x, p["experts"]["gate_up_proj"])
    gate, up = jnp.split(gate_up, 2, -1)
    hidden = jax.nn.silu(gate) * up
    out = jnp.einsum("ebtf,edf->ebtd", hidden, p["experts"]["down_proj"])
    out = jnp.einsum("ebtd,bte->btd", out, weights)
    return out + gated_mlp(p["shared_experts"], x)


def _deepseek_layer(p, x, seen, path):
    h, q = rms_norm(p["input_layernorm"], x), p["self_attn"]
    low = rms_norm(q["q_a_layernorm"], linear(q["q_a_proj"], h))
    query = linear(q["q_b_proj"], low)
    x = x + latent_attention(q, query, h, seen, path, rotated)
    h, mlp = rms_norm(p["post_attention_layernorm"], x), p["mlp"]
    return x + (_deepseek_mixture(mlp, h) if "gate" in mlp else gated_mlp(mlp, h))


LOW_QUERY = {
    "q_a_proj": linear_leaves(RANK, D),
    "q_a_layernorm": gain(RANK),
    "q_b_proj": linear_leaves(HEADS * (NOPE + ROPE), RANK),
}
DEEPSEEK_V3 = _causal_model(
    [
        _layer(self_attn=_latent_attention(LOW_QUERY), mlp=mlp)
        for mlp in (_gated_mlp(12), _deepseek_experts())
    ],
    _deepseek_layer,
    clipped=(0, 1),
    layer=Layer(
        HEADS, ("q_b_proj/weight",), ("kv_b_proj/weight",), ("q_b_proj/weight",)
    ),
)
