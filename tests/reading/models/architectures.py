"""Architectures of 2026 as tests: of pictures, streams and pairs; a list of all."""

import functools

import jax
import jax.numpy as jnp
import mixtures
import recurrent
from written_out import (
    Architecture,
    attend,
    B,
    CAUSAL,
    centered,
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
    rms_norm,
    T,
    TABLE,
    TOKENS,
    vector,
    weight,
)


HEADS, HEAD_DIM = 2, 8
IMAGES = jax.ShapeDtypeStruct((B, 3, 4, 4), jnp.float32)  # channels first
PATCH, CELLS = 2, 4  # a patch's side, and how many there are


def patches(kernel, images, stride: int):
    """Convolution of PyTorch's layout, channels first; channels last come out."""
    return jax.lax.conv_general_dilated(
        images,
        kernel,
        (stride, stride),
        "VALID",
        dimension_numbers=("NCHW", "OIHW", "NHWC"),
    )


# A diffusion transformer with adaLN-zero (arXiv:2212.09748), names of facebookresearch/
# DiT: six modulations from one kernel, norms without gains.


_biased = functools.partial(linear_leaves, bias=True)


def _dit_block():
    return {
        "attn": {"qkv": _biased(3 * D, D), "proj": _biased(D, D)},
        "mlp": {"fc1": _biased(4 * D, D), "fc2": _biased(D, 4 * D)},
        "adaLN_modulation": {"1": _biased(6 * D, D)},
    }


def _modulated(x, shift, scale):
    return centered(x) * (1 + scale[:, None]) + shift[:, None]


def _dit(p, images, times, labels, seen):
    x = patches(p["x_embedder"]["proj"]["weight"], images, PATCH)
    x = x.reshape(B, CELLS, D) + p["x_embedder"]["proj"]["bias"] + p["pos_embed"]
    angles = times[:, None] * jnp.exp(-jnp.arange(5.0))
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
    mlp = p["t_embedder"]["mlp"]
    c = linear(mlp["2"], jax.nn.silu(linear(mlp["0"], waves)))
    c = c + p["y_embedder"]["embedding_table"]["weight"][labels]
    for i, block in p["blocks"].items():
        modulation = linear(block["adaLN_modulation"]["1"], jax.nn.silu(c))
        six = jnp.split(modulation, 6, -1)
        h = _modulated(x, six[0], six[1])
        qkv = linear(block["attn"]["qkv"], h).reshape(B, CELLS, 3, HEADS, HEAD_DIM)
        out = attend(seen, f"blocks/{i}/attn/qkv", *jnp.moveaxis(qkv, 2, 0))
        x = x + six[2][:, None] * linear(block["attn"]["proj"], joined(out))
        h = _modulated(x, six[3], six[4])
        h = linear(block["mlp"]["fc2"], jax.nn.gelu(linear(block["mlp"]["fc1"], h)))
        x = x + six[5][:, None] * h
    last = p["final_layer"]
    modulation = linear(last["adaLN_modulation"]["1"], jax.nn.silu(c))
    shift, scale = jnp.split(modulation, 2, -1)
    return jnp.mean(linear(last["linear"], _modulated(x, shift, scale)) ** 2)


DIT = Architecture(
    {
        "x_embedder": {
            "proj": {
                "weight": matrix(D, 3, PATCH, PATCH, inputs=(1, 2, 3), outputs=0),
                "bias": vector(D),
            }
        },
        "pos_embed": vector(1, CELLS, D),
        "t_embedder": {"mlp": {"0": _biased(D, 10), "2": _biased(D, D)}},
        "y_embedder": {"embedding_table": TABLE},
        "blocks": {str(i): _dit_block() for i in range(2)},
        "final_layer": {
            "linear": {**weight("head", 3 * PATCH**2, D), "bias": vector(3 * PATCH**2)},
            "adaLN_modulation": {"1": _biased(2 * D, D)},
        },
    },
    _dit,
    (
        IMAGES,
        jax.ShapeDtypeStruct((B,), jnp.float32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
    ),
    {
        f"blocks/{i}/attn/qkv": Layer(HEADS, ("weight", "bias"), ("weight", "bias"))
        for i in range(2)
    },
)


# Hyper-connections (arXiv:2409.19606), names of the paper's code: n copies of the
# residual, with tables that say how they are mixed, read and written, static and by a
# token's own features. DeepSeek-V4 trains all of these by AdamW.

STREAMS, NORM = 4, {"norm": gain()}


def _hyper_connection():
    return {
        "static_beta": vector(STREAMS),
        "static_alpha": vector(STREAMS, STREAMS + 1),
        "dynamic_alpha_fn": vector(D, STREAMS + 1),
        "dynamic_alpha_scale": vector(1),
        "dynamic_beta_fn": vector(D),
        "dynamic_beta_scale": vector(1),
        "layer_norm": gain_and_shift(),
    }


def _connected(p, streams, layer):
    """Streams `(b, t, n, d)` after a layer that reads and writes one `(b, t, d)`."""
    h = layer_norm(p["layer_norm"], streams)
    alpha = jnp.tanh(h @ p["dynamic_alpha_fn"]) * p["dynamic_alpha_scale"]
    beta = jnp.tanh(h @ p["dynamic_beta_fn"]) * p["dynamic_beta_scale"]
    alpha, beta = alpha + p["static_alpha"], beta + p["static_beta"]
    mixed = jnp.einsum("btnm,btnd->btmd", alpha, streams)
    out = layer(mixed[..., 0, :])
    return out[..., None, :] * beta[..., None] + mixed[..., 1:, :]


def _hyper_connected(p, tokens, seen):
    x = p["embed_tokens"]["weight"][tokens]
    streams = jnp.broadcast_to(x[..., None, :], (B, T, STREAMS, D))
    for i, layer in p["layers"].items():

        def attention(x, q=layer["self_attn"], i=i):
            x = rms_norm(q["norm"], x)
            query, key, value = (cut(linear(q[f"{n}_proj"], x), HEADS) for n in "qkv")
            at = f"layers/{i}/self_attn"
            out = attend(seen, at, query, key, value, mask=CAUSAL)
            return linear(q["o_proj"], joined(out))

        def mlp(x, q=layer["mlp"]):
            hidden = jax.nn.gelu(linear(q["fc1"], rms_norm(q["norm"], x)))
            return linear(q["fc2"], hidden)

        streams = _connected(layer["attn_hyper_connection"], streams, attention)
        streams = _connected(layer["ffn_hyper_connection"], streams, mlp)
    return cross_entropy(linear(p["lm_head"], rms_norm(p["norm"], streams.sum(-2))))


def _hyper_layer():
    mlp = {"fc1": linear_leaves(3 * D, D), "fc2": linear_leaves(D, 3 * D)}
    return {
        "attn_hyper_connection": _hyper_connection(),
        "ffn_hyper_connection": _hyper_connection(),
        "self_attn": {f"{n}_proj": linear_leaves(D, D) for n in "qkvo"} | NORM,
        "mlp": mlp | NORM,
    }


HYPER_CONNECTIONS = Architecture(
    {
        "embed_tokens": TABLE,
        "layers": {str(i): _hyper_layer() for i in range(2)},
        **NORM,
        "lm_head": HEAD,
    },
    _hyper_connected,
    (TOKENS,),
    {
        f"layers/{i}/self_attn": Layer(HEADS, ("q_proj/weight",), ("k_proj/weight",))
        for i in range(2)
    },
)


# AlphaFold's pairs (doi:10.1038/s41586-021-03819-2, algorithms 11 to 15), names of
# google-deepmind/alphafold: attention along the edges of triangles with a bias of pairs
# and gates, and products of edges.

PAIR, PAIR_HEADS, PAIR_DIM, RESIDUES, BINS = 10, 2, 3, 5, 7


def _haiku_norm(n: int = PAIR):
    return {"scale": vector(n), "offset": vector(n)}


def _haiku_linear(inputs: int, outputs: int):
    return {"weights": matrix(inputs, outputs), "bias": vector(outputs)}


def _triangle_attention(name: str):
    heads = (PAIR_HEADS, PAIR_DIM)
    kernel = matrix(PAIR, *heads, outputs=(1, 2))
    return {
        f"{name}/query_norm": _haiku_norm(),
        name: {"feat_2d_weights": matrix(PAIR, PAIR_HEADS)},
        f"{name}/attention": {
            **dict.fromkeys(("query_w", "key_w", "value_w", "gating_w"), kernel),
            "gating_b": vector(*heads),
            "output_w": matrix(*heads, PAIR, inputs=(0, 1), outputs=2),
            "output_b": vector(PAIR),
        },
    }


def _triangle_multiplication(name: str, inside: int = 6):
    sides = ("left_projection", "right_projection", "left_gate", "right_gate")
    return {
        f"{name}/layer_norm_input": _haiku_norm(),
        f"{name}/center_layer_norm": _haiku_norm(inside),
        f"{name}/output_projection": _haiku_linear(inside, PAIR),
        f"{name}/gating_linear": _haiku_linear(PAIR, PAIR),
    } | {f"{name}/{side}": _haiku_linear(PAIR, inside) for side in sides}


def _haiku_normed(p, x):
    return centered(x) * p["scale"] + p["offset"]


def _haiku_of(p, x):
    return x @ p["weights"] + p["bias"]


def _multiplied(p, name, pair, equation):
    x = _haiku_normed(p[f"{name}/layer_norm_input"], pair)
    left, right = (
        _haiku_of(p[f"{name}/{side}_projection"], x)
        * jax.nn.sigmoid(_haiku_of(p[f"{name}/{side}_gate"], x))
        for side in ("left", "right")
    )
    out = jnp.einsum(equation, left, right)
    out = _haiku_normed(p[f"{name}/center_layer_norm"], out)
    out = _haiku_of(p[f"{name}/output_projection"], out)
    return out * jax.nn.sigmoid(_haiku_of(p[f"{name}/gating_linear"], x))


def _attended(p, name, pair, seen):
    x = _haiku_normed(p[f"{name}/query_norm"], pair)
    bias = jnp.einsum("bqkc,ch->bhqk", x, p[name]["feat_2d_weights"])[:, None]
    q = p[f"{name}/attention"]
    query, key, value, gate = (
        jnp.einsum("bijc,chd->bijhd", x, q[f"{n}_w"])
        for n in ("query", "key", "value", "gating")
    )
    out = attend(seen, f"{name}/attention", query, key, value, bias=bias)
    out = out * jax.nn.sigmoid(gate + q["gating_b"])
    return jnp.einsum("bijhd,hdc->bijc", out, q["output_w"]) + q["output_b"]


_OUTGOING = ("triangle_multiplication_outgoing", "bikc,bjkc->bijc")
_INCOMING = ("triangle_multiplication_incoming", "bkjc,bkic->bijc")


def _pairs(p, pair, seen):
    pair = _haiku_of(p["preprocess_pair"], pair)
    for name, equation in (_OUTGOING, _INCOMING):
        pair = pair + _multiplied(p, name, pair, equation)
    pair = pair + _attended(p, "triangle_attention_starting_node", pair, seen)
    flipped = pair.swapaxes(1, 2)
    ending = _attended(p, "triangle_attention_ending_node", flipped, seen)
    pair = pair + ending.swapaxes(1, 2)
    x = _haiku_normed(p["pair_transition/input_layer_norm"], pair)
    x = jax.nn.relu(_haiku_of(p["pair_transition/transition1"], x))
    pair = pair + _haiku_of(p["pair_transition/transition2"], x)
    half = _haiku_of(p["distogram_head/half_logits"], pair)
    return cross_entropy(half + half.swapaxes(1, 2))


ALPHAFOLD = Architecture(
    {
        "preprocess_pair": _haiku_linear(9, PAIR),
        **_triangle_multiplication(_OUTGOING[0]),
        **_triangle_multiplication(_INCOMING[0]),
        **_triangle_attention("triangle_attention_starting_node"),
        **_triangle_attention("triangle_attention_ending_node"),
        "pair_transition/input_layer_norm": _haiku_norm(),
        "pair_transition/transition1": _haiku_linear(PAIR, 4 * PAIR),
        "pair_transition/transition2": _haiku_linear(4 * PAIR, PAIR),
        "distogram_head/half_logits": {
            "weights": Leaf((PAIR, BINS), "head"),
            "bias": vector(BINS),
        },
    },
    _pairs,
    (jax.ShapeDtypeStruct((B, RESIDUES, RESIDUES, 9), jnp.float32),),
    {
        f"triangle_attention_{node}_node/attention": Layer(
            PAIR_HEADS, ("query_w",), ("key_w",)
        )
        for node in ("starting", "ending")
    },
)


ARCHITECTURES = {
    "Mamba-2": recurrent.MAMBA_2,
    "Qwen3-Next": mixtures.QWEN3_NEXT,
    "Kimi Linear": mixtures.KIMI_LINEAR,
    "DeepSeek-V3": mixtures.DEEPSEEK_V3,
    "RWKV-7": recurrent.RWKV_7,
    "RecurrentGemma": recurrent.RECURRENT_GEMMA,
    "hyper-connections": HYPER_CONNECTIONS,
    "DiT": DIT,
    "AlphaFold": ALPHAFOLD,
}
