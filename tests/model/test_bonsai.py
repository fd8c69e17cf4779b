"""QK-Clip and dimension numbers on the leaves of bonsai's Qwen 3.

PyPI has no bonsai, so these are its leaves, smaller, and a product of the first layer
by NumPy. They need no library, so that they always run.
"""

import json
import pathlib

import clipping
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

TREES = pathlib.Path(__file__).parent.parent / "data/trees"
TREE = json.loads((TREES / "bonsai_qwen3_0.6b.json").read_text())
SMALL = {151936: 23, 1024: 20, 3072: 28, 16: 4, 8: 2, 128: 8}
X = np.random.default_rng(1).normal(size=(7, SMALL[1024]))


def params_of(normalized):
    params = {}
    for leaf in TREE["leaves"]:
        *modules, name = leaf["path"]
        if not normalized and modules[-1] in ("q_norm", "k_norm"):
            continue
        inner = params
        for module in modules:
            inner = inner.setdefault(module, {})
        sizes = tuple(SMALL[size] for size in leaf["shape"])
        inner[name] = jax.ShapeDtypeStruct(sizes, leaf["dtype"])
    return clipping.randomize(params, scale=3.0)


def logits(params, xp=np, x=X):
    """`(heads, query, key)` of the first layer, by NumPy in float64."""
    module = params["layers"]["0"]["attn"]

    def project(role):
        kernel, norm = module[f"{role}_proj"]["kernel"], module.get(f"{role}_norm")
        kernel = np.asarray(kernel, np.float64) if xp is np else kernel
        y = xp.einsum("td,dhe->the", x, kernel)
        if norm:
            y = norm["scale"] * y / xp.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
        return y

    query, key = project("q"), xp.repeat(project("k"), 2, 1)
    return xp.einsum("qhe,khe->hqk", query, key) / np.sqrt(SMALL[128])


def first_layer(params, x):
    module = params["layers"]["0"]["attn"]
    value = jnp.einsum("td,dhe->the", x, module["v_proj"]["kernel"])
    weights = jax.nn.softmax(logits(params, jnp, x))
    return jnp.einsum("hqk,khe->qhe", weights, jnp.repeat(value, 2, 1))


@pytest.mark.parametrize("normalized", [more(False), True])
def test_clip(normalized):
    params = params_of(normalized)
    if normalized:
        with pytest.raises(ValueError, match="not clip .*q_proj/kernel.*read_model"):
            mc.qk_clip().init(params)
    reading = mc.read_model(first_layer, params, jnp.asarray(X, jnp.float32))
    (layer,) = reading.attention
    may_change = {f"0/attn/[qk]_{'norm/scale' if normalized else 'proj/kernel'}": ...}

    def largest(params):
        return {layer.path: logits(params).max((1, 2))}

    clipping.check_clip(
        params, largest, may_change, shared=normalized, attention=[layer]
    )


def test_dimension_numbers():
    expected = {
        "[qkv]_proj/kernel": (-3, (-2, -1)),
        "o_proj/kernel": ((-3, -2), -1),
        "(gate|up|down)_proj/kernel": (-2, -1),
        "embedder/embedding": None,
        "scale": None,
        "lm_head/kernel": None,
    }
    clipping.check_numbers(params_of(True), expected)
