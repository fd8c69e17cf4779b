"""`per_head=True` is what dimension numbers written by hand would be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import first_update, normal
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {
    "attn": {
        "query": {"kernel": normal(0, 8, 2, 4)},
        "key": {"kernel": normal(1, 8, 2, 4)},
        "value": {"kernel": normal(2, 8, 2, 4)},
        "out": {"kernel": normal(3, 2, 4, 8)},
    },
    "moe": {"wi": normal(4, 3, 8, 16)},
}
RULES = {"moe/wi": Numbers(-2, -1)}
STATS = {"attn": {"max_logits": jnp.ones(2)}}


def update_of(make, params=PARAMS, **options):
    extra = {"attention_stats": STATS} if make is mc.muonclip else {}
    return first_update(make(0.1, **options), params, params, **extra)


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
def test_next_to_patterns(make):
    found = update_of(make, per_head=True, dimension_numbers=RULES)
    by_hand = functools.partial(
        mc.flax_dimension_numbers, per_head=True, dimension_numbers=RULES
    )
    expected = update_of(make, dimension_numbers=by_hand)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    whole = update_of(make, per_head=False, dimension_numbers=RULES)
    # Other stacks are multiplied in another order: the same matrices differ in bits.
    far = lambda a, b: bool((jnp.abs(a - b) > 1e-3 * jnp.abs(b).max()).any())  # noqa: E731
    changed = jax.tree.map(far, found, whole)
    assert changed["attn"]["value"]["kernel"] and not changed["moe"]["wi"]
    assert not changed["attn"]["out"]["kernel"]


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
def test_by_default_where_heads_are_known(make):
    found = update_of(make, dimension_numbers=RULES)
    expected = update_of(make, per_head=True, dimension_numbers=RULES)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_by_default_what_is_given_stays():
    given = RULES | {"attn/query": Numbers(0, (1, 2))}
    described = dict(attention=mc.flax_attention_layers)
    for options in ({}, described):
        found = update_of(mc.muonclip, dimension_numbers=given, **options)
        heads, whole = (
            update_of(mc.muonclip, per_head=x, dimension_numbers=RULES)
            for x in (True, False)
        )
        check = functools.partial(np.testing.assert_allclose, atol=1e-5)
        for name, expected in (("query", whole), ("key", heads)):
            kernels = found["attn"][name], expected["attn"][name]
            jax.tree.map(check, *kernels)
    # Numbers of all leaves leave nothing to find: True is refused, the default is not.
    everything = functools.partial(mc.flax_dimension_numbers, dimension_numbers=RULES)
    found = update_of(mc.muon, dimension_numbers=everything)
    whole = update_of(mc.muon, per_head=False, dimension_numbers=RULES)
    jax.tree.map(check, found, whole)


def test_of_described_layers():
    heads = {"attn": {"q": normal(0, 2, 8, 4), "k": normal(1, 2, 8, 4)}}
    query, key = ((mc.HeadLeaf(name, 3, axis=-3),) for name in "qk")
    options = {"attention": [mc.AttentionLayer("attn", query, key)], "params": heads}
    joined, each = ({"attn": Numbers(*x)} for x in (((-3, -2), -1), (-2, -1)))
    found = update_of(mc.muonclip, per_head=True, dimension_numbers=joined, **options)
    expected = update_of(mc.muonclip, dimension_numbers=each, **options)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_not_next_to_numbers_of_all_leaves():
    numbers = mc.flax_dimension_numbers(PARAMS, dimension_numbers=RULES, per_head=True)
    with pytest.raises(ValueError, match="per_head=True has no effect"):
        mc.muon(0.1, per_head=True, dimension_numbers=numbers).init(PARAMS)
