"""Hyperparameters that `optax.inject_hyperparams` traces do what plain ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from seeds import chance, family, pick, told

import muonclip_jax as mc


SHAPES = {
    "attn": {
        "query": {"kernel": (4, 2, 2), "bias": (2, 2)},
        "key": {"kernel": (4, 2, 2), "bias": (2, 2)},
    },
    "mlp": {"kernel": (4, 6), "bias": (6,)},
}
STATIC = ("dimension_numbers", "attention", "weight_decay_mask", "mu_dtype")


def numbers(generator, names):
    """Some of the numbers, drawn; a schedule where optax takes one."""
    ranges = {
        "beta": (0.5, 0.99),
        "consistent_rms": (0.1, 1.0),
        "weight_decay": (0.0, 0.5),
        "adam_learning_rate": (1e-3, 1e-1),
        "adam_b1": (0.5, 0.99),
        "adam_b2": (0.5, 0.99),
        "adam_eps": (1e-8, 1e-2),
        "adam_weight_decay": (0.0, 0.5),
        "threshold": (1.0, 200.0),
        "alpha": (0.0, 1.0),
    }
    chosen = [n for n in ranges if n in names and chance(generator, 0.4)]
    return {n: float(generator.uniform(*ranges[n])) for n in chosen}


def draw(generator):
    kind = pick(generator, "muon", "muonclip", "muonclip")
    clip = ("threshold", "alpha")
    others = ("beta", "consistent_rms", "weight_decay", "adam_learning_rate")
    adam = ("adam_b1", "adam_b2", "adam_eps", "adam_weight_decay")
    names = (*others, *adam) if kind == "muon" else (*others, *adam, *clip)
    options = numbers(generator, names)
    if chance(generator, 0.3):
        steps = int(generator.integers(1, 7))
        options["orthogonalizer"] = mc.NewtonSchulz(steps=steps)
    elif chance(generator, 0.3):
        options["orthogonalizer"] = pick(
            generator, "polar_express", mc.NewtonSchulz((3.4445, -4.775, 2.0315))
        )
    if chance(generator, 0.2):
        options["consistent_rms"] = None
    options["nesterov"] = chance(generator, 0.5)
    if chance(generator, 0.2):
        options["mu_dtype"] = "bfloat16"
    if chance(generator, 0.2):
        options["weight_decay_mask"] = {"attn": True, "mlp": False}
    rate = pick(generator, 0.1, 0.01)
    if chance(generator, 0.4):
        rate = optax.linear_schedule(rate, rate / 4, 3)
    return kind, rate, options


def tree(generator):
    return jax.tree.map(
        lambda s: jnp.asarray(generator.normal(size=s), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def trained(tx, params, gradients, logits, is_jitted):
    update = jax.jit(tx.update) if is_jitted else tx.update
    state = tx.init(params)
    for gradient, row in zip(gradients, logits, strict=True):
        stats = {"attn": {"max_logits": row}}
        updates, state = update(gradient, state, params, attention_stats=stats)
        params = optax.apply_updates(params, updates)
    return params


def check(seed):
    generator = np.random.default_rng(seed)
    kind, rate, options = draw(generator)
    is_jitted = chance(generator, 0.3)
    params, *gradients = (tree(generator) for _ in range(3))
    logits = jnp.asarray(generator.choice([0.5, 80.0, 150.0, 4e3], (2, 2)), jnp.float32)
    make = getattr(mc, kind)
    with told(seed, kind=kind, rate=rate, jit=is_jitted, **options):
        static = STATIC if kind == "muonclip" else (STATIC[0], *STATIC[2:])
        injected = optax.inject_hyperparams(make, static_args=static)
        arguments = params, gradients, logits, is_jitted
        expected = trained(make(rate, **options), *arguments)
        found = trained(injected(rate, **options), *arguments)
        # A momentum in bfloat16 may round the other way: its eps, through five steps.
        bound = 2e-2 if "mu_dtype" in options else 1e-4
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


test_hyperparameters = family(check, 120)
