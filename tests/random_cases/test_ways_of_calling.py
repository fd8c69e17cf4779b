"""Every public entry point gives the same eagerly, under `jit` and without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from seeds import chance, family, pick, told

import muonclip_jax as mc


def arrays(generator, *shapes):
    return [jnp.asarray(generator.normal(size=s), jnp.float32) for s in shapes]


def model(generator):
    """Flax's attention and a Dense; gradients; statistics."""
    heads = pick(generator, 1, 2)
    trees = []
    for _ in range(2):
        query, key, up = arrays(generator, (4, heads, 2), (4, heads, 2), (4, 6))
        attn = {"query": {"kernel": query}, "key": {"kernel": key}}
        trees.append({"attn": attn, "mlp": {"kernel": up}})
    logits = generator.choice([50.0, 101.0, 4e3], heads)
    return *trees, {"attn": {"max_logits": jnp.asarray(logits, jnp.float32)}}


def newton_schulz(generator):
    options = {
        "coeffs": pick(generator, "keller", "polar_express"),
        "method": pick(generator, "auto", "standard", "gram"),
        "preconditioning": pick(generator, "frobenius", "aol"),
    }
    shape = pick(generator, (3, 5), (2, 4, 4), (1, 1), (0, 3))
    return functools.partial(mc.newton_schulz, **options), arrays(generator, shape)


def step(tx):
    def run(params, gradients, stats):
        state = tx.init(params)
        return tx.update(gradients, state, params, attention_stats=stats)

    return run


def optimizer(make, **options):
    def entry(generator):
        drawn = {n: choices[generator.integers(2)] for n, choices in options.items()}
        return step(make(**drawn)), model(generator)

    return entry


def scalars(generator):
    tx, inputs = mc.qk_clip(), model(generator)

    def run(params, gradients, stats):
        _, state = step(tx)(params, gradients, stats)
        return mc.scalars(state, params, heads=True)

    return run, inputs


def clip_qk(generator):
    params, _, stats = model(generator)
    alpha = pick(generator, 0.0, 0.5)
    return functools.partial(mc.clip_qk, alpha=alpha), (params, stats)


def attention(name, **options):
    def entry(generator):
        heads, length = pick(generator, 2, 4), pick(generator, 1, 3)
        of_query, of_key = (2, length, heads, 2), (2, 3, 2, 2)
        inputs = arrays(generator, of_query, of_key, of_key)
        inputs = inputs[:2] if name == "max_logits" else inputs
        causal = chance(generator, 0.5)
        function = functools.partial(getattr(mc, name), is_causal=causal, **options)
        return function, inputs

    return entry


def read(function):
    """What an entry point says of params; under `jit` it sees tracers."""

    def entry(generator):
        params, *_ = model(generator)

        def run(params):
            said.append(repr(function(params)))
            return said[-1] != said[0]

        said = []
        return run, (params,)

    return entry


ENTRIES = {
    "newton_schulz": newton_schulz,
    "scale_by_muon": optimizer(mc.scale_by_muon, nesterov=(True, False)),
    "muon": optimizer(
        functools.partial(mc.muon, 0.1, orthogonalizer=mc.NewtonSchulz(steps=2)),
        consistent_rms=(None, 0.2),
    ),
    "muonclip": optimizer(
        functools.partial(mc.muonclip, 0.1, orthogonalizer=mc.NewtonSchulz(steps=2)),
        alpha=(0.0, 0.5),
    ),
    "qk_clip": optimizer(mc.qk_clip, threshold=(10.0, 100.0)),
    "multi_steps": optimizer(
        functools.partial(
            mc.multi_steps, mc.muonclip(0.1, orthogonalizer=mc.NewtonSchulz(steps=1))
        ),
        every_k_schedule=(1, 2),
    ),
    "clip_qk": clip_qk,
    "scalars": scalars,
    "max_logits": attention("max_logits"),
    "blockwise_attention": attention("blockwise_attention", block_size=2),
    "attention_fn": attention("attention_fn"),
    "flax_dimension_numbers": read(mc.flax_dimension_numbers),
    "matrix_mask": read(mc.matrix_mask),
    "describe": read(mc.describe),
    "flax_attention_layers": read(mc.flax_attention_layers),
}


def check(seed):
    generator = np.random.default_rng(seed)
    name = pick(generator, *ENTRIES)
    function, inputs = ENTRIES[name](generator)
    shapes = jax.tree.map(jnp.shape, inputs)
    with told(seed, entry=name, inputs=shapes):
        eager = function(*inputs)
        compiled = jax.jit(function)(*inputs)
        with jax.disable_jit():
            plain = function(*inputs)
        for other in (compiled, plain):
            assert jax.tree.structure(other) == jax.tree.structure(eager)
            for x, y in zip(*map(jax.tree.leaves, (other, eager)), strict=True):
                assert jnp.result_type(x) == jnp.result_type(y)
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


test_ways_of_calling = family(check, 120)
