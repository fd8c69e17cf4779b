"""xLSTM (arXiv:2405.04517), structure and names of NX-AI/xlstm: mLSTM and sLSTM.

Neither has a softmax: an exponential that is divided by its own sum is a gate.
"""

import functools

import jax
import jax.numpy as jnp
from whole_models import EMBEDDING, FLAT, H, HEAD, K, next_token_loss
from written_out import (
    Architecture,
    B,
    CAUSAL,
    centered,
    convolved,
    cut,
    D,
    joined,
    matrix,
    TOKENS,
    vector,
)


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
