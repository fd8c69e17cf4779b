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
_GAINS = {"scale", "scales", "gain", "gains", "scalar", "scalars"}
# With GPT-2 in HuggingFace, papers and VQ-VAE; short forms if nothing else follows.
_TABLES = {"embed", "embeds", "embedding", "embeddings", "embedder", "embs"}
_TABLES |= {"wte", "wpe", "wtoken", "wpos", "tok", "codebook", "codebooks"}
_SHORT = {"emb", "embd"}
_OF_TOKENS = {"tok", "token", "word", "vocab", "embedding"}
# Learned, and added or compared to: positions, tokens, prompts, prototypes, decays.
_POSITIONS = {"pe", "pos", "position", "positions", "positional", "posemb", "relpos"}
_POSITIONS |= {"relative", "rel"}
_ADDED = {"latents", "prompt", "prompts", "prototypes", "probe", "queries", "cls"}
_ADDED |= {"token", "tokens", "register", "registers", "codevectors", "log", "logs"}
_ADDED |= _POSITIONS
# A leaf called a projection is a layer, whatever it projects: `pos_proj`.
_LAYERS = {"proj", "projection", "linear", "dense", "modulation"}
# Constants of a model among its params, and arrays that multiply entry by entry though
# they are called a kernel.
_FIXED = {"mask", "masks", "causal", "tril", "triu", "cos", "sin", "cis", "rope", "rff"}
_FIXED |= {"freq", "freqs", "frequencies", "fourier", "random", "buffer", "matrix"}
_FIXED |= {"elementwise", "hadamard", "diag", "diagonal", "scaling", "weighting"}
_FIXED |= {"filter", "filters", "static", "dynamic"}
_HEADS = {"head", "unemb", "unembed", "unembedding", "classifier", "vocab", "logit"}
_HEADS |= {"logits", "predictions"}  # Keras' applications
# Rotary parts of queries and keys, which are no positions: `k_pe`, `wq_rope`.
_ROTARY = {"pe", "rope"}
_OF_ROTARY = {"q", "k", "kv", "wq", "wk", "wkv", "query", "key"}

#: Roles in attention, under the names of Flax, HuggingFace, Gemma, Haiku, Haliax.
_PROJECTIONS = {
    "query": "query q wq qproj queryproj qprojection toq queryw",
    "key": "key k wk kproj keyproj kprojection tok keyw",
    "value": "value v wv vproj valueproj vprojection tov valuew",
    "out": "out o wo oproj outproj outputproj attnoutproj toout outputw",
}
_ROLE_OF = {x: role for role, names in _PROJECTIONS.items() for x in names.split()}

# Norms of query and key after their projection (arXiv:2302.05442), spelled as in Flax,
# Gemma, Qwen and diffusers: `query_ln`, `_query_norm`, `q_norm`, `norm_added_q`.
_QK = "(query|q|key|k|qk|querykey|queries|keys)"
_NORM = (
    "(head|layer|group|rms|l|ln)*(norm|ln|normali[sz]ation|normali[sz]e|normali[sz]er)"
)
QK_NORM = re.compile(f"{_QK}{_NORM}(layer|scale|gain|weight|fn)*|{_NORM}(added)?{_QK}")
# Norms of latent attention (arXiv:2405.04434), before the up-projections of query, and
# of key and value: `q_norm` may be either kind.
LATENT_QUERY_NORM = re.compile(f"q{_NORM}|{_NORM}q")
LATENT_KEY_NORM = re.compile(f"kv(a|b|c|lora|latent|compressed)*{_NORM}|{_NORM}kv")

# Words that are written as one: `logitdense`, `lmhead`.
_GLUED = re.compile(
    r"(lm|class|classifier|cls|logits?|mlm|output|policy|pred|prediction|predictions|"
    r"score|value|vocab)(dense|fc|head|layer|linear|proj|projection)"
)
_CONVOLUTION = re.compile(r"(?<![a-z])conv", re.I)  # `conv2_d`, `Conv_0`

#: Words of layers in a block, which others follow, even if the params lack those.
IN_BLOCK = {"up", "wi", "mlp", "ffn", "ff", "kv", "wkv", "qkv", "qk", "attn"}
#: Names of layers that do not say what the layer is for.
UNNAMED = re.compile(
    r"((dense|linear|fc|layers?|hidden|conv|l)_?)?\d*|out(put)?(_?(layer|dense)(_\d+)?)?",
    re.I,
)
#: How names of last layers begin: `out_proj`, `outc`, `final_layer`.
ENDS = ("out", "final", "last")
#: Words of layers that may write the output, whatever their sizes.
OUTPUTS = {"bbox", "box", "boxes", "class", "classes", "cls", "iou", "quality"}
OUTPUTS |= {"score", "scores", "pred", "predict", "policy", "actor", "critic", "rgb"}
OUTPUTS |= {"heatmap", "regression", "forecast", "backcast", "density", "logstd"}
OUTPUTS |= {"ctc", "tagger", "prediction", "predictor", "predictors", "readout"}
OUTPUTS |= {"readouts"}
#: Words of an output head before those of any layer: `classifier_fc`, `vocab_dense`.
BEFORE_LAYERS = _HEADS - {"head"}
#: Words of a router, and of the experts next to it.
ROUTERS = {"router", "gate", "gates"}
EXPERTS = {"expert", "experts"}
#: Names of the axes that stack layers or experts in MaxText, T5X, Haliax, penzai.
LAYER_AXES = {"layers", "layer", "stack", "block", "blocks", "stacked", "num_layers"}
LAYER_AXES |= {"dense_layers", "moe_layers"}
EXPERT_AXES = {"exp"} | EXPERTS


@functools.lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """Splits a name: `LayerNorm_0` and `layer_norm` are `layer`, `norm`."""
    spelled = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    parts = (_GLUED.fullmatch(word.lower()) or word.lower() for word in spelled)
    apart = (x.groups() if isinstance(x, re.Match) else (x,) for x in parts)
    return tuple(word for each in apart for word in each)


def without_layers(name: str) -> tuple[str, ...]:
    """Returns the words of a name without those of any layer at its end."""
    remaining = words(name)
    while remaining and remaining[-1] in _LAYERS | {"fc", "layer"}:
        remaining = remaining[:-1]
    return remaining


def is_norm(path: Path) -> bool:
    """Checks for a gain or a shift by its name, or a weight in a norm."""
    name, module = "".join(path[-1:]), _named(path)[1]
    is_in_norm = any(
        x in _NORMS or x.endswith(("norm", "normalization")) for x in words(module)
    )
    is_in_norm &= _LAYERS.isdisjoint(words(module)[-1:])
    return name in _VECTORS or (is_in_norm and name in (*KERNELS - {"kernel"}, "b"))


def _named(path: Path) -> tuple[str, str]:
    """Returns a leaf's name and its module's; an item of a list has the list's name."""
    *_, module, name = ("", "", *(x for x in path if not x.isdigit()))
    return name, module


@functools.lru_cache(maxsize=4096)
def kind(path: Path) -> str:
    """Returns what a leaf is by its name and its module's, whatever its shape.

    `"bias"`, `"norm"`, `"embedding"`, `"added"`, `"no layer"`, `"head"`,
    or `""`, which is open.
    """
    name, above = _named(path)
    name_words, module, is_kernel = words(name), words(above), name in KERNELS
    # A leaf that Flax calls a kernel has its module's name.
    called = module if is_kernel else name_words
    first, last = {*called[:1]}, {*called[-1:]}
    is_layer, is_array = bool(last & _LAYERS), not is_kernel
    if "bias" in name_words[-1:]:
        return "bias"
    # In a stack of layers `layer_scale` has two axes, as `scale_shift_table` has.
    is_shift = "shift" in name_words and is_array
    if name in _VECTORS or is_shift or not _GAINS.isdisjoint(name_words[-1:]):
        return "norm"
    # A word has to end a table's name, or begin that of an array or a `weight`:
    # `embeddings_project` is none. `emb` in `time_emb` is often a layer after a table.
    tables = _TABLES | (_SHORT if is_array or len(called) == 1 else set())
    begins = tables if is_array else {"embed"} if name != "kernel" else set()
    is_shared = called == ("shared",) and name != "kernel"  # as in T5 and BART
    of_tokens = last & {*_SHORT, "table", "matrix"} and _OF_TOKENS & {*called[:-1]}
    is_table = last & tables or first & begins or is_shared or of_tokens
    if (is_table and not is_layer) or "W_E" in path[-2:]:
        return "embedding"
    if _OF_ROTARY & {*called} and _ROTARY & {*called}:
        # As an array it may be a table all the same.
        return "" if is_kernel else "no layer"
    # A bias of pairs of positions, too, which T5 in PyTorch calls a weight.
    is_position = name != "kernel" and not is_layer and first & _POSITIONS
    if is_position or (is_array and not _ADDED.isdisjoint(name_words)):
        return "added"
    is_gain = is_kernel and is_norm((*path[:-1], "w"))  # with a shorter bias, a layer
    if is_gain or not (is_layer or _FIXED.isdisjoint(called)):
        return "no layer"
    # `lm_head`, not `head_conv` or `logit_key`; an array may be called so.
    ends = {*called[-1:], *module[-1:]}
    ends |= {"logit"} & {*without_layers(above if is_kernel else name)[-1:]}
    is_head = ends & _HEADS or any(x.endswith("logits") for x in (*called, *module))
    is_head = is_head and "pre" not in first
    return "head" if is_head or "W_U" in path[-2:] else ""


def is_vector(path: Path) -> bool:
    """Checks for a norm or a bias by its name: what a mask of matrices hides."""
    return is_norm(path) or kind(path) == "bias" or path[-1:] == ("b",)


@functools.lru_cache(maxsize=4096)
def projection(name: str) -> str:
    """Returns what Flax calls a module of attention: `query`, `key`, `value`, `out`."""
    return _ROLE_OF.get(re.sub(r"[^a-z]", "", name.lower()), "")


def is_convolution(path: Path) -> bool:
    return bool(_CONVOLUTION.search("".join(path[-2:-1])))


def is_layer(path: Path) -> bool:
    """Checks for the kernel of a layer that is called so, such as `Dense_0`, `q_proj`.

    Any other leaf that Flax calls a kernel may be anything.
    """
    is_called = is_convolution(path) or is_called_layer(path[-2:-1])
    return path[-1:] == ("kernel",) and is_called


def is_called_layer(path: Path) -> bool:
    """Checks an array for the name of a layer: `w_ih`, `up`, `wq`, `out_proj`."""
    name_words = words("".join(path))
    is_called = {*name_words} & (_LAYERS | IN_BLOCK | {"down", "gate", "wo", "fc"})
    return bool(is_called or projection("".join(path)) or {*name_words[:1]} & KERNELS)


def is_low_rank(path: Path) -> bool:
    """Checks for a factor of LoRA: `lora_a`, `w_lora_b`, `loraA/kernel`."""
    return any(re.fullmatch("(.*lora_?)[abAB]", name) for name in path[-2:])
