"""QK-Clip and dimension numbers on the leaves of bonsai's Qwen 3.

PyPI has no bonsai, so these are its leaves, smaller, and a product of the first layer
by NumPy. They need no library, so that they always run.
"""

import json
import pathlib

import clipping
import jax
import numpy as np
import pytest

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

TREES = pathlib.Path(__file__).parent.parent / "data/trees"
TREE = json.loads((TREES / "bonsai_qwen3_0.6b.json").read_text())
SMALL = {151936: 23, 1024: 20, 3072: 28, 16: 4, 8: 2, 128: 8}
MODULE = "layers/0/attn"
X = np.random.default_rng(1).normal(size=(7, SMALL[1024]))


def params_of(normalised):
    params = {}
    for leaf in TREE["leaves"]:
        *modules, name = leaf["path"]
        if not normalised and modules[-1] in ("q_norm", "k_norm"):
            continue
        inner = params
        for module in modules:
            inner = inner.setdefault(module, {})
        sizes = tuple(SMALL[size] for size in leaf["shape"])
        inner[name] = jax.ShapeDtypeStruct(sizes, leaf["dtype"])
    return clipping.randomize(params, scale=3.0)


def logits(params):
    module = params["layers"]["0"]["attn"]

    def project(role):
        kernel = np.asarray(module[f"{role}_proj"]["kernel"], np.float64)
        y = np.einsum("td,dhe->the", X, kernel)
        norm = module.get(f"{role}_norm")
        if norm:
            y = norm["scale"] * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
        return y

    query, key = project("q"), np.repeat(project("k"), 2, 1)
    product = np.einsum("qhe,khe->hqk", query, key) / np.sqrt(SMALL[128])
    return {MODULE: product.max((1, 2))}


@pytest.mark.parametrize("normalised", [False, True])
def test_clip(normalised):
    params = params_of(normalised)
    find, leaf = mc.named_attention(), "proj/kernel"
    if normalised:
        with pytest.raises(ValueError, match="normalised after the projection"):
            mc.qk_clip(attention=find).init(params)
        find = mc.normalised_attention(query="q_norm", key="k_norm")
        leaf = "norm/scale"
    may_change = {f"0/attn/[qk]_{leaf}": ...}
    # Statistics are needed of every layer that the tree has.
    others = [f"layers/{i}/attn" for i in params["layers"] if i != "0"]

    def padded(params):
        return logits(params) | dict.fromkeys(others, np.zeros(SMALL[16]))

    clipping.check_clip(
        params, padded, find, may_change, shared=normalised, only=[MODULE]
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
