"""The rule that fires for each kind of leaf, as the column "why" of the table says it.

Each tree is the least that makes its rule hold; the axes are checked elsewhere.
"""

import itertools
import re

import pytest
from internals import RULES
from trees import tree_of

import muonclip_jax as mc


NORM = {"norm/scale": (64,)}
HEADS = {f"attn/{x}/kernel": (64, 4, 8) for x in ("query", "key", "value")}
HEADS |= {"attn/out/kernel": (4, 8, 64)}
MOE = {"moe/router/kernel": (64, 5), "moe/experts/up": (5, 64, 40)}
WINDOW = {"Conv_0/kernel": (3, 3, 64, 64)}
VOCABULARY = {"embed/embedding": (99, 64), "up/kernel": (64, 64)}
VOCABULARY |= {"last/kernel": (64, 99)}
SIZES = (64, 48, 40, 9)
CHAIN = {f"Dense_{i}/kernel": x for i, x in enumerate(itertools.pairwise(SIZES))}
CHAIN |= {f"Dense_{i}/bias": (n,) for i, n in enumerate(SIZES[1:])}

#: What fires, the tree, and the leaf in question, "?" where evidence is weak.
FIRED = {
    "vector": (NORM, "norm/scale"),
    "bias": ({"attn/query/bias": (4, 8)} | HEADS, "attn/query/bias"),
    "norm": ({"blocks/layer_scale": (12, 64)}, "blocks/layer_scale"),
    "embedding": ({"wte/weight": (99, 64)}, "wte/weight"),
    "positions or tokens": ({"pos_embedding_of": (1, 9, 64)}, "pos_embedding_of"),
    "output head: named so": ({"lm_head/kernel": (64, 99)}, "lm_head/kernel"),
    "one output": ({"value/kernel": (64, 1)}, "value/kernel"),
    "router": (MOE, "moe/router/kernel"),
    "depthwise convolution?": ({"conv_1d/w": (4, 256)}, "conv_1d/w"),
    "outputs first": ({"fc/weight": (99, 64), "fc/bias": (99,)}, "fc/weight"),
    "inputs, outputs": ({"up/kernel": (64, 256)}, "up/kernel"),
    "inputs, outputs?": ({"m": (64, 256)}, "m"),
    "attention": (HEADS, "attn/query/kernel"),
    "shapes together": (
        {"mlp/gating_einsum": (2, 96, 64), "mlp/linear": (96, 64)},
        "mlp/gating_einsum",
    ),
    "experts of a router": (MOE, "moe/experts/up"),
    "convolution": (WINDOW, "Conv_0/kernel"),
    "bias shape": ({"a/kernel": (9, 4, 6), "a/bias": (4, 6)}, "a/kernel"),
    "one layer": ({"a/kernel": (1, 1, 4, 8)}, "a/kernel"),
    "output head: as large as the vocabulary?": (VOCABULARY, "last/kernel"),
    "output head: nothing takes its outputs?": (CHAIN, "Dense_2/kernel"),
}
ASKED = {
    "may be no layer": ({"rope/freqs": (64, 64)}, "rope/freqs"),
    "may write the output": (CHAIN | {"policy/kernel": (48, 48)}, "policy/kernel"),
    "may be no head": (
        {"img/head/kernel": (32, 64), "up/kernel": (64, 32)},
        "img/head/kernel",
    ),
    "": ({"a/kernel": (3, 5, 4, 8)}, "a/kernel"),  # open: nothing says anything
}


def rows_of(leaves):
    """The rows of the table, or the lines of the question, by their paths."""
    try:
        params = tree_of(leaves)
        rows = mc.describe(params, attention=[], collapse=False).splitlines()
    except ValueError as error:
        rows = str(error).split("Let the loss")[0].splitlines()
    return {row.split()[0]: row for row in rows if row.strip()}


@pytest.mark.parametrize("why", FIRED)
def test_the_rule_that_decides(why):
    leaves, path = FIRED[why]
    _, said = re.split("(?:adamw|muon) +", rows_of(leaves)[path])
    assert said.removesuffix("-").strip() == why


@pytest.mark.parametrize("why", ASKED)
def test_the_rule_that_asks(why):
    leaves, path = ASKED[why]
    row = rows_of(leaves)[path]
    assert row.endswith(f"): {why}" if why else ")")


def test_no_rule_is_left_out():
    fired = {why.removesuffix("?") for why in (*FIRED, *ASKED)}
    assert {rule.kind for rule in RULES} - {"open"} <= fired


@pytest.mark.parametrize("router", ["router/kernel", "router/scores/kernel"])
def test_a_router_may_have_a_layer_inside(router):
    rows = rows_of({f"moe/{router}": (64, 5), "moe/experts/up/kernel": (5, 64, 40)})
    assert "router" in rows[f"moe/{router}"].split("adamw")[1]
    assert "experts of a router" in rows["moe/experts/up/kernel"]
