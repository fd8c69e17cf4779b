"""MuonClip is Muon, then QK-Clip, and the contract's signatures hold."""

import inspect

import chex
import jax.numpy as jnp
import optax
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


def test_is_muon_then_qk_clip():
    kernel = jnp.arange(64.0).reshape(8, 2, 4)
    params = {
        "attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel + 1}},
        "norm": {"scale": jnp.ones(8)},
    }
    stats = {"attn": {"max_logits": jnp.asarray([5.0, 40.0])}}
    options = dict(
        beta=0.9,
        nesterov=False,
        consistent_rms=None,
        weight_decay=0.3,
        adam_learning_rate=0.5,
    )
    whole = mc.muonclip(0.1, threshold=10.0, alpha=0.25, **options)
    parts = optax.chain(mc.muon(0.1, **options), mc.qk_clip(10.0, alpha=0.25))
    results = []
    for tx in (whole, parts):
        p, state = params, tx.init(params)
        for _ in range(3):
            updates, state = tx.update(params, state, p, attention_stats=stats)
            p = optax.apply_updates(p, updates)
        results.append((p, state))
    chex.assert_trees_all_equal(*results)
    unclipped = mc.muon(0.1, **options)
    updates, _ = unclipped.update(params, unclipped.init(params), params)
    assert not jnp.allclose(
        results[0][0]["attn"]["query"]["kernel"],
        (params["attn"]["query"]["kernel"] + updates["attn"]["query"]["kernel"]),
    )
