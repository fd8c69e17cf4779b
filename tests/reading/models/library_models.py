"""Models with the structure of real libraries' models, written out in plain JAX.

The benchmark `reading_libraries.py` builds the real ones. These need no library: each
keeps what is particular about its model, and leaves out what the others have.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import by_path, Case, noted
from helpers import normal
from trees import nested
from written_out import cross_entropy


B, T, D, H, E, F, V, L = 2, 6, 16, 4, 4, 24, 19, 2
IDS = np.random.default_rng(0).integers(0, V, (B, T))


class Leaf(NamedTuple):
    """What an expert says of a leaf, a letter for each axis of a matrix.

    `i` is an input, `o` an output, `s` a stack; or it is the label of a leaf for AdamW.
    """

    shape: tuple[int, ...]
    said: str

    @property
    def label(self) -> str:
        """As a `Case` has it."""
        if {*self.said} - {*"ios"}:
            return self.said
        sides = ([i for i, x in enumerate(self.said) if x == side] for side in "io")
        return "|".join("".join(map(str, side)) for side in sides)

    def drawn(self, seed: int) -> jax.Array:
        """Kernels by the width of their inputs, vectors about one."""
        x = np.asarray(normal((3, seed), *self.shape))  # no program at import
        x = 1 + 0.3 * x if x.ndim < 2 else 2 * x * self.shape[-2] ** -0.5
        return jax.device_put(x)


def io(*shape):
    return Leaf(shape, "io")


def oi(*shape):
    return Leaf(shape, "oi")


def vector(*shape):
    return Leaf(shape, "vector")


@dataclasses.dataclass(frozen=True, eq=False)
class Model(Case):
    """A case with the paths of its attention layers."""

    layers: tuple[str, ...] = ()


MODELS: dict[str, Model] = {}


def model(
    leaves: dict[str, Leaf], args=(IDS,), layers=(), attention="read", has_remat=False
):
    """Registers a loss of params by their paths under its name.

    Logits inside `remat` cannot be seen from outside, so it is left out for the judge.
    """

    def register(loss: Callable[..., Any]) -> Callable[..., Any]:
        def fun(tree, *args):
            return loss(by_path(tree), *args)

        def plain(tree, *args):
            return loss(by_path(tree), *args, remat=lambda layer: layer)

        drawn = [leaf.drawn(i) for i, leaf in enumerate(leaves.values())]
        params = nested(dict(zip(leaves, drawn, strict=True)))
        labels = "; ".join(f"{path} {leaf.label}" for path, leaf in leaves.items())
        MODELS[loss.__name__] = Model(
            loss.__name__,
            fun,
            params,
            args,
            labels,
            attention if layers else "none",
            scaled="*att/b* att/gain",
            plain=plain if has_remat else None,
            layers=layers,
        )
        return loss

    return register


def normed(x, gain=1.0):
    return gain * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def cut(x, heads=H):
    return x.reshape(*x.shape[:-1], heads, -1)


def rotated(x, width=None):
    """By halves, of the first entries of each head."""
    width = width or x.shape[-1]
    a, b = jnp.split(x[..., :width], 2, -1)
    angle = jnp.arange(x.shape[1])[:, None, None] / 10.0 ** jnp.arange(width // 2)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle)]
    turned += [b * jnp.cos(angle) + a * jnp.sin(angle), x[..., width:]]
    return jnp.concatenate(turned, -1)


def attend(query, key, value, *, scale=E**-0.5, bias=0.0, causal=True, cap=0, **where):
    """Of `(batch, length, heads, features)`; groups of queries share keys."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    mask = jnp.tri(*logits.shape[-2:], dtype=bool) if causal else True
    noted(jnp.where(mask, logits, -jnp.inf), **where)
    logits = (cap * jnp.tanh(logits / cap) if cap else logits) + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return out.reshape(*out.shape[:2], -1)


def layers_of(names):
    """The leaves of each of `L` layers."""
    return {f"{i}/{k}": v for i in range(L) for k, v in names.items()}


def in_layer(p, i):
    return {k.removeprefix(f"{i}/"): x for k, x in p.items() if k.startswith(f"{i}/")}


PROJECTIONS = {f"att/{n}": io(D, D) for n in "qkvo"}
MLP = {"up": io(D, F), "down": io(F, D)}
EMBED = {"embed": Leaf((V, D), "embedding")}
HEAD = {"head": Leaf((D, V), "head")}
ATT = ("0/att", "1/att")


def one_of_layers(leaves, rest: Any = HEAD, **about: Any):
    """Registers a layer as a model of `L`; without `HEAD` its head is the embedding."""

    def register(layer: Callable[..., Any]) -> Callable[..., Any]:
        def loss(p, ids):
            x = p["embed"][ids]
            for i in range(L):
                x = layer(in_layer(p, i), x)
            return cross_entropy(normed(x) @ (p["head"] if rest else p["embed"].T))

        loss.__name__ = layer.__name__
        return model(EMBED | layers_of(leaves) | rest, layers=ATT, **about)(loss)

    return register


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


@model(
    EMBED
    | {"position": vector(T, D), "segment": Leaf((2, D), "embedding")}
    | layers_of(PROJECTIONS | MLP | {"att/bq": vector(D), "norm": vector(D)})
    | {"transform": io(D, D), "bias": vector(V)},
    layers=ATT,
)
def bert(p, ids):
    """Norms after the residual, a tied head with a transform and a bias."""
    x = p["embed"][ids] + p["position"] + p["segment"][jnp.zeros_like(ids)]
    for i in range(L):
        q = in_layer(p, i)
        query = cut(x @ q["att/q"] + q["att/bq"])
        key, value = cut(x @ q["att/k"]), cut(x @ q["att/v"])
        x = x + attend(query, key, value, causal=False) @ q["att/o"]
        x = normed(x + mlp(q, normed(x)), q["norm"])
    return cross_entropy(jax.nn.gelu(x @ p["transform"]) @ p["embed"].T + p["bias"])


@one_of_layers(
    {
        "att/qkv": oi(3 * D, D),
        "att/b": vector(3 * D),
        "o": oi(D, D),
        "up": oi(F, D),
        "down": oi(D, F),
    },
    rest={},
)
def gpt2(q, x):
    """HuggingFace: kernels (outputs, inputs); query, key and value are thirds."""
    thirds = jnp.split(normed(x) @ q["att/qkv"].T + q["att/b"], 3, -1)
    x = x + attend(*map(cut, thirds)) @ q["o"].T
    return x + jax.nn.gelu(normed(x) @ q["up"].T) @ q["down"].T


@one_of_layers(MLP | {"att/qkv": io(D, 3 * D), "att/b": vector(3 * D), "o": io(D, D)})
def gpt_neox(q, x):
    """Each head has its query, key and value in a row; half of a head is rotated."""
    y = normed(x)
    query, key, value = jnp.split(cut(y @ q["att/qkv"] + q["att/b"]), 3, -1)
    query, key = rotated(query, 2), rotated(key, 2)
    return x + attend(query, key, value) @ q["o"] + mlp(q, y)


GROUPED = PROJECTIONS | {f"att/{n}": io(D, 2 * E) for n in "kv"}


@one_of_layers(GROUPED | MLP | {"gate": io(D, F), "norm": vector(D)})
def llama(q, x):
    y = normed(x, q["norm"])
    query, key = rotated(cut(y @ q["att/q"])), rotated(cut(y @ q["att/k"], 2))
    x = x + attend(query, key, cut(y @ q["att/v"], 2)) @ q["att/o"]
    y = normed(x)
    return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]


@one_of_layers({"att/qkv": io(D, 2 * 4 * E), "o": io(D, D)} | MLP)
def falcon(q, x):
    """A group has its two queries, then its key, then its value."""
    y = normed(x)
    groups = (y @ q["att/qkv"]).reshape(B, T, 2, 4, E)
    query = groups[..., :2, :].reshape(B, T, H, E)
    key, value = groups[..., 2, :], groups[..., 3, :]
    return x + attend(rotated(query), rotated(key), value) @ q["o"] + mlp(q, y)


CROSS = {f"cross/{n}": io(D, D) for n in "qkvo"}


@model(
    EMBED
    | {"e/bias": Leaf((8, H), "embedding")}
    | {f"e/{k}": v for k, v in (PROJECTIONS | MLP).items()}
    | {f"d/{k}": v for k, v in (PROJECTIONS | CROSS | MLP).items()},
    layers=("e/att", "d/att", "d/cross"),
)
def t5(p, ids):
    """Tables of relative positions, of which only the encoder's are kept here."""
    distance = jnp.clip(jnp.arange(T)[:, None] - jnp.arange(T) + 4, 0, 7)
    bias = 100 * p["e/bias"][distance].transpose(2, 0, 1)

    def heads(prefix, x, y):
        names = (("q", x), ("k", y), ("v", y))
        return (cut(z @ p[f"{prefix}/{n}"]) for n, z in names)

    x = normed(p["embed"][ids])
    kept = {"scale": 1.0, "causal": False}
    y = x + attend(*heads("e/att", x, x), bias=bias, **kept) @ p["e/att/o"]
    y = normed(y + jax.nn.relu(y @ p["e/up"]) @ p["e/down"])
    x = normed(x + attend(*heads("d/att", x, x), scale=1.0) @ p["d/att/o"])
    x = normed(x + attend(*heads("d/cross", x, y), **kept) @ p["d/cross/o"])
    x = normed(x + jax.nn.relu(x @ p["d/up"]) @ p["d/down"])
    return cross_entropy(x @ p["embed"].T)


@model(
    EMBED | {"inner": io(D, D)} | PROJECTIONS | MLP,
    layers=("att",),
    attention="again",
)
def albert(p, ids):
    """One layer, twice: the statistic is the larger of both."""
    x = p["embed"][ids] @ p["inner"]
    for _ in range(L):
        query, key, value = (cut(x @ p[f"att/{n}"]) for n in "qkv")
        out = attend(query, key, value, causal=False, layer="att", merge="largest")
        x = normed(x + out @ p["att/o"])
        x = normed(x + mlp(p, x))
    return cross_entropy(x @ p["embed"].T)


PIXELS = normal(5, B, 8, 8, 3)


def convolved(x, w, stride=1, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride,) * 2, "SAME", None, None, numbers, groups
    )


VISION = {"patches": Leaf((4, 4, 3, D), "iiio"), "cls": vector(1, 1, D)}
VISION |= {"position": vector(1, 5, D)} | PROJECTIONS | MLP


def seen(p, pixels):
    x = convolved(pixels, p["patches"], 4).reshape(B, 4, D)
    x = jnp.concatenate([jnp.tile(p["cls"], (B, 1, 1)), x], 1) + p["position"]
    y = normed(x)
    query, key, value = (cut(y @ p[f"att/{n}"]) for n in "qkv")
    x = x + attend(query, key, value, causal=False) @ p["att/o"]
    return normed(x + mlp(p, normed(x)))[:, 0]


@model(
    {f"i/{k}": v for k, v in VISION.items()}
    | {f"t/{k}": v for k, v in (EMBED | PROJECTIONS).items()}
    | {"i/out": io(D, E), "t/out": io(D, E), "scale": vector()},
    args=(PIXELS, IDS),
    layers=("i/att", "t/att"),
)
def clip(p, pixels, ids):
    """Images and texts are compared by a product, whose softmax weighs nothing."""
    a = seen({k[2:]: x for k, x in p.items() if k[0] == "i"}, pixels)
    x = p["t/embed"][ids]
    query, key, value = (cut(normed(x) @ p[f"t/att/{n}"]) for n in "qkv")
    x = x + attend(query, key, value) @ p["t/att/o"]
    a, b = normed(a @ p["i/out"]), normed(x[:, -1] @ p["t/out"])
    logits = jnp.exp(p["scale"]) * a @ b.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


@model(
    {
        "stem": Leaf((4, 4, 3, 8), "iiio"),
        "depthwise": vector(3, 3, 1, 8),
        "up": io(8, F),
        "down": io(F, 8),
        "scale": vector(8),
        "between": Leaf((2, 2, 8, 12), "iiio"),
        "head": Leaf((12, 7), "head"),
    },
    args=(PIXELS,),
)
def convnext(p, pixels):
    """A depthwise window, then a perceptron by 1, with a scale of the layer."""
    x = convolved(pixels, p["stem"], 2)
    y = normed(convolved(x, p["depthwise"], groups=8))
    x = x + p["scale"] * (jax.nn.gelu(y @ p["up"]) @ p["down"])
    x = convolved(normed(x), p["between"], 2)
    return cross_entropy(normed(x.mean((1, 2))) @ p["head"])


LATENT = {
    "att/q": Leaf((D, L, H, 6), "isoo"),
    "att/kv_a": Leaf((D, L, 7), "iso"),
    "att/gain": vector(L, 5),
    "att/kv_b": Leaf((5, L, H, 4 + E), "isoo"),
    "o": Leaf((H, L, E, D), "isio"),
    "up": Leaf((D, L, F), "iso"),
    "down": Leaf((F, L, D), "iso"),
}


@model(EMBED | LATENT | HEAD, layers=("att",), has_remat=True)
def deepseek(p, ids, remat=jax.checkpoint):
    """MaxText: layers on axis 1; a latent key, and one rotary key that heads share."""

    def layer(x, q):
        y = normed(x)
        query = jnp.einsum("btd,dhe->bthe", y, q["att/q"])
        low, shared = jnp.split(y @ q["att/kv_a"], [5], -1)
        low = normed(low, q["att/gain"])
        key, value = jnp.split(
            jnp.einsum("btr,rhe->bthe", low, q["att/kv_b"]), [4], axis=-1
        )
        shared = jnp.broadcast_to(rotated(shared[:, :, None]), (B, T, H, 2))
        query = jnp.concatenate([query[..., :4], rotated(query[..., 4:])], -1)
        out = cut(attend(query, jnp.concatenate([key, shared], -1), value))
        x = x + jnp.einsum("bthe,hed->btd", out, q["o"])
        return x + mlp(q, normed(x)), None

    axes = {k: jnp.moveaxis(p[k], 0 if k == "att/gain" else 1, 0) for k in LATENT}
    x, _ = jax.lax.scan(remat(layer), p["embed"][ids], axes)
    return cross_entropy(normed(x) @ p["head"])


MIXED = {f"att/{n}": Leaf((L, D, D), "sio") for n in "qkvo"}
MIXED |= {"router": Leaf((L, D, 3), "router"), "up": Leaf((L, 3, D, F), "ssio")}
MIXED |= {"gate": Leaf((L, 3, D, F), "ssio"), "down": Leaf((L, 3, F, D), "ssio")}


@model(EMBED | MIXED | HEAD, layers=("att",))
def mixtral(p, ids):
    """Scanned layers of experts, two for a token, tokens sorted by expert."""

    def layer(x, q):
        y = normed(x)
        query, key, value = (cut(y @ q[f"att/{n}"]) for n in "qkv")
        x = x + attend(rotated(query), rotated(key), value) @ q["att/o"]
        y = normed(x).reshape(-1, D)
        gates, chosen = jax.lax.top_k(y @ q["router"], 2)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=3)
        rows = jnp.repeat(y, 2, 0)[order]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, q["gate"], sizes))
        hidden = hidden * jax.lax.ragged_dot(rows, q["up"], sizes)
        out = jax.lax.ragged_dot(hidden, q["down"], sizes)[jnp.argsort(order)]
        weights = jax.nn.softmax(gates)
        x = x + (out.reshape(-1, 2, D) * weights[..., None]).sum(1).reshape(x.shape)
        return x, None

    x, _ = jax.lax.scan(layer, p["embed"][ids], {k: p[k] for k in MIXED})
    return cross_entropy(normed(x) @ p["head"])


@model(
    EMBED
    | layers_of(
        {
            "att/q": Leaf((H, D, E), "oio"),
            "att/kv": Leaf((2, 2, D, E), "soio"),
            "o": Leaf((H, E, D), "iio"),
            "gate_up": Leaf((2, F, D), "soi"),
            "down": io(F, D),
            "after": vector(D),
        }
    ),
    layers=ATT,
)
def gemma2(p, ids):
    """Einsums, key and value in one leaf, logits capped, norms after, a tied head.

    The axis of key and value is a free one of their product, so an output like others.
    """
    x = p["embed"][ids] * D**0.5
    for i in range(L):
        q = in_layer(p, i)
        y = normed(x)
        query = jnp.einsum("btd,hde->bthe", y, q["att/q"]) * E**-0.5
        key, value = jnp.einsum("bsd,ckde->cbske", y, q["att/kv"])
        out = attend(rotated(query), rotated(key), value, scale=1.0, cap=50.0)
        out = jnp.einsum("bthe,hed->btd", cut(out), q["o"])
        x = x + normed(out, 1 + q["after"])
        gate, up = jnp.einsum("btd,cfd->cbtf", normed(x), q["gate_up"])
        x = x + (jax.nn.gelu(gate) * up) @ q["down"]
    return cross_entropy(30.0 * jnp.tanh(normed(x) @ p["embed"].T / 30.0))


@one_of_layers(
    {
        "q": Leaf((D, H, E), "ioo"),
        "k": Leaf((D, 2, E), "ioo"),
        "v": Leaf((D, 2, E), "ioo"),
        "o": Leaf((H, E, D), "iio"),
        "att/q_norm": vector(E),
        "att/k_norm": vector(E),
    },
    attention="jointly",
)
def qwen3(q, x):
    """Query and key are normalized, with gains that all heads of a layer share."""
    y = normed(x)
    query, key, value = (jnp.einsum("btd,dhe->bthe", y, q[n]) for n in "qkv")
    query = rotated(normed(query, q["att/q_norm"]))
    key = rotated(normed(key, q["att/k_norm"]))
    out = cut(attend(query, key, value))
    return x + jnp.einsum("bthe,hed->btd", out, q["o"])


STACKED = {
    "att/q": Leaf((L, 2, 2, E, D), "soooi"),
    "att/k": Leaf((L, 2, E, D), "sooi"),
    "att/v": Leaf((L, 2, E, D), "sooi"),
    "o": Leaf((L, D, 2, 2, E), "soiii"),
    "norm": vector(L, D),
}


@model(
    EMBED | STACKED | {"head": Leaf((V, D), "head")}, layers=("att",), has_remat=True
)
def levanter(p, ids, remat=jax.checkpoint):
    """Stacked layers; queries have an axis of groups and one of their members."""

    def layer(x, q):
        y = normed(x, q["norm"])
        query = jnp.einsum("btd,kged->btkge", y, q["att/q"]).reshape(B, T, H, E)
        key, value = (jnp.einsum("btd,ked->btke", y, q[f"att/{n}"]) for n in "kv")
        out = attend(rotated(query), rotated(key), value)
        return x + jnp.einsum(
            "btkge,dkge->btd", out.reshape(B, T, 2, 2, E), q["o"]
        ), None

    scanned = {k: p[k] for k in STACKED}
    x, _ = jax.lax.scan(remat(layer), p["embed"][ids], scanned)
    return cross_entropy(jnp.einsum("btd,vd->btv", normed(x), p["head"]))


@model(
    EMBED
    | {f"att/{n}": oi(D, D) for n in "qkvo"}
    | {"up": oi(F, D), "down": oi(D, F), "head": Leaf((V, D), "head")},
    layers=("att",),
)
def equinox(p, ids):
    """Kernels (outputs, inputs), a layer that sees a row, mapped over the batch."""

    def row(ids):
        x = jax.vmap(lambda i: p["embed"][i])(ids)
        heads = (jax.vmap(lambda y, n=n: p[f"att/{n}"] @ y)(x) for n in "qkv")
        query, key, value = (cut(y) for y in heads)
        logits = jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(E)
        out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), value)
        x = x + jax.vmap(lambda y: p["att/o"] @ y.ravel())(out)
        x = x + jax.vmap(lambda y: p["down"] @ jax.nn.gelu(p["up"] @ y))(x)
        return jax.vmap(lambda y: p["head"] @ y)(x), logits

    out, logits = jax.vmap(row)(ids)
    noted(logits)
    return cross_entropy(out)


@model(
    EMBED
    | {"lstm": io(D + 8, 32), "b": vector(32)}
    | {"gru_in": io(8, 24), "gru": io(8, 24), "head": Leaf((8, V), "head")}
)
def haiku_recurrent(p, ids):
    """One kernel of the input and the state together, then two of them apart."""

    def step(carry, x):
        h, c, g = carry
        y = jnp.concatenate([x, h], -1) @ p["lstm"] + p["b"]
        i, f, o, u = (jax.nn.sigmoid(z) for z in jnp.split(y, 4, -1))
        c = f * c + i * jnp.tanh(u)
        h = o * jnp.tanh(c)
        z, r, a = jnp.split(h @ p["gru_in"], 3, -1)
        hz, hr, ha = jnp.split(g @ p["gru"], 3, -1)
        z, r = jax.nn.sigmoid(z + hz), jax.nn.sigmoid(r + hr)
        g = (1 - z) * g + z * jnp.tanh(a + r * ha)
        return (h, c, g), g

    zeros = jnp.zeros((B, 8))
    x = p["embed"][ids].swapaxes(0, 1)
    _, x = jax.lax.scan(step, (zeros, zeros, zeros), x)
    return cross_entropy(x @ p["head"])


@model(
    {
        "in": Leaf((3, 3, 3, D), "iiio"),
        "time": io(D, F),
        "time_2": io(F, D),
        "conv": Leaf((3, 3, D, D), "iiio"),
        "text": Leaf((V, D), "embedding"),
        "out": Leaf((3, 3, D, 3), "head"),
    }
    | PROJECTIONS,
    args=(PIXELS, np.asarray([1.0, 4.0]), IDS),
    layers=("att",),
)
def diffusion(p, pixels, time, ids):
    """A time's sines through a perceptron, pixels that look at text, pixels out."""
    angle = time[:, None] / 10.0 ** jnp.arange(D // 2)
    time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    time = jax.nn.silu(time @ p["time"]) @ p["time_2"]
    x = convolved(pixels, p["in"])
    x = x + convolved(jax.nn.silu(normed(x) + time[:, None, None]), p["conv"])
    y, text = normed(x).reshape(B, -1, D), p["text"][ids]
    query = cut(y @ p["att/q"])
    key, value = (cut(text @ p[f"att/{n}"]) for n in "kv")
    out = attend(query, key, value, causal=False) @ p["att/o"]
    x = x + out.reshape(x.shape)
    return jnp.mean((convolved(jax.nn.silu(normed(x)), p["out"]) - pixels) ** 2)


@model(
    {
        "edges": io(2 * D, D),
        "nodes": io(2 * D, D),
        "head": Leaf((D, 7), "head"),
    },
    args=(normal(9, 5, D), np.asarray([0, 1, 2, 3]), np.asarray([1, 2, 4, 0])),
)
def graph(p, nodes, senders, receivers):
    """jraph: messages along edges are summed at their receivers."""
    ends = jnp.concatenate([nodes[senders], nodes[receivers]], -1)
    messages = jax.nn.relu(ends @ p["edges"])
    sums = jax.ops.segment_sum(messages, receivers, 5)
    nodes = jax.nn.relu(jnp.concatenate([nodes, sums], -1) @ p["nodes"])
    return cross_entropy(nodes.sum(0) @ p["head"])


@model(
    {
        "first": io(9, F),
        "second": io(F, F),
        "mean": Leaf((F, 3), "head"),
        "log_std": vector(3),
        "value": vector(F, 1),
    },
    args=(normal(10, B, 9),),
)
def actor_critic(p, x):
    """Brax: a policy with a deviation that no input changes, and a value."""
    x = jnp.tanh(jnp.tanh(x @ p["first"]) @ p["second"])
    mean, value = x @ p["mean"], (x @ p["value"])[..., 0]
    likelihood = jnp.sum(((1.0 - mean) / jnp.exp(p["log_std"])) ** 2, -1)
    return jnp.mean(likelihood + (value - 1.0) ** 2)
