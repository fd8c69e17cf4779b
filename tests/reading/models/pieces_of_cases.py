"""What the adversaries share: small shapes, weights by name, and their register."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import Case, noted


# Batch, length, width, heads, head size, classes, words, width of the MLP.
B, T, D, H, K, C, V, F = 2, 5, 12, 3, 4, 7, 11, 16

CASES: dict[str, Case] = {}


def case(labels: str, params: Any, *args: Any, attention: str = "none", **options: Any):
    """Registers a function of params, and of `X` if not told, under its own name."""

    def register(fun):
        assert fun.__name__ not in CASES, fun.__name__
        CASES[fun.__name__] = Case(
            fun.__name__, fun, params, args or (X,), labels, attention, **options
        )
        return fun

    return register


def array(name: str, *shape: int, scale: float | None = None) -> jax.Array:
    """Normal entries by a name, about as large as a network would have them."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if scale is None:
        scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.5
    return jax.device_put(np.asarray(scale * generator.normal(size=shape), np.float32))


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: array(name, *shape) for name, shape in shapes.items()}


def gains(size: Any, name: str = "gain") -> jax.Array:
    shape = size if isinstance(size, tuple) else (size,)
    return jax.device_put(1.5 + np.abs(np.asarray(array(name, *shape))))


X = np.asarray(array("x", B, T, D, scale=1.5))  # of which parts are taken at import
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)))
KEY = jnp.asarray(np.asarray([0, 3], np.uint32))  # of `jax.random.key(3)`

DISTANCE = np.arange(T)[:, None] - np.arange(T) + T - 1
CAUSAL = np.tril(np.ones((T, T), bool))

#: One attention layer and a head.
ONE = weights(q=(D, D), k=(D, D), v=(D, D), o=(D, D), head=(D, C))
SAYS = "q k v o 0|1; head head"


def one(**shapes: Any) -> dict[str, jax.Array]:
    """The layer with other or more leaves; a shape of `None` takes one away."""
    made = {
        k: v if hasattr(v, "dtype") else array(k, *v)
        for k, v in shapes.items()
        if v is not None
    }
    return {k: v for k, v in {**ONE, **made}.items() if k not in shapes or k in made}


def network(
    labels: str, *args: Any, head: Any = (D, C), attention: str = "none", **shapes: Any
):
    """Registers a function of kernels and `X`, of which the last is a head."""
    leaves = weights(**shapes, head=head)
    return case(f"{labels}; head head", leaves, *args, attention=attention)


def one_layer(
    attention: str,
    *args: Any,
    also: str = "",
    says: str = SAYS,
    scaled: str = "",
    plain: Callable[..., Any] | None = None,
    **shapes: Any,
):
    """Registers a function of the layer `ONE` with these leaves.

    `also` are the labels of leaves that it has besides, `says` those of its own.
    """
    labels, params = "; ".join(filter(None, (also, says))), one(**shapes)
    told = {"attention": attention, "scaled": scaled, "plain": plain}
    return case(labels, params, *args, **told)


def heads(attention: str, *args: Any, **about: Any):
    """Registers a function of query, key and value as what `one_layer` mixes by them.

    It has the further arguments after these, and the further leaves by their names.
    """

    def register(fun):
        def loss(p, x, *args):
            leaves = {n: p[n] for n in p if n not in ONE}
            y = fun(*qkv(p, x), *args, **leaves)
            return end(p, x, y.reshape(*x.shape[:-1], -1))

        loss.__name__ = fun.__name__
        one_layer(attention, *args, **about)(loss)
        return fun

    return register


def formulas(attention: str, **functions: Callable[..., Any]) -> None:
    """Registers functions of query, key and value, each under its name."""
    for name, fun in functions.items():
        fun.__name__ = name
        heads(attention)(fun)


def cut(y, heads: int = H):
    return y.reshape(*y.shape[:-1], heads, -1)


def qkv(p, x):
    return cut(x @ p["q"]), cut(x @ p["k"]), cut(x @ p["v"])


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5


def mixed(w, v):
    y = jnp.einsum("bhqk,bkhd->bqhd", w, v)
    return y.reshape(*y.shape[:-2], -1)


def soft(logits, **where):
    """A softmax whose logits are noted."""
    return jax.nn.softmax(noted(logits, **where))


def attend(q, k, v, **where):
    return mixed(soft(scores(q, k), **where), v)


def sums_of_both(a, b):
    """Two groups of keys as one: the largest logit, the exponentials, the values."""
    top = jnp.maximum(a[0], b[0])
    one, two = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    values = a[2] * one[..., None] + b[2] * two[..., None]
    return top, a[1] * one + b[1] * two, values


def end(p, x, y):
    return jax.nn.gelu(x + y @ p["o"]) @ p["head"]


def rms(y, gain=1.0):
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * gain


def unit(y):
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def turned(y):
    """Rotary positions, by halves."""
    angle = jnp.arange(y.shape[1])[:, None, None] / 10.0 ** jnp.arange(K // 2)
    a, b = jnp.split(y, 2, -1)
    s, c = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


def attended(p, x):
    """The layer as it is, for cases that write it in another way."""
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k)), v))
