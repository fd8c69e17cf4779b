"""The contract's signatures hold."""

import inspect

import pytest

import muonclip_jax as mc


MUON_DEFAULTS = {
    "nesterov": True,
    "orthogonalizer": "keller",
    "consistent_rms": 0.2,
    "weight_decay": 0.1,
    "weight_decay_mask": None,
    "mu_dtype": None,
    "dimension_numbers": None,
    "per_head": None,
    "adam_learning_rate": None,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_weight_decay": None,
}
CLIP_DEFAULTS = {"threshold": 100.0, "alpha": 0.5, "attention": None}
DIRECTION = (
    "nesterov",
    "orthogonalizer",
    "consistent_rms",
    "mu_dtype",
    "dimension_numbers",
    "per_head",
)


@pytest.mark.parametrize(
    "function, positional, keywords",
    [
        (mc.muonclip, ["learning_rate"], CLIP_DEFAULTS | MUON_DEFAULTS),
        (mc.muon, ["learning_rate"], MUON_DEFAULTS),
        (mc.scale_by_muon, [], {name: MUON_DEFAULTS[name] for name in DIRECTION}),
        (mc.qk_clip, ["threshold"], {"alpha": 0.5, "attention": None}),
        (
            mc.clip_qk,
            ["params", "attention_stats", "threshold"],
            {"alpha": 0.5, "attention": None},
        ),
        (
            mc.newton_schulz,
            ["x", "coeffs"],
            {"steps": None, "method": "auto", "dtype": None},
        ),
        (
            mc.max_logits,
            ["query", "key"],
            {"bias": None, "mask": None, "is_causal": False, "scale": None},
        ),
    ],
)
def test_signatures_of_the_contract(function, positional, keywords):
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
    assert [
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD
    ] == positional
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords.items() <= found.items()
