"""Names in use, as data: what the words of a path say of a leaf, and leaves in Flax's.

Every table says whose names it holds. Functions read a path once, word by word.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from .paths import Path, Shape


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
# Outputs of attention in penzai and praxis: common words, so only if nothing else is.
_OUT_IN_ATTENTION = ("output", "post", "proj")

#: The kernels of one attention, a letter for each axis, small for inputs; one letter
#: is one size. D, C, R, S are features or ranks that come in (of the query, of what is
#: attended to, of latents), E what goes out; M = N * V is flat, N = K * G heads are in
#: groups. L and digits stack.
LAYOUTS: tuple[dict[str, str], ...] = (
    # Flax, HuggingFace's Llama in bonsai and tunix; cross attention has its own C.
    dict(query="dNH", key="cKH", value="cKV", out="nvE"),
    dict(query="dNH", key="cKH", value="cKV", out="mE"),  # DeepSeek's flat output
    dict(query="dNH", key="cKH", value="cKV", out="Env"),  # praxis, simply
    dict(query="dKGH", key="dKH", value="dKV", out="kgvE"),  # penzai
    dict(query="dKGH", key="dKH", value="dKV", out="nvE"),  # Levanter
    # Latent attention in MaxText, with a low-rank query and without.
    dict(wq_b="rNH", wkv_b="sNW", out="nvE"),
    dict(wq_b="rNH", wkv_b="sNW", out="mE"),
    dict(query="dNH", wkv_b="sNW", out="nvE"),
    # `nn.scan` over plain kernels, and over kernels with heads.
    dict(query="LdQ", key="LdP", value="LdU", out="LqE"),
    dict(query="LdNH", key="LdKH", value="LdKV", out="LnvE"),
    dict(query="LdNH", key="LdKH", value="LdKV", out="LmE"),
    dict(wq_b="LrNH", wkv_b="LsNW", out="LmE"),
    # Gemma's einsums.
    dict(q_einsum="NdH", kv_einsum="2KdH", attn_vec_einsum="nhD"),
    dict(gating_einsum="2dF", linear="fD"),  # is stored both ways round
    dict(gating_einsum="2Fd", linear="fD"),
)
#: Roles whose outputs have heads, which `per_head` cuts.
WITH_HEADS = {"query", "key", "value", "wq_b", "wkv_b"}
#: All roles that a layout names.
ROLES = {role for layout in LAYOUTS for role in layout}


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


def without_ones(bias: Shape) -> Shape:
    """A bias as Flax has it: `(out, 1, 1)` in Equinox, `(1, 1, 1, out)` in stax."""
    return tuple(size for size in bias if size != 1) or bias[:1]


def in_flax(layers: Mapping[Path, Shape]) -> dict[Path, Path]:
    """The path of every leaf in Flax's words."""
    written: dict[Path, Path] = {}
    for own, shape in layers.items():
        # penzai writes `query.weights`, a checkpoint of PyTorch the whole path.
        *module, last = (*own[:-1], *own[-1].split(".")) if own else ("",)
        stem, _, end = last.rpartition("_")
        noisy = {(*own[:-1], f"{x}_{end}") for x in ("kernel", "bias")}
        if last == "b" and (*own[:-1], "w") in layers:
            last = "bias"
        elif last in ("w", "weight", "weights") and (
            module or (last == "weight" and ("bias",) in layers)
        ):
            # A weight with more axes than its bias is a layer, whatever its name.
            bias = layers.get((*own[:-1], "bias" if last == "weight" else "b"), ())
            is_norm = kind(own) == "norm" and not 0 < len(bias) < len(shape)
            last = "scale" if is_norm else "kernel"
        elif stem in ("kernel", "bias") and noisy <= layers.keys():
            module, last = [*module, end], stem  # Dopamine's noisy layers
        elif last in ("0", "1") and (*own[:-1], "2") not in layers:
            # A pair of arrays whose second is a bias: stax, and lists written by hand.
            kernel, bias = (layers.get((*own[:-1], i), ()) for i in "01")
            if len(kernel) > 1 and without_ones(bias) in (kernel[-1:], kernel[:1]):
                last = "kernel" if last == "0" else "bias"
        written[own] = (*module, last) if own else own
    # The roles of what is in each module, if it has those of attention.
    roles: dict[Path, dict[str, str]] = {}
    for path in written.values():
        for depth, name in enumerate(path):
            roles.setdefault(path[:depth], {})[name] = projection(name)
    for below in roles.values():
        if {"query", "key"} <= set(below.values()) and "out" not in below.values():
            others = [name for name in below if name in _OUT_IN_ATTENTION]
            below |= dict.fromkeys(others[:1], "out")
    for own, path in written.items():
        for depth in range(max(len(path) - 2, 0), len(path)):
            role, rest = roles[path[:depth]][path[depth]], path[depth + 1 :]
            found = Counter(roles[path[:depth]].values())
            # No second module may be called the same; a bare array needs an output.
            in_attention = role and found[role] == 1 and found["query"] and found["key"]
            if in_attention and (rest or found["out"]):
                written[own] = (*path[:depth], role, *(rest or ("kernel",)))
                break
    return written


class Leaf(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    own: Path
    path: Path
    shape: Shape
    axes: tuple[int, ...]  # of the leaf, from the end, for those of the shape
    bias: Shape | None  # alongside it; of no axes where a mask hides it
    module: str
    is_kernel: bool
    is_conv: bool
    is_turned: bool = False  # the leaf has its outputs first

    def numbers(self, inputs: Iterable[int], outputs: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        sides = (tuple(self.axes[i] for i in axes) for axes in (inputs, outputs))
        return MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in sides))


def leaves_of(
    shapes: Mapping[Path, Shape], axes_of: Mapping[Path, tuple[int, ...]]
) -> dict[Path, Leaf]:
    """One layer of each leaf in Flax's words, turned where its outputs come first."""
    layers = {own: tuple(shapes[own][i] for i in axes) for own, axes in axes_of.items()}
    written = in_flax(layers)
    by_path = {path: layers[own] for own, path in written.items()}
    biases = {own: by_path.get((*x[:-1], "bias")) for own, x in written.items()}
    kernels = {own for own, x in written.items() if x[-1:] == ("kernel",)}
    weights = {x for x in layers if "weight" in ".".join(x[-2:]).split(".")[-2:]}

    def is_turned(own: Path) -> bool | None:
        """Compares a kernel with its bias, which has its outputs."""
        shape, bias = layers[own], without_ones(biases[own] or ())
        first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
        return first if first != last and 0 < len(bias) < len(shape) else None

    # What is called a weight has its outputs first in Equinox and Haliax.
    votes = [is_turned(own) for own in kernels & weights]
    weights_turned = votes.count(True) >= votes.count(False)
    found: dict[Path, Leaf] = {}
    for own, path in written.items():
        shape, axes, bias = layers[own], axes_of[own], biases[own]
        is_weight, module = own in kernels & weights, "".join(path[-2:-1])
        in_attention = module in ("query", "key", "value", "out")
        is_conv = bool(CONVOLUTION.search(module))
        # Layers of rank 2 may be turned, too: HuggingFace's GPT-2, recurrent cells in
        # Equinox; and the first of pairs in stax.
        is_layer = own in kernels or "".join(own[-1:]).startswith(("weight_", "w_"))
        may_turn = own in weights or own[-1:] == ("0",)
        may_turn |= len(shape) == 2 and is_layer
        by = 0
        if may_turn and len(without_ones(bias or ())) < len(shape) > 1:
            turned = is_turned(own)
            if turned:
                by = len(without_ones(bias or ()))
            elif turned is None and is_weight and weights_turned:
                by = len(shape) - 1 if in_attention and module != "out" else 1
                by *= kind(own) != "embedding"
        shape, axes = shape[by:] + shape[:by], axes[by:] + axes[:by]
        kinds = module, own in kernels, is_conv
        found[own] = Leaf(own, path, shape, axes, bias, *kinds, bool(by))
    return found
