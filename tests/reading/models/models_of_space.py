"""Whole models of pictures and of atoms: MViT, whose heads are pooled; PaiNN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from whole_models import weighed
from written_out import (
    Architecture,
    B,
    cut,
    D,
    gain_and_shift,
    joined,
    Layer,
    layer_norm,
    Leaf,
    matrix,
    vector,
)


# MViT (arXiv:2104.11227) with the residual pooling of arXiv:2112.01526, structure of
# facebookresearch/SlowFast: query, key and value are pooled between projection and
# softmax, the class token alone is not.

H, SIDE, CLASSES = 2, 4, 5


def _average(y, by, p=None):
    window = (1, by, by, 1)
    return jax.lax.reduce_window(y, 0.0, jax.lax.add, window, window, "VALID") / by**2


def _maximum(y, by, p=None):
    window = (1, by, by, 1)
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "SAME")


def _windows(y, by, kernel):
    """A depthwise convolution whose window all heads share."""
    k = y.shape[-1]
    return jax.lax.conv_general_dilated(
        y, kernel, (by, by), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=k,
    )  # fmt: skip


def _pooled(y, side, by, pool):
    """`(b, 1 + side * side, h, k)`, heads as pictures of their own."""
    first, rest = y[:, :1], y[:, 1:]
    b, _, h, k = y.shape
    rest = rest.reshape(b, side, side, h, k).transpose(0, 3, 1, 2, 4)
    rest = pool(rest.reshape(b * h, side, side, k), by)
    rest = rest.reshape(b, h, -1, k).swapaxes(1, 2)
    return jnp.concatenate([first, rest], 1)


def _pooled_attention(p, x, side, stride, seen, path, pools):
    q, k, v = (cut(y, H) for y in jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, -1))
    pools = [pools(p, n) for n in "qkv"]
    q = _pooled(q, side, stride, pools[0])
    k, v = _pooled(k, side, 2, pools[1]), _pooled(v, side, 2, pools[2])
    logits = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    out = weighed(seen, path, logits, v) + q  # residual pooling
    return joined(out) @ p["proj"] + p["proj_bias"]


def _mvit(p, images, classes, seen, pools):
    x = jax.lax.conv_general_dilated(
        images, p["patch_embed"], (2, 2), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    first = jnp.broadcast_to(p["cls_token"], (B, 1, D))
    x = jnp.concatenate([first, x.reshape(B, SIDE * SIDE, D)], 1) + p["pos_embed"]
    side = SIDE
    for i, block in p["blocks"].items():
        stride = 1 if i == "0" else 2
        h = layer_norm(block["norm1"], x)
        out = _pooled_attention(
            block["attn"], h, side, stride, seen, f"blocks/{i}/attn", pools
        )
        if stride > 1:
            x = _pooled(x[:, :, None], side, stride, _maximum)[:, :, 0]
        x, side = x + out, side // stride
        h = jax.nn.gelu(layer_norm(block["norm2"], x) @ block["fc1"])
        x = x + h @ block["fc2"]
    logits = layer_norm(p["norm"], x)[:, 0] @ p["head"]
    said = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(said, classes[:, None], -1))


def _mvit_leaves(**pools):
    attention = {
        "qkv": matrix(D, 3 * D),
        "qkv_bias": vector(3 * D),
        "proj": matrix(D, D),
        "proj_bias": vector(D),
        **pools,
    }
    block = {
        "norm1": gain_and_shift(),
        "norm2": gain_and_shift(),
        "attn": attention,
        "fc1": matrix(D, 2 * D),
        "fc2": matrix(2 * D, D),
    }
    return {
        "patch_embed": matrix(3, 3, 3, D, inputs=(0, 1, 2), outputs=3),
        "cls_token": vector(1, 1, D),
        "pos_embed": vector(1, 1 + SIDE * SIDE, D),
        "blocks": {"0": block, "1": block},
        "norm": gain_and_shift(),
        "head": Leaf((D, CLASSES), "head"),
    }


def _mvit_by(pool, also=((), ()), **leaves):
    """`pool(p, name)` is what pools query, key or value."""
    query, key = (("qkv", "qkv_bias", *more) for more in also)
    return Architecture(
        _mvit_leaves(**leaves),
        functools.partial(_mvit, pools=pool),
        (
            jax.ShapeDtypeStruct((B, 2 * SIDE, 2 * SIDE, 3), jnp.float32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
        ),
        {f"blocks/{i}/attn": Layer(H, query, key) for i in range(2)},
    )


MVIT_BY_MEANS = _mvit_by(lambda p, name: _average)
MVIT_BY_MAXIMA = _mvit_by(lambda p, name: _maximum)
MVIT_BY_WINDOWS = _mvit_by(
    lambda p, name: functools.partial(_windows, kernel=p[f"pool_{name}"]),
    **{f"pool_{n}": vector(3, 3, 1, D // H) for n in "qkv"},
)


# PaiNN (arXiv:2102.03150): scalar and vector features, energies, and forces, which are
# gradients of the energy by the positions inside the loss.

ATOMS, SPECIES, FEATURES, WAVES, CUTOFF = 5, 4, 8, 6, 6.0
_PAIRS = [(i, j) for i in range(ATOMS) for j in range(ATOMS) if i != j]
SENDERS, RECEIVERS = (jnp.asarray(x) for x in np.transpose(_PAIRS))


def _mlp(p, x):
    return jax.nn.silu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def _message(p, s, v, r):
    """Of neighbors, filtered by their distance; `v` is `(atoms, 3, features)`."""
    length = jnp.sqrt((r * r).sum(-1, keepdims=True) + 1e-12)
    waves = jnp.sin(jnp.arange(1, WAVES + 1) * jnp.pi * length / CUTOFF) / length
    fade = 0.5 * (jnp.cos(jnp.pi * length / CUTOFF) + 1) * (length < CUTOFF)
    filters = (waves @ p["filter"] + p["filter_bias"]) * fade
    ds, dv1, dv2 = jnp.split(_mlp(p["phi"], s)[SENDERS] * filters, 3, -1)
    dv = v[SENDERS] * dv1[:, None] + (r / length)[..., None] * dv2[:, None]
    add = functools.partial(
        jax.ops.segment_sum, segment_ids=RECEIVERS, num_segments=ATOMS
    )
    return s + add(ds), v + add(dv)


def _update(p, s, v):
    u, w = v @ p["u"], v @ p["v"]
    norm = jnp.sqrt((w * w).sum(1) + 1e-12)
    a_vv, a_sv, a_ss = jnp.split(_mlp(p["mlp"], jnp.concatenate([s, norm], -1)), 3, -1)
    return s + a_ss + a_sv * (u * w).sum(1), v + a_vv[:, None] * u


def energy(p, positions, species):
    s, v = p["embed"][species], jnp.zeros((ATOMS, 3, FEATURES))
    r = positions[RECEIVERS] - positions[SENDERS]
    for layer in p["layers"].values():
        s, v = _message(layer["message"], s, v, r)
        s, v = _update(layer["update"], s, v)
    return jnp.sum(_mlp(p["readout"], s))


def _energies(p, positions, species, energies, forces, seen):
    found = jax.vmap(energy, (None, 0, 0))(p, positions, species)
    return jnp.mean((found - energies) ** 2)


def _forces(p, positions, species, energies, forces, seen):
    slopes = jax.vmap(jax.grad(energy, 1), (None, 0, 0))(p, positions, species)
    return jnp.mean((slopes + forces) ** 2)


def _both(*args):
    return _energies(*args) + 10.0 * _forces(*args)


def _mlp_leaves(inputs: int, inside: int, outputs: int):
    last = matrix(inside, outputs) if outputs > 1 else vector(inside, outputs)
    return {
        "w1": matrix(inputs, inside),
        "b1": vector(inside),
        "w2": last,
        "b2": vector(outputs),
    }


_F = FEATURES
_PAINN_LAYER = {
    "message": {
        "phi": _mlp_leaves(_F, _F, 3 * _F),
        "filter": matrix(WAVES, 3 * _F),
        "filter_bias": vector(3 * _F),
    },
    "update": {
        "u": matrix(_F, _F),
        "v": matrix(_F, _F),
        "mlp": _mlp_leaves(2 * _F, _F, 3 * _F),
    },
}
_PAINN_LEAVES = {
    "embed": Leaf((SPECIES, _F), "embedding"),
    "layers": {"0": _PAINN_LAYER, "1": _PAINN_LAYER},
    "readout": _mlp_leaves(_F, 4, 1),
}
_SYSTEMS = (
    jax.ShapeDtypeStruct((B, ATOMS, 3), jnp.float32),
    jax.ShapeDtypeStruct((B, ATOMS), jnp.int32),
    jax.ShapeDtypeStruct((B,), jnp.float32),
    jax.ShapeDtypeStruct((B, ATOMS, 3), jnp.float32),
)
PAINN = Architecture(_PAINN_LEAVES, _both, _SYSTEMS)
PAINN_BY_ENERGIES = Architecture(_PAINN_LEAVES, _energies, _SYSTEMS)
PAINN_BY_FORCES = Architecture(_PAINN_LEAVES, _forces, _SYSTEMS)
