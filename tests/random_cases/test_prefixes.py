"""Prefixes of masks, labels and settings do what the full trees do, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers
from seeds import chance, family, pick, told

import muonclip_jax as mc


def attention():
    return {"query": {"kernel": (4, 2, 2)}, "key": {"kernel": (4, 2, 2)}}


MODULES = {
    "attn": attention,
    "blocks": lambda: {"first": {"attn": attention()}, "second": {"attn": attention()}},
    "mlp": lambda: {"up": {"kernel": (4, 6)}, "down": {"kernel": (6, 4)}},
    "norm": lambda: {"scale": (4,), "bias": (4,)},
    "embed": lambda: {"embedding": (5, 4)},
}
STATISTICS = {
    "attn": {"max_logits": jnp.asarray([400.0, 50.0])},
    "blocks": {
        "first": {"attn": {"max_logits": jnp.asarray([101.0, 500.0])}},
        "second": {"attn": {"max_logits": jnp.asarray([10.0, 50.0])}},
    },
}


def tree(generator, names):
    return jax.tree.map(
        lambda s: jnp.asarray(generator.normal(size=s), jnp.float32),
        {name: MODULES[name]() for name in names},
        is_leaf=lambda x: isinstance(x, tuple),
    )


def prefix(generator, params, entry):
    """An entry for each module, or for each below some of them."""

    def below(name, module):
        if name == "blocks" and chance(generator, 0.5):
            return {child: entry(name) for child in module}
        return entry(name)

    return {name: below(name, module) for name, module in params.items()}


def full(entries, params):
    """An entry for each leaf."""
    return jax.tree.map(
        lambda entry, part: jax.tree.map(lambda _: entry, part),
        entries,
        params,
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )


def masks(generator, params):
    return prefix(generator, params, lambda _: chance(generator, 0.6))


def masked_clip(generator, params):
    entries = masks(generator, params)
    return entries, lambda mask: optax.masked(mc.qk_clip(), mask)


def masked_muonclip(generator, params):
    entries = masks(generator, params)
    return entries, lambda mask: optax.masked(
        mc.muonclip(0.1, orthogonalizer=mc.NewtonSchulz(steps=1)), mask
    )


def masked_direction(generator, params):
    """Modules of matrices alone."""

    def entry(name):
        return name in ("attn", "blocks", "mlp") and chance(generator, 0.7)

    def make(mask):
        return optax.masked(
            mc.scale_by_muon(orthogonalizer=mc.NewtonSchulz(steps=1)), mask
        )

    return prefix(generator, params, entry), make


def partitioned(generator, params):
    labels = prefix(generator, params, lambda _: pick(generator, "clip", "sgd", "muon"))

    def make(labels):
        parts = {
            "clip": mc.muonclip(0.1, orthogonalizer=mc.NewtonSchulz(steps=1)),
            "muon": mc.muon(0.2, orthogonalizer=mc.NewtonSchulz(steps=1)),
            "sgd": optax.sgd(0.3),
        }
        return optax.partition(parts, labels)

    return labels, make


def decayed(generator, params):
    def make(mask):
        return mc.muonclip(
            0.1,
            orthogonalizer=mc.NewtonSchulz(steps=1),
            weight_decay_mask=mask,
            weight_decay=0.5,
        )

    return masks(generator, params), make


def numbered(generator, params):
    def entry(name):
        if name == "norm":
            return None
        axes = (-3, (-2, -1)) if name in ("attn", "blocks") else (-2, -1)
        return pick(generator, MuonDimensionNumbers(*axes), None)

    def make(numbers):
        return mc.muonclip(
            0.1, orthogonalizer=mc.NewtonSchulz(steps=1), dimension_numbers=numbers
        )

    return prefix(generator, params, entry), make


KINDS = {
    "masked qk_clip": masked_clip,
    "masked muonclip": masked_muonclip,
    "masked scale_by_muon": masked_direction,
    "partition": partitioned,
    "weight_decay_mask": decayed,
    "dimension_numbers": numbered,
}


def updated(tx, params, gradients, names):
    stats = {name: x for name, x in STATISTICS.items() if name in names}
    state = tx.init(params)
    return tx.update(gradients, state, params, attention_stats=stats)


def check(seed):
    generator = np.random.default_rng(seed)
    kind = pick(generator, *KINDS)
    names = generator.choice(sorted(MODULES), generator.integers(1, 5), replace=False)
    names = [str(name) for name in names]
    params, gradients = (tree(generator, names) for _ in range(2))
    entries, make = KINDS[kind](generator, params)
    is_called = chance(generator, 0.3)
    with told(seed, kind=kind, entries=entries, is_called=is_called):
        whole = full(entries, params)
        expected, expected_state = updated(make(whole), params, gradients, names)
        given = (lambda _: entries) if is_called else entries
        found, state = updated(make(given), params, gradients, names)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        # The states hold the same numbers, whatever stands for what is masked.
        leaves = map(jax.tree.leaves, (state, expected_state))
        for x, y in zip(*leaves, strict=True):
            np.testing.assert_array_equal(x, y)


test_prefixes = family(check, 200)
