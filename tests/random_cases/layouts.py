"""Attention layers of every layout: shapes, `attention=`, and the scale of each entry.

A scale is written down by hand, head by head, in float64.
"""

import functools

import numpy as np
from layers import flat_layer as flat
from layers import fused_layer as fused
from layers import gains_layer
from layers import latent_layer as latent
from seeds import chance, pick

import muonclip_jax as mc


FEATURES, WIDTH, PATH = 3, 2, "layers/attn"


def axis(stack_axes):
    return next(iter(stack_axes.values()), 0)


def flax_layer(generator, heads, stack_axes):
    """Flax's kernels; grouped queries where key heads are fewer."""
    key_heads = pick(generator, *(n for n in (1, 2, 4) if heads % n == 0))
    shapes = {
        "query/kernel": (FEATURES, heads, WIDTH),
        "key/kernel": (FEATURES, key_heads, WIDTH),
        "value/kernel": (FEATURES, key_heads, WIDTH),
        "out/kernel": (heads, WIDTH, FEATURES),
    }
    if chance(generator, 0.5):
        shapes |= {"query/bias": (heads, WIDTH), "key/bias": (key_heads, WIDTH)}

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, key_heads)
        return {
            name: (query if "query" in name else key)[:, None]
            for name in shapes
            if name.split("/")[0] in ("query", "key")
        }

    attention = functools.partial(mc.flax_attention_layers, stack_axes=stack_axes)
    return shapes, attention, scale


def shares(gamma, alpha, key_heads):
    """What query and key take; a key that several queries share stays as it is."""
    if key_heads != len(gamma):
        return gamma, np.ones(key_heads)
    return gamma**alpha, gamma ** (1 - alpha)


def flat_layer(generator, heads, stack_axes):
    key_heads = pick(generator, *(n for n in (1, 2, 4) if heads % n == 0))
    shapes = {
        "q_proj/kernel": (FEATURES, heads * WIDTH),
        "k_proj/kernel": (FEATURES, key_heads * WIDTH),
    }
    if chance(generator, 0.5):
        shapes |= {"q_proj/bias": (heads * WIDTH,), "k_proj/bias": (key_heads * WIDTH,)}

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, key_heads)
        return {
            name: np.repeat(query if name[0] == "q" else key, WIDTH) for name in shapes
        }

    layer = flat(PATH, WIDTH, bias="q_proj/bias" in shapes, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def fused_layer(generator, heads, stack_axes):
    shapes = {"c_attn/kernel": (FEATURES, 3 * heads * WIDTH)}
    if chance(generator, 0.5):
        shapes["c_attn/bias"] = (3 * heads * WIDTH,)

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, heads)
        rows = np.concatenate([query, key, np.ones(heads)])
        return dict.fromkeys(shapes, np.repeat(rows, WIDTH))

    bias = "c_attn/bias" in shapes
    layer = fused(PATH, WIDTH, bias=bias, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def latent_layer(generator, heads, stack_axes):
    rope, value = pick(generator, 1, 2), pick(generator, 1, 3)
    query = pick(generator, "wq_b/kernel", "query/kernel")
    shapes = {
        query: (FEATURES, heads, WIDTH + rope),
        "wkv_b/kernel": (FEATURES, heads, WIDTH + value),
        "wkv_a/kernel": (FEATURES, FEATURES),
    }

    def scale(gamma, alpha):
        of_query = np.tile(gamma[:, None], WIDTH + rope)
        of_query[:, :WIDTH] = gamma[:, None] ** alpha
        of_key = np.ones((heads, WIDTH + value))
        of_key[:, :WIDTH] = gamma[:, None] ** (1 - alpha)
        return {query: of_query, "wkv_b/kernel": of_key}

    layer = latent(PATH, WIDTH, query=query, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def normalized_layer(generator, heads, stack_axes):
    shapes = {"query_ln/scale": (WIDTH,), "key_ln/scale": (WIDTH,)}
    shapes["query/kernel"] = shapes["key/kernel"] = (FEATURES, heads, WIDTH)
    if chance(generator, 0.5):
        shapes["query_ln/bias"] = (WIDTH,)

    def scale(gamma, alpha):
        query, key = shares(gamma.min(keepdims=True), alpha, 1)
        return {n: query if "query" in n else key for n in shapes if "_ln" in n}

    query = [name for name in shapes if "query_ln" in name]
    layer = gains_layer(PATH, query=query, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def gemma_layer(generator, heads, stack_axes):
    """Heads in front, key and value in one leaf."""
    place = axis(stack_axes)
    shapes = {
        "q_einsum": (heads, FEATURES, WIDTH),
        "kv_einsum": (2, heads, FEATURES, WIDTH),
    }
    query = mc.HeadLeaf("q_einsum", 3, axis=-3, stack_axis=place)
    part = (-4, slice(0, 1))
    key = mc.HeadLeaf("kv_einsum", 4, axis=-3, part=part, stack_axis=place)

    def scale(gamma, alpha):
        of_query, of_key = (x[:, None, None] for x in shares(gamma, alpha, heads))
        return {"q_einsum": of_query, "kv_einsum": np.stack([of_key, of_key**0])}

    layer = mc.AttentionLayer(PATH, (query,), (key,))
    return shapes, [layer], scale


LAYOUTS = {
    "flax": flax_layer,
    "flat": flat_layer,
    "fused": fused_layer,
    "latent": latent_layer,
    "normalized": normalized_layer,
    "gemma": gemma_layer,
}
