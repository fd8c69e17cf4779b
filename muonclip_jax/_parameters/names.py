"""What the names of leaves and modules say, however a framework spells them."""

import functools
import re

from .paths import Path


_KERNELS = {"kernel", "w", "weight"}
_VECTORS = {"scale", "offset", "mean", "var", "gamma", "beta", "gain"}
_NORMS = {"ln", "bn", "gn", "rms"}
_EMBEDDINGS = {"embed", "embeds", "embedding", "embeddings", "embedder", "embs"}
_SHORT = {"emb", "embd"}
_TABLES = {"wte", "wpe", "wtoken", "wpos", "tok"}
_POSITIONS = {"pos", "position", "positions", "positional", "posemb", "relpos"}
_RELATIVE = _POSITIONS | {"relative", "rel"}
_TOKENS = {"token", "tokens"}
_LEARNED = {"latents", "prompt", "prompts", "prototypes"}
_LEARNED |= {"codebook", "codebooks", "codevectors"}
_LAYERS = {"proj", "projection", "linear", "dense", "modulation"}
_GAINS = {"scale", "scales", "gain", "gains"}
_HEADS = {"head", "unemb", "unembed", "unembedding", "classifier", "vocab"}

_TAKES_FEATURES = {"up", "gate", "fc", "wi", "attn", "mlp", "ffn", "ff", "hidden"}
_TAKES_FEATURES |= {"in", "kv", "qkv", "qk"}

#: Modules of attention, by what Flax calls them.
_PROJECTIONS = {
    "query": {"query", "q", "wq", "qproj", "queryproj", "qprojection", "toq"},
    "key": {"key", "k", "wk", "kproj", "keyproj", "kprojection", "tok"},
    "value": {"value", "v", "wv", "vproj", "valueproj", "vprojection", "tov"},
    "out": {"out", "o", "wo", "oproj", "outproj", "outputproj", "attnoutproj", "toout"},
}
_ROLE_OF = {name: role for role, names in _PROJECTIONS.items() for name in names}


@functools.lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """`LayerNorm_0` and `layer_norm` are `layer`, `norm`."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return tuple(word.lower() for word in found)


def is_kernel(path: Path) -> bool:
    return path[-1:] != () and path[-1] in _KERNELS


def is_bias(path: Path) -> bool:
    """Whether a leaf is a bias, as the last word of its name says: `q_bias`."""
    return path[-1:] != () and words(path[-1])[-1:] == ("bias",)


def is_norm(path: Path) -> bool:
    """Whether a leaf is the gain or the shift of a norm."""
    return _is_norm(path[-2:])


@functools.lru_cache(maxsize=4096)
def _is_norm(path: Path) -> bool:
    if path[-1:] and path[-1] in _VECTORS:
        return True
    is_part = path[-1:] != () and path[-1] in ("w", "weight", "bias", "b")
    module = words("/".join(path[-2:-1]))
    return is_part and not _names_layer(module) and any(map(_names_norm, module))


def is_gain(path: Path) -> bool:
    """Whether a leaf multiplies features, as the last word of its name says.

    Of several layers, as `layer_scale`, it has two axes.
    """
    return path[-1:] != () and not _GAINS.isdisjoint(words(path[-1])[-1:])


def is_vector(path: Path) -> bool:
    return is_bias(path) or is_norm(path)


def is_embedding(path: Path) -> bool:
    """Whether a leaf, or the module that holds it, is a table of embeddings.

    The word has to end the name, or begin it (`embed_tokens`): `embeddings_project` is
    no table. What Flax calls a kernel is one only if its module is called so.
    """
    return _is_embedding(path[-2:])


@functools.lru_cache(maxsize=4096)
def _is_embedding(path: Path) -> bool:
    leaf, module = words(path[-1]) if path else (), words("/".join(path[-2:-1]))
    if "W_E" in path[-2:]:  # as papers on interpretability write it
        return True
    if path[-1:] and path[-1] in _KERNELS:
        at_end = module[-1:] and (module[-1] in _EMBEDDINGS | _TABLES)
        return bool(at_end or (path[-1] != "kernel" and _names_table(module)))
    ends = {*leaf[-1:], *leaf[:1]} - {word for word in leaf if _names_layer(leaf)}
    return bool(ends & (_EMBEDDINGS | _TABLES | _SHORT)) or _names_table(leaf)


def _names_table(module: tuple[str, ...]) -> bool:
    """Whether a module is named as a table of embeddings otherwise than in Flax.

    `emb` alone, but not `time_emb`, which is often a layer behind an embedding.
    """
    of_tokens = bool(set(module[:-1]) & {"tok", "token", "word", "vocab", "embedding"})
    is_short = bool(set(module[-1:]) & _SHORT)
    is_plain = module[-1:] in (("table",), ("matrix",), ("lookup",))
    return (
        (module[:1] == ("embed",) and not _names_layer(module))
        or module == ("shared",)  # by encoder and decoder, as in T5 and BART
        or module[-1:] in (("codebook",), ("codebooks",))
        or (is_short and (of_tokens or len(module) == 1))
        or (is_plain and of_tokens)
    )


def is_position_or_token(path: Path) -> bool:
    """Whether a leaf is a table of positions, or learned tokens."""
    own = words(path[-1]) if path else ()
    if path[-1:] == ("kernel",):
        return False
    if path[-1:] and path[-1] in _KERNELS:
        module = words("/".join(path[-2:-1]))
        is_of_pairs = module[-1:] == ("bias",) and bool(set(module) & _RELATIVE)
        is_table = bool(set(module[:1]) & _POSITIONS) and not _names_layer(module)
        return is_of_pairs or is_table
    return bool(set(own) & (_POSITIONS | _TOKENS) or set(own[-1:]) & _LEARNED)


def says_position(path: Path) -> bool:
    """Whether a table is of positions or segments, and not of a vocabulary."""
    own = {word for name in path[-2:] for word in words(name)}
    return bool(own & (_RELATIVE | {"wpe", "wpos", "type"}))


def without_number(name: str) -> str:
    """`hidden_` for `hidden_2`, one of several modules."""
    return name.rstrip("0123456789")


def is_head(name: str) -> bool:
    """Whether a module is named as an output head: `lm_head`, not `head_conv`."""
    own = words(name)
    if not own or own[0] == "pre":
        return False
    return (
        name == "W_U"
        or own[-1] in _HEADS
        or any(word.startswith("logit") for word in own)
    )


@functools.lru_cache(maxsize=4096)
def projection(name: str) -> str | None:
    """What Flax calls a module of attention: `query`, `key`, `value`, `out`."""
    return _ROLE_OF.get(re.sub(r"[^a-z]", "", name.lower()))


def writes_features(name: str) -> bool | None:
    """Whether a module gives features of the model, or takes them; `None` if open."""
    role = projection(name)
    if role and name != "value":
        return role == "out"
    own = set(words(name))
    if own & {"down", "out"} or name in ("fc2", "wo"):
        return True
    if own & _TAKES_FEATURES:
        return False
    return True if "proj" in own else None


def has_word(path: Path, *beginnings: str) -> bool:
    """Whether a run of letters in some names begins so."""
    return any(
        letters.startswith(beginnings)
        for name in path
        for letters in re.split(r"[^a-z]+", name.lower())
    )


def _names_layer(module: tuple[str, ...]) -> bool:
    """Whether a module is named as a layer, whatever it is of: `pos_proj`."""
    return bool(set(module[-1:]) & _LAYERS)


def _names_norm(word: str) -> bool:
    return word in _NORMS or word.endswith(("norm", "normalization"))
