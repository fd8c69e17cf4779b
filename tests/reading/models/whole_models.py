"""Whole models that people train, short: what each leaf is, and what is computed.

Hybrids of delta rules and attention as their chunkwise forms have them (the recurrent
ones are in `mixtures`), layers that the loss stacks, and exponential gates. Those of
pictures and atoms are in `models_of_space`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from written_out import (
    Architecture,
    B,
    CAUSAL,
    centered,
    convolved,
    cut,
    D,
    joined,
    Layer,
    Leaf,
    matrix,
    normed,
    rotated,
    Seen,
    T,
    TOKENS,
    unit,
    V,
    vector,
)


H, K, CHUNK = 4, 4, 3  # heads, features of each, tokens of a chunk
FLAT = H * K
EMBEDDING, HEAD = Leaf((V, D), "embedding"), Leaf((D, V), "head")
TO_HEADS, FROM_HEADS = (
    matrix(D, H, K, outputs=(1, 2)),
    matrix(H, K, D, inputs=(0, 1), outputs=2),
)
OF_HEADS = vector(D, H)  # a projection to one number for each head


def next_token_loss(logits, tokens):
    said = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(said, tokens[:, 1:, None], -1))


def weighed(seen: Seen, path: str, logits, value, mask=True):
    """Values by the softmax of `(b, h, q, k)`, whose largest entries are noted."""
    shown = jnp.where(mask, logits, -jnp.inf)
    if seen is not None:
        seen[path] = shown.max((0, 2, 3))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(shown), value)


def gated_mlp(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


MLP = {"gate": matrix(D, 24), "up": matrix(D, 24), "down": matrix(24, D)}


# Kimi Linear (arXiv:2510.26692): Kimi Delta Attention and latent attention in turn.


def chunks(y):
    """`(b, t, h, ...)` as `(b, h, chunks, tokens, ...)`."""
    return jnp.moveaxis(y.reshape(B, T // CHUNK, CHUNK, *y.shape[2:]), 3, 1)


def unchunked(y):
    return jnp.moveaxis(y, 1, 3).reshape(B, T, H, -1)


def kimi_delta_rule(q, k, v, log_decay, beta):
    """The chunkwise form: fla's `naive_chunk_kda`. Decays are of channels."""
    q, k, v, log_decay, beta = map(chunks, (q, k, v, log_decay, beta))
    g = jnp.cumsum(log_decay, -2)
    since = g[..., :, None, :] - g[..., None, :, :]
    decay = jnp.exp(jnp.where(CAUSAL[:CHUNK, :CHUNK, None], since, -jnp.inf))
    a = jnp.einsum("...id,...jd,...ijd->...ij", k, k, decay) * beta[..., None]
    a = -jnp.tril(a, -1)
    for i in range(1, CHUNK):  # the inverse, row by row
        row = a[..., i, :i] + (a[..., i, :, None] * a[..., :, :i]).sum(-2)
        a = a.at[..., i, :i].set(row)
    a = (a + jnp.eye(CHUNK)) * beta[..., None, :]
    w, u = a @ (jnp.exp(g) * k), a @ v
    local = jnp.einsum("...id,...jd,...ijd->...ij", q, k, decay)

    def step(state, chunk):
        q, k, w, u, g, local = chunk
        new = u - w @ state
        out = (q * jnp.exp(g)) @ state + local @ new
        left = jnp.exp(g[..., -1:, :] - g)
        state = state * jnp.exp(g[..., -1, :, None]) + (left * k).swapaxes(-1, -2) @ new
        return state, out

    xs = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), (q, k, w, u, g, local))
    _, out = jax.lax.scan(step, jnp.zeros((B, H, K, K)), xs)
    return unchunked(jnp.moveaxis(out, 0, 2))


def _delta_attention(p, x):
    def made(n):
        return cut(jax.nn.silu(convolved(p[f"{n}_conv"], x @ p[n])), H)

    q, k, v = map(made, "qkv")
    step = jax.nn.softplus(cut(x @ p["f_a"] @ p["f_b"] + p["dt_bias"], H))
    log_decay = -jnp.exp(p["A_log"])[:, None] * step
    beta = jax.nn.sigmoid(x @ p["beta"])
    out = kimi_delta_rule(unit(q), unit(k), v, log_decay, beta)
    gate = jax.nn.sigmoid(x @ p["g_a"] @ p["g_b"])
    return (joined(normed(out) * p["norm"]) * gate) @ p["o"]


ROPE, LATENT, RANK = 4, 7, 3


def _latent_attention(p, x, seen, path):
    """Parts with and without positions by themselves; one rotary key for all heads."""
    q, q_rope = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in ("q", "q_rope"))
    low = normed(x @ p["kv_down"]) * p["kv_norm"]
    k, v = (jnp.einsum("btc,chk->bthk", low, p[n]) for n in ("k_up", "v_up"))
    k_rope = rotated((x @ p["k_rope"])[:, :, None])[:, :, 0]
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    logits = logits + jnp.einsum("bqhr,bkr->bhqk", rotated(q_rope), k_rope)
    out = weighed(seen, path, logits * (K + ROPE) ** -0.5, v, CAUSAL)
    return jnp.einsum("bthk,hkd->btd", out, p["o"])


def _kimi_linear(p, tokens, seen):
    x = p["embed"][tokens]
    for name, layer in p["layers"].items():
        h, mixer = normed(x) * layer["norm"], layer["mixer"]
        if "A_log" in mixer:
            x = x + _delta_attention(mixer, h)
        else:
            x = x + _latent_attention(mixer, h, seen, f"layers/{name}/mixer")
        x = x + gated_mlp(layer["mlp"], normed(x) * layer["mlp_norm"])
    return next_token_loss((normed(x) * p["norm"]) @ p["head"], tokens)


def _layer(**mixer):
    return {"mixer": mixer, "mlp": MLP, "norm": vector(D), "mlp_norm": vector(D)}


_DELTA = _layer(
    **{n: matrix(D, FLAT) for n in "qkv"},
    **{f"{n}_conv": vector(FLAT, 1, 3) for n in "qkv"},
    **{f"{n}_a": matrix(D, RANK) for n in "fg"},
    **{f"{n}_b": matrix(RANK, FLAT) for n in "fg"},
    o=matrix(FLAT, D), norm=vector(K), beta=OF_HEADS, A_log=vector(H),
    dt_bias=vector(FLAT),
)  # fmt: skip
_LATENT = _layer(
    q=TO_HEADS, q_rope=matrix(D, H, ROPE, outputs=(1, 2)), k_rope=matrix(D, ROPE),
    kv_down=matrix(D, LATENT), kv_norm=vector(LATENT), o=FROM_HEADS,
    **{f"{n}_up": matrix(LATENT, H, K, outputs=(1, 2)) for n in "kv"},
)  # fmt: skip

KIMI_LINEAR = Architecture(
    {
        "embed": EMBEDDING,
        "layers": {f"{i}": (_DELTA, _LATENT)[i % 2] for i in range(4)},
        "norm": vector(D),
        "head": HEAD,
    },
    _kimi_linear,
    (TOKENS,),
    {f"layers/{i}/mixer": Layer(H, ("q",), ("k_up",), ("q_rope",)) for i in (1, 3)},
)


# Qwen3-Next: Gated DeltaNet (arXiv:2412.06464) by a triangular solve, then attention
# whose query kernel makes a gate, too (arXiv:2505.06708).

KEY_HEADS, PARTIAL = 2, 2  # heads of keys, features that turn


def gated_delta_rule(q, k, v, log_decay, beta):
    """Chunks, as `torch_chunk_gated_delta_rule`; a decay is of a head."""
    q, k, v, log_decay, beta = map(chunks, (q, k, v, log_decay, beta))
    g = jnp.cumsum(log_decay, -1)
    since = g[..., :, None] - g[..., None, :]
    decay = jnp.exp(jnp.where(CAUSAL[:CHUNK, :CHUNK], since, -jnp.inf))
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    system = jnp.eye(CHUNK) + jnp.tril(k_beta @ k.swapaxes(-1, -2) * decay, -1)
    solve = functools.partial(
        jax.scipy.linalg.solve_triangular, system, lower=True, unit_diagonal=True
    )
    u, w = solve(v_beta), solve(k_beta * jnp.exp(g)[..., None])
    state, outs = jnp.zeros((B, H, K, K)), []
    for i in range(T // CHUNK):
        qi, ki, gi = q[:, :, i], k[:, :, i], g[:, :, i, :, None]
        new = u[:, :, i] - w[:, :, i] @ state
        local = (qi @ ki.swapaxes(-1, -2)) * decay[:, :, i]
        outs.append((qi * jnp.exp(gi)) @ state + local @ new)
        last = gi[:, :, -1:]
        left = (ki * jnp.exp(last - gi)).swapaxes(-1, -2)
        state = state * jnp.exp(last) + left @ new
    return unchunked(jnp.stack(outs, 2))


def _gated_delta_net(p, x):
    mixed = jax.nn.silu(convolved(p["conv"], x @ p["qkv"]))
    q, k, v = jnp.split(mixed, [KEY_HEADS * K, 2 * KEY_HEADS * K], -1)
    q, k = (jnp.repeat(unit(cut(y, KEY_HEADS)), H // KEY_HEADS, 2) for y in (q, k))
    beta = jax.nn.sigmoid(x @ p["b"])
    log_decay = -jnp.exp(p["A_log"]) * jax.nn.softplus(x @ p["a"] + p["dt_bias"])
    out = gated_delta_rule(q * K**-0.5, k, cut(v, H), log_decay, beta)
    out = normed(out) * p["norm"] * jax.nn.silu(cut(x @ p["z"], H))
    return joined(out) @ p["o"]


def _gated_attention(p, x, seen, path, one):
    q, gate = jnp.split(jnp.einsum("btd,dhk->bthk", x, p["q"]), 2, -1)
    k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "kv")

    def turned(y, g):
        y = normed(y) * (one + g)
        return jnp.concatenate([rotated(y[..., :PARTIAL]), y[..., PARTIAL:]], -1)

    q, k = turned(q, p["q_norm"]), turned(k, p["k_norm"])
    k, v = (jnp.repeat(y, H // KEY_HEADS, 2) for y in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * K**-0.5
    out = weighed(seen, path, logits, v, CAUSAL) * jax.nn.sigmoid(gate)
    return jnp.einsum("bthk,hkd->btd", out, p["o"])


def _qwen3_next(p, tokens, seen, one=1.0):
    x = p["embed"][tokens]
    for name, layer in p["layers"].items():
        h, mixer = normed(x) * (1 + layer["norm"]), layer["mixer"]
        if "A_log" in mixer:
            x = x + _gated_delta_net(mixer, h)
        else:
            x = x + _gated_attention(mixer, h, seen, f"layers/{name}/mixer", one)
        x = x + gated_mlp(layer["mlp"], normed(x) * (1 + layer["mlp_norm"]))
    return next_token_loss((normed(x) * (1 + p["norm"])) @ p["head"], tokens)


_MIXED = (2 * KEY_HEADS + H) * K
_GATED_DELTA = _layer(
    qkv=matrix(D, _MIXED), conv=vector(_MIXED, 1, 3), z=matrix(D, FLAT),
    o=matrix(FLAT, D), norm=vector(K), A_log=vector(H), dt_bias=vector(H),
    a=OF_HEADS, b=OF_HEADS,
)  # fmt: skip
_GATED = _layer(
    q=matrix(D, H, 2 * K, outputs=(1, 2)), o=FROM_HEADS,
    q_norm=vector(K), k_norm=vector(K),
    **{n: matrix(D, KEY_HEADS, K, outputs=(1, 2)) for n in "kv"},
)  # fmt: skip
_QWEN_LEAVES = {
    "embed": EMBEDDING,
    "layers": {"0": _GATED_DELTA, "1": _GATED},
    "norm": vector(D),
    "head": HEAD,
}

#: As published: gains of query and key are kept as differences from one.
QWEN3_NEXT = Architecture(
    _QWEN_LEAVES, _qwen3_next, (TOKENS,), refused=("layers/1/mixer",)
)
#: As stored after the one is added: all heads share the gains, so all take one factor.
QWEN3_NEXT_ADDED = Architecture(
    _QWEN_LEAVES,
    functools.partial(_qwen3_next, one=0.0),
    (TOKENS,),
    {"layers/1/mixer": Layer(H, ("q_norm",), ("k_norm",))},
)


# google-deepmind/simply in its default setting: every block has leaves of its own, and
# the loss stacks those of a pattern of two for a scan.

PATTERN = ("global", "local")
WINDOW = CAUSAL & ~np.tril(CAUSAL, -3)


def _simply_norm(p, x):
    return normed(x) * (p["scale"] + 1.0)


def _simply_block(p, x, kind, seen=None, path=""):
    h, attn = _simply_norm(p["pre_ln_0"], x), p["attn"]
    q, k, v = (jnp.einsum("ihd,...i->...hd", attn[f"{n}_proj"]["w"], h) for n in "qkv")
    q = rotated(q) * (
        1.442695041 / K**0.5 * jax.nn.softplus(attn["per_dim_scale"]["scale"])
    )
    q = q.reshape(B, T, KEY_HEADS, H // KEY_HEADS, K)
    logits = jnp.einsum("bqngd,bknd->bngqk", q, rotated(k))
    mask = {"global": CAUSAL, "local": WINDOW}[kind]
    if seen is not None:
        seen[path] = jnp.where(mask, logits, -jnp.inf).max((0, 3, 4)).reshape(H)
    capped = jnp.where(mask, 50.0 * jnp.tanh(logits / 50.0), -1e30)
    out = jnp.einsum("bngqk,bknd->bqngd", jax.nn.softmax(capped), v)
    out = out.reshape(B, T, H, K)
    x = x + jnp.einsum("ihd,...hd->...i", attn["o_proj"]["w"], out)
    h, ffn = _simply_norm(p["pre_ln_1"], x), p["ffn"]
    gate = jax.nn.gelu(h @ ffn["ffn_0_gate"]["w"])
    return x + (gate * (h @ ffn["ffn_0"]["w"])) @ ffn["ffn_1"]["w"]


def _simply(p, tokens, seen):
    x = p["embed_linear"]["w"][tokens] * D**0.5
    blocks = [p[f"block_{i}"] for i in range(4)]
    if seen is not None:  # layer by layer, nothing is stacked
        for i, block in enumerate(blocks):
            kind = PATTERN[i % 2]
            x = _simply_block(block, x, kind, seen, f"block_{i}/attn")
    else:
        stacks = [
            jax.tree.map(lambda *y: jnp.stack(y), *blocks[i::2]) for i in range(2)
        ]

        @jax.remat
        def repeat(x, stacked):
            for block, kind in zip(stacked, PATTERN, strict=True):
                x = _simply_block(block, x, kind)
            return x, None

        x, _ = jax.lax.scan(repeat, x, stacks)
    x = _simply_norm(p["final_ln"], x)
    return next_token_loss(x @ p["embed_linear"]["w"].T, tokens)


_SCALE = {"scale": vector(D)}
_OF_FFN = {"0": "up", "0_gate": "gate", "1": "down"}
_TO_GROUPS = matrix(D, KEY_HEADS, K, outputs=(1, 2))
_BLOCK = {
    "attn": {
        "q_proj": {"w": TO_HEADS},
        "k_proj": {"w": _TO_GROUPS},
        "v_proj": {"w": _TO_GROUPS},
        "o_proj": {"w": matrix(D, H, K, inputs=(1, 2), outputs=0)},
        "per_dim_scale": {"scale": vector(K)},
    },
    "ffn": {f"ffn_{n}": {"w": MLP[of]} for n, of in _OF_FFN.items()},
    "pre_ln_0": _SCALE,
    "pre_ln_1": _SCALE,
}
SIMPLY = Architecture(
    {
        "embed_linear": {"w": EMBEDDING},
        **{f"block_{i}": _BLOCK for i in range(4)},
        "final_ln": _SCALE,
    },
    _simply,
    (TOKENS,),
    {f"block_{i}/attn": Layer(H, ("q_proj/w",), ("k_proj/w",)) for i in range(4)},
)


# xLSTM (arXiv:2405.04517), structure and names of NX-AI/xlstm: mLSTM and sLSTM. Neither
# has a softmax: an exponential that is divided by its own sum is a gate.


def mlstm_parallel(q, k, v, i, f):
    """All tokens at once, `(b, h, t, d)`, with gates `(b, h, t)`."""
    passed = jnp.cumsum(jax.nn.log_sigmoid(f), -1)
    log_d = passed[..., :, None] - passed[..., None, :] + i[..., None, :]
    log_d = jnp.where(CAUSAL, log_d, -jnp.inf)
    most = log_d.max(-1, keepdims=True)
    scores = (q @ k.swapaxes(-1, -2)) * K**-0.5 * jnp.exp(log_d - most)
    total = jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), jnp.exp(-most))
    return (scores / (total + 1e-6)) @ v


def mlstm_recurrent(q, k, v, i, f):
    """The same, token by token."""

    def step(carry, inputs):
        memory, total, most = carry
        q, k, v, i, f = inputs
        old, most = (
            jax.nn.log_sigmoid(f) + most,
            jnp.maximum(jax.nn.log_sigmoid(f) + most, i),
        )
        keep, add = jnp.exp(old - most)[..., None], jnp.exp(i - most)[..., None]
        k = k * K**-0.5
        memory = keep[..., None] * memory + (add * k)[..., None] * v[..., None, :]
        total = keep * total + add * k
        scale = jnp.maximum(jnp.abs((total * q).sum(-1)), jnp.exp(-most))
        read = jnp.einsum("bhkv,bhk->bhv", memory, q)
        return (memory, total, most), read / (scale[..., None] + 1e-6)

    xs = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), (q, k, v, i, f))
    start = (jnp.zeros((B, H, K, K)), jnp.zeros((B, H, K)), jnp.zeros((B, H)))
    return jnp.moveaxis(jax.lax.scan(step, start, xs)[1], 0, 2)


def _headwise(x, kernel):
    return joined(jnp.einsum("bthi,hij->bthj", cut(x, H), kernel))


def _group_norm(x, gain):
    return joined(centered(cut(x, H))) * gain


def _mlstm_block(p, x, memory):
    inner, z = jnp.split(x @ p["proj_up"], 2, -1)
    mixed = jax.nn.silu(convolved(p["conv1d"], inner) + p["conv1d_bias"])
    q, k = _headwise(mixed, p["q_proj"]), _headwise(mixed, p["k_proj"])
    v = _headwise(inner, p["v_proj"])
    gates = jnp.concatenate([q, k, v], -1)
    i, f = (gates @ p[f"{n}gate"] + p[f"{n}gate_bias"] for n in "if")
    heads = (cut(y, H).swapaxes(1, 2) for y in (q, k, v))
    h = memory(*heads, i.swapaxes(1, 2), f.swapaxes(1, 2))
    h = (
        _group_norm(joined(h.swapaxes(1, 2)), p["outnorm"])
        + p["learnable_skip"] * mixed
    )
    return (h * jax.nn.silu(z)) @ p["proj_down"]


def _slstm_cell(p, gates):
    """Gates `(b, t, 4, h, k)` in time, with kernels of heads on what came before."""

    def step(carry, wx):
        y, c, n, m = carry
        raw = wx + jnp.einsum("bhk,hkgj->bghj", y, p["recurrent"]) + p["bias"]
        i, f, z, o = jnp.moveaxis(raw, 1, 0)
        kept = jax.nn.log_sigmoid(f) + m
        most = jnp.maximum(kept, i)
        add, keep = jnp.exp(i - most), jnp.exp(kept - most)
        c = keep * c + add * jnp.tanh(z)
        n = keep * n + add
        y = jax.nn.sigmoid(o) * c / n
        return (y, c, n, most), y

    start = jnp.zeros((B, H, K))
    ys = jax.lax.scan(
        step, (start, start, start + 1e-6, start), jnp.moveaxis(gates, 1, 0)
    )[1]
    return joined(jnp.moveaxis(ys, 0, 1))


def _slstm_block(p, x):
    mixed = jax.nn.silu(convolved(p["conv1d"], x) + p["conv1d_bias"])
    made = [_headwise(mixed, p[f"{n}gate"]) for n in "if"]
    made += [_headwise(x, p[f"{n}gate"]) for n in "zo"]
    gates = jnp.stack([cut(y, H) for y in made], 2)
    return _group_norm(_slstm_cell(p, gates), p["group_norm"])


def _xlstm(p, tokens, seen, memory=mlstm_parallel):
    x = p["embed"][tokens]
    for block in p["blocks"].values():
        h = centered(x) * block["norm"]
        if "mlstm" in block:
            x = x + _mlstm_block(block["mlstm"], h, memory)
        else:
            x = x + _slstm_block(block["slstm"], h)
            gate, up = jnp.split(
                centered(x) * block["ffn_norm"] @ block["ffn_up"], 2, -1
            )
            x = x + (jax.nn.gelu(gate) * up) @ block["ffn_down"]
    return next_token_loss(centered(x) * p["norm"] @ p["head"], tokens)


_BLOCKS = matrix(H, K, K, inputs=1, outputs=2)
_CONV = {"conv1d": vector(FLAT, 1, 3), "conv1d_bias": vector(FLAT)}
_MLSTM = {
    "proj_up": matrix(D, 2 * FLAT), "proj_down": matrix(FLAT, D), **_CONV,
    "q_proj": _BLOCKS, "k_proj": _BLOCKS, "v_proj": _BLOCKS, "outnorm": vector(FLAT),
    "igate": vector(3 * FLAT, H), "fgate": vector(3 * FLAT, H), "igate_bias": vector(H),
    "fgate_bias": vector(H), "learnable_skip": vector(FLAT),
}  # fmt: skip
_SLSTM = {
    **{f"{n}gate": _BLOCKS for n in "ifzo"}, **_CONV, "group_norm": vector(FLAT),
    "recurrent": matrix(H, K, 4, K, inputs=1, outputs=3), "bias": vector(4, H, K),
}  # fmt: skip
_MLSTM_BLOCK = {"norm": vector(D), "mlstm": _MLSTM}
_SLSTM_BLOCK = {
    "norm": vector(D), "slstm": _SLSTM, "ffn_norm": vector(D),
    "ffn_up": matrix(D, 48), "ffn_down": matrix(24, D),
}  # fmt: skip
_XLSTM_LEAVES = {
    "embed": EMBEDDING,
    "blocks": {"0": _MLSTM_BLOCK, "1": _SLSTM_BLOCK},
    "norm": vector(D),
    "head": HEAD,
}
XLSTM = Architecture(_XLSTM_LEAVES, _xlstm, (TOKENS,))
XLSTM_RECURRENT = Architecture(
    _XLSTM_LEAVES, functools.partial(_xlstm, memory=mlstm_recurrent), (TOKENS,)
)
