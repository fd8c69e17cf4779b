"""`multi_steps` against one step by the mean gradient and the largest statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from seeds import chance, family, pick, told

import muonclip_jax as mc


LOGITS = (-5.0, 40.0, 99.0, 101.0, 300.0, 2e4, np.inf, -np.inf, np.nan)


def draw(generator):
    return {
        "heads": pick(generator, 1, 2),
        "layers": pick(generator, (), (), (2,)),
        "count": pick(generator, 1, 2, 3),
        "steps": pick(generator, 1, 2),
        "is_mean": chance(generator, 0.7),
        "skips": chance(generator, 0.3),
        "optimizer": pick(generator, "sgd", "sgd", "muonclip"),
        "alpha": pick(generator, 0.0, 0.5, 1.0),
        "is_jitted": chance(generator, 0.5),
    }


def make(case):
    if case["optimizer"] == "muonclip":
        return mc.muonclip(
            0.1, alpha=case["alpha"], orthogonalizer=mc.NewtonSchulz(steps=1)
        )
    return optax.chain(optax.sgd(0.1), mc.qk_clip(alpha=case["alpha"]))


def tree(generator, case):
    kernel = {"kernel": (*case["layers"], 4, case["heads"], 2)}
    shapes = {"attn": {"query": kernel, "key": kernel}, "norm": {"scale": (3,)}}
    return jax.tree.map(
        lambda s: jnp.asarray(generator.normal(size=s), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def skip(updates, gradient_step, params):
    """Gradients that are marked by a huge entry in the norm."""
    del gradient_step, params
    return jnp.max(updates["norm"]["scale"]) > 1e6, ()


def micro_batches(generator, case):
    """Of one step: gradients, statistics and whether they count."""
    counted = [True] * case["count"]
    if case["skips"]:
        place = int(generator.integers(case["count"] + 1))
        counted.insert(min(place, case["count"] - 1), False)
    batches = []
    for counts in counted:
        gradient = tree(generator, case)
        if not counts:
            gradient["norm"]["scale"] = gradient["norm"]["scale"] + 1e9
        rows = generator.choice(LOGITS, (*case["layers"], case["heads"]))
        batches.append((gradient, rows.astype(np.float32), counts))
    return batches


def at_once(case, params, steps):
    tx = make(case)
    state = tx.init(params)
    for batches in steps:
        counted = [(g, row) for g, row, counts in batches if counts]
        gradients, rows = zip(*counted, strict=True)
        share = len(rows) if case["is_mean"] else 1
        gradient = jax.tree.map(lambda *g, n=share: sum(g) / n, *gradients)
        # A NaN of one micro-batch leaves the head alone.
        stats = {"attn": {"max_logits": jnp.asarray(np.maximum.reduce(rows))}}
        updates, state = tx.update(gradient, state, params, attention_stats=stats)
        params = optax.apply_updates(params, updates)
    return params, state


def bit_by_bit(case, params, steps):
    options = {"should_skip_update_fn": skip} if case["skips"] else {}
    tx = mc.multi_steps(make(case), case["count"], case["is_mean"], **options)
    update = jax.jit(tx.update) if case["is_jitted"] else tx.update
    state = tx.init(params)
    for batches in steps:
        before = params
        for i, (gradient, row, _) in enumerate(batches):
            stats = {"attn": {"max_logits": jnp.asarray(row)}}
            updates, state = update(gradient, state, params, attention_stats=stats)
            params = optax.apply_updates(params, updates)
            if i < len(batches) - 1:
                jax.tree.map(np.testing.assert_array_equal, params, before)
    return params, state.inner_opt_state


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    params = tree(generator, case)
    steps = [micro_batches(generator, case) for _ in range(case["steps"])]
    rows = [[row.tolist() for _, row, _ in batches] for batches in steps]
    with told(seed, **case, rows=rows):
        found, state = bit_by_bit(case, params, steps)
        expected, plain = at_once(case, params, steps)
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        for name in ("max_logit", "num_clipped", "num_nonfinite"):
            a, b = optax.tree.get(state, name), optax.tree.get(plain, name)
            np.testing.assert_array_equal(a, b, name)


test_micro_batches = family(check, 120)
