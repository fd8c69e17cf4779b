"""Names in use, as data, and the words of a path: what they say of a leaf.

Every table says whose names it holds. Functions read a path once, word by word.
"""

import functools
import re

from .paths import Path


# Flax; Haiku and simply; Equinox, Haliax and PyTorch; AlphaFold and penzai.
KERNELS = {"kernel", "w", "weight", "weights"}
# Flax, Haiku ("offset"), Keras ("gamma").
_VECTORS = {"scale", "offset", "mean", "var", "gamma", "beta", "gain"}
_NORMS = {"ln", "bn", "gn", "rms"}
_GAINS = {"scale", "scales", "gain", "gains"}
# With GPT-2 in HuggingFace, and papers; short forms if nothing else follows.
_TABLES = {"embed", "embeds", "embedding", "embeddings", "embedder", "embs"}
_TABLES |= {"wte", "wpe", "wtoken", "wpos", "tok"}
_SHORT = {"emb", "embd"}
_POSITIONS = {"pe", "pos", "position", "positions", "positional", "posemb", "relpos"}
_RELATIVE = _POSITIONS | {"relative", "rel"}
# Perceiver, prompt tuning, DINO and Wav2Vec2: learned, and added or compared to.
_LEARNED = {"latents", "prompt", "prompts", "prototypes", "probe", "queries"}
_LEARNED |= {"codevectors"}
_TOKENS = {"token", "tokens", "cls", "register", "registers"}
# What is called a projection is a layer, whatever it is of: `pos_proj`.
_LAYERS = {"proj", "projection", "linear", "dense", "modulation"}
# Constants of a model, which some keep among the params, and what is multiplied entry
# by entry though it is called a kernel.
_FIXED = {"mask", "masks", "causal", "tril", "triu", "cos", "sin", "cis", "rope", "rff"}
_FIXED |= {"freq", "freqs", "frequencies", "fourier", "random", "buffer", "matrix"}
_FIXED |= {"elementwise", "hadamard", "diag", "diagonal", "scaling", "weighting"}
_HEADS = {"head", "unemb", "unembed", "unembedding", "classifier", "vocab"}
_HEADS |= {"predictions"}  # Keras' applications

#: Roles in attention, under the names of Flax, HuggingFace, Gemma, Haiku, Haliax.
_ROLES = {
    "query": "query q wq qproj queryproj qprojection toq queryw",
    "key": "key k wk kproj keyproj kprojection tok keyw",
    "value": "value v wv vproj valueproj vprojection tov valuew",
    "out": "out o wo oproj outproj outputproj attnoutproj toout outputw",
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names.split()}


@functools.lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """`LayerNorm_0` and `layer_norm` are `layer`, `norm`."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return tuple(word.lower() for word in found)


@functools.lru_cache(maxsize=4096)
def kind(path: Path) -> str:
    """Returns what a leaf is by its name and its module's, whatever its shape.

    `"bias"`, `"norm"`, `"gain"`, `"embedding"`, `"logarithms"`, `"positions or
    tokens"`, `"no layer"`, `"head"`, or `""`, which is open.
    """
    # What has but a number in a list is called what the list is.
    path = tuple(x for x in path if not x.isdigit())
    name = "/".join(path[-1:])
    own, module = words(name), words("/".join(path[-2:-1]))
    # What Flax calls a kernel is what its module is called.
    is_kernel, ends = name in KERNELS, {*own[-1:]}
    called = module if is_kernel else own
    first, last = {*called[:1]}, {*called[-1:]}
    is_layer = bool(last & _LAYERS)
    if "bias" in ends:
        return "bias"
    is_norm = _LAYERS.isdisjoint(module[-1:]) and any(
        x in _NORMS or x.endswith(("norm", "normalization")) for x in module
    )
    if name in _VECTORS or (is_norm and name in ("w", "weight", "weights", "b")):
        return "norm"
    # Of several layers, `layer_scale` has two axes, as `scale_shift_table` has.
    # So have those of hyper-connections (arXiv:2409.19606), `dynamic_alpha_fn`.
    of_streams = {x + y for x in ("static", "dynamic") for y in ("alpha", "beta")}
    is_shift = not is_kernel and "shift" in own
    if ends & _GAINS or is_shift or "".join(own[:2]) in of_streams:
        return "gain"
    # A word has to end a table's name or begin it: `embeddings_project` is none.
    of_tokens = {"tok", "token", "word", "vocab", "embedding"} & {*called[:-1]}
    is_table = (
        ("embed" in first and not is_layer)
        or called == ("shared",)  # by encoder and decoder, as in T5 and BART
        or last & {"codebook", "codebooks"}  # VQ-VAE
        # `emb` alone, but not `time_emb`, which is often a layer after an embedding.
        or (last & _SHORT and (of_tokens or len(called) == 1))
        or (last & {"table", "matrix"} and of_tokens)
    )
    if is_kernel:
        is_table = (is_table and name != "kernel") or last & _TABLES
    elif not is_layer:
        is_table = is_table or (_TABLES | _SHORT) & (first | last)
    if is_table or "W_E" in path[-2:]:  # papers on interpretability
        return "embedding"
    if {"log", "logs"} & {*own[:1], *ends}:
        return "logarithms"
    is_position = (_POSITIONS | _TOKENS) & {*own} or ends & _LEARNED
    if is_kernel:
        # A bias of pairs of positions, too, which T5 in PyTorch calls a weight.
        is_position = name != "kernel" and first & _RELATIVE and not is_layer
    if is_position:
        return "positions or tokens"
    is_gain = is_norm and is_kernel  # with a bias that is shorter, a layer
    if is_gain or not (is_layer or _FIXED.isdisjoint(called)):
        return "no layer"
    # `lm_head`, not `head_conv`, `pre_logits`, `logit_key`; an array may be called so.
    is_head = "W_U" in path[-2:] or any(
        x[:1] != ("pre",) and ((_HEADS | {"logit"}) & {*x[-1:]} or "logits" in x)
        for x in (module, called)
    )
    return "head" if is_head else ""


CONVOLUTION = re.compile(r"(?<![a-z])conv", re.I)  # `conv2_d`, `Conv_0`
#: Axis names of layers and experts in MaxText, T5X, Haliax, penzai.
STACKED = {"layers", "layer", "stack", "block", "blocks", "stacked", "num_layers"}
STACKED |= {"dense_layers", "moe_layers"}
EXPERTS = {"exp", "expert", "experts"}  # a stack, but the last axis of a router

#: Words of layers in a block, which others follow though a part of a model lacks them.
IN_BLOCK = {"up", "wi", "mlp", "ffn", "ff", "in", "kv", "wkv", "qkv", "qk", "attn"}
#: Layers that say nothing of what they are for.
UNNAMED = re.compile(
    r"((dense|linear|fc|layers?|hidden|conv|l)_?)?\d*|out(put)?(_?(layer|dense)(_\d+)?)?",
    re.I,
)
#: How names of last layers begin: `out_proj`, `outc`, `final_layer`.
ENDS = ("out", "final", "last")
#: Words of layers that may write the output, whatever their sizes.
OUTPUTS = {"bbox", "box", "boxes", "class", "classes", "cls", "iou", "quality"}
OUTPUTS |= {"score", "scores", "pred", "predict", "policy", "actor", "critic", "rgb"}
OUTPUTS |= {"heatmap", "regression", "forecast", "density", "logstd", "ctc", "tagger"}


@functools.lru_cache(maxsize=4096)
def projection(name: str) -> str:
    """Returns what Flax calls a module of attention: `query`, `key`, `value`, `out`."""
    return _ROLE_OF.get(re.sub(r"[^a-z]", "", name.lower()), "")


def is_layer(path: Path) -> bool:
    """Checks for the kernel of a layer that is called so, such as `Dense_0`, `q_proj`.

    What else Flax calls a kernel may be anything.
    """
    module = "".join(path[-2:-1])
    is_called = CONVOLUTION.search(module) or not _LAYERS.isdisjoint(words(module))
    return path[-1:] == ("kernel",) and bool(is_called or projection(module))


def is_low_rank(path: Path) -> bool:
    """Checks for a factor of LoRA: `lora_a`, `w_lora_b`, `loraA/kernel`."""
    return any(re.fullmatch("(.*lora_?)[abAB]", name) for name in path[-2:])
