"""Clips of random layouts against `scale * (params + updates)` in float64 loops.

A layout has shapes, `attention=`, and the scale of each entry, written down by hand,
head by head, in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trees
from layers import flat_layer as flat
from layers import fused_layer as fused
from layers import gains_layer
from layers import latent_layer as latent
from seeds import chance, family, pick, told

import muonclip_jax as mc


FEATURES, WIDTH, PATH = 3, 2, "layers/attn"


def axis(stack_axes):
    return next(iter(stack_axes.values()), 0)


def flax_layer(generator, heads, stack_axes):
    """Flax's kernels; grouped queries where key heads are fewer."""
    key_heads = pick(generator, *(n for n in (1, 2, 4) if heads % n == 0))
    shapes = {
        "query/kernel": (FEATURES, heads, WIDTH),
        "key/kernel": (FEATURES, key_heads, WIDTH),
        "value/kernel": (FEATURES, key_heads, WIDTH),
        "out/kernel": (heads, WIDTH, FEATURES),
    }
    if chance(generator, 0.5):
        shapes |= {"query/bias": (heads, WIDTH), "key/bias": (key_heads, WIDTH)}

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, key_heads)
        return {
            name: (query if "query" in name else key)[:, None]
            for name in shapes
            if name.split("/")[0] in ("query", "key")
        }

    attention = functools.partial(mc.flax_attention_layers, stack_axes=stack_axes)
    return shapes, attention, scale


def shares(gamma, alpha, key_heads):
    """What query and key take; a key that several queries share stays as it is."""
    if key_heads != len(gamma):
        return gamma, np.ones(key_heads)
    return gamma**alpha, gamma ** (1 - alpha)


def flat_layer(generator, heads, stack_axes):
    key_heads = pick(generator, *(n for n in (1, 2, 4) if heads % n == 0))
    shapes = {
        "q_proj/kernel": (FEATURES, heads * WIDTH),
        "k_proj/kernel": (FEATURES, key_heads * WIDTH),
    }
    if chance(generator, 0.5):
        shapes |= {"q_proj/bias": (heads * WIDTH,), "k_proj/bias": (key_heads * WIDTH,)}

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, key_heads)
        return {
            name: np.repeat(query if name[0] == "q" else key, WIDTH) for name in shapes
        }

    layer = flat(PATH, WIDTH, bias="q_proj/bias" in shapes, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def fused_layer(generator, heads, stack_axes):
    shapes = {"c_attn/kernel": (FEATURES, 3 * heads * WIDTH)}
    if chance(generator, 0.5):
        shapes["c_attn/bias"] = (3 * heads * WIDTH,)

    def scale(gamma, alpha):
        query, key = shares(gamma, alpha, heads)
        rows = np.concatenate([query, key, np.ones(heads)])
        return dict.fromkeys(shapes, np.repeat(rows, WIDTH))

    bias = "c_attn/bias" in shapes
    layer = fused(PATH, WIDTH, bias=bias, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def latent_layer(generator, heads, stack_axes):
    rope, value = pick(generator, 1, 2), pick(generator, 1, 3)
    query = pick(generator, "wq_b/kernel", "query/kernel")
    shapes = {
        query: (FEATURES, heads, WIDTH + rope),
        "wkv_b/kernel": (FEATURES, heads, WIDTH + value),
        "wkv_a/kernel": (FEATURES, FEATURES),
    }

    def scale(gamma, alpha):
        of_query = np.tile(gamma[:, None], WIDTH + rope)
        of_query[:, :WIDTH] = gamma[:, None] ** alpha
        of_key = np.ones((heads, WIDTH + value))
        of_key[:, :WIDTH] = gamma[:, None] ** (1 - alpha)
        return {query: of_query, "wkv_b/kernel": of_key}

    layer = latent(PATH, WIDTH, query=query, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def normalized_layer(generator, heads, stack_axes):
    shapes = {"query_ln/scale": (WIDTH,), "key_ln/scale": (WIDTH,)}
    shapes["query/kernel"] = shapes["key/kernel"] = (FEATURES, heads, WIDTH)
    if chance(generator, 0.5):
        shapes["query_ln/bias"] = (WIDTH,)

    def scale(gamma, alpha):
        query, key = shares(gamma.min(keepdims=True), alpha, 1)
        return {n: query if "query" in n else key for n in shapes if "_ln" in n}

    query = [name for name in shapes if "query_ln" in name]
    layer = gains_layer(PATH, query=query, stack_axis=axis(stack_axes))
    return shapes, [layer], scale


def gemma_layer(generator, heads, stack_axes):
    """Heads in front, key and value in one leaf."""
    place = axis(stack_axes)
    shapes = {
        "q_einsum": (heads, FEATURES, WIDTH),
        "kv_einsum": (2, heads, FEATURES, WIDTH),
    }
    query = mc.HeadLeaf("q_einsum", 3, axis=-3, stack_axis=place)
    part = (-4, slice(0, 1))
    key = mc.HeadLeaf("kv_einsum", 4, axis=-3, part=part, stack_axis=place)

    def scale(gamma, alpha):
        of_query, of_key = (x[:, None, None] for x in shares(gamma, alpha, heads))
        return {"q_einsum": of_query, "kv_einsum": np.stack([of_key, of_key**0])}

    layer = mc.AttentionLayer(PATH, (query,), (key,))
    return shapes, [layer], scale


LAYOUTS = {
    "flax": flax_layer,
    "flat": flat_layer,
    "fused": fused_layer,
    "latent": latent_layer,
    "normalized": normalized_layer,
    "gemma": gemma_layer,
}


LAYERS = 2
LEAST = 2.0**-14  # the least factor of one update, which `clip_qk` does not know
LOGITS = (-3.0, 0.0, 50.0, 99.9, 100.5, 400.0, 3e4, np.inf, -np.inf, np.nan)


def draw(generator):
    return {
        "layout": pick(generator, *LAYOUTS),
        "heads": pick(generator, 1, 2, 4),
        "stack": pick(generator, None, None, 0, 1, -1, -2),
        "params": pick(generator, "float32", "float32", "bfloat16", "float16"),
        "updates": pick(generator, "float32", "bfloat16", "float16"),
        "threshold": pick(generator, 100.0, 1.0, 5e3),
        "alpha": pick(generator, 0.0, 0.3, 0.5, 1.0),
        "is_jitted": chance(generator, 0.2),
    }


def put(layers, axis):
    """Layers in one leaf, at an axis from either end; a number each has one axis."""
    return np.stack(layers, axis=0 if layers[0].ndim == 0 else axis)


def gammas(logits, threshold):
    """In float64; heads without a finite logit stay."""
    over = np.isfinite(logits) & (logits > threshold)
    return np.where(over, threshold / np.where(over, logits, 1), 1.0)


def nested(leaves):
    return {"layers": {"attn": trees.nested(leaves)}}


def leaf_at(tree, path):
    names = ("layers", "attn", *path.split("/"))
    return functools.reduce(lambda t, name: t[name], names, tree)


def scales_of(shapes, scale, logits, case):
    """The factor of every entry of every leaf."""
    rows = gammas(np.float64(logits), case["threshold"])
    rows = rows if case["stack"] is not None else rows[None]
    layers = [scale(row, case["alpha"]) for row in rows]
    found = {}
    for name, shape in shapes.items():
        one = [np.broadcast_to(s.get(name, 1.0), shape) for s in layers]
        found[name] = one[0] if case["stack"] is None else put(one, case["stack"])
    return found


def clipped_by_update(params, updates, stats, options, is_jitted):
    tx = mc.qk_clip(**options)

    def step(params, updates, stats):
        updates, state = tx.update(
            updates, tx.init(params), params, attention_stats=stats
        )
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if is_jitted else step
    return step(params, updates, stats)


def compare(result, exact, largest, message):
    """Rounded once, after float32 arithmetic with factors good to 2e-6."""
    eps, tiny = jnp.finfo(result.dtype).eps, jnp.finfo(result.dtype).smallest_subnormal
    short = jnp.finfo(jnp.float32).eps
    bound = (float(eps) / 2 + 2e-6) * np.abs(exact)
    bound = bound + 2 * float(short) * largest + float(tiny)
    off = np.abs(np.float64(result) - exact)
    assert (off <= bound).all(), f"{message}: {off.max()} with {bound.max()} allowed"


def compare_state(state, logits, threshold, shared):
    """The figures for logging; heads that share their leaves count as one."""
    logits = logits.max(-1, keepdims=True) if shared else logits
    finite = np.isfinite(logits)
    assert int(state.num_nonfinite) == (~finite).sum()
    assert int(state.num_clipped) == (finite & (logits > threshold)).sum()
    if finite.any():
        assert float(state.max_logit) == logits[finite].max()


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    stack_axes = {} if case["stack"] is None else {"layers": case["stack"]}
    make = LAYOUTS[case["layout"]]
    shapes, attention, scale = make(generator, case["heads"], stack_axes)
    rows = () if case["stack"] is None else (LAYERS,)
    logits = generator.choice(LOGITS, (*rows, case["heads"])).astype(np.float32)
    if case["layout"] == "normalized":
        # All heads of a layer go by their largest.
        logits = np.where(np.isfinite(logits), logits, np.float32(7))
    scales = scales_of(shapes, scale, logits, case)
    old = {n: generator.normal(size=s.shape) for n, s in scales.items()}
    new = {n: generator.normal(size=s.shape) / 8 for n, s in scales.items()}
    old = {n: jnp.asarray(x, case["params"]) for n, x in old.items()}
    new = {n: jnp.asarray(x, case["updates"]) for n, x in new.items()}
    options = {k: case[k] for k in ("threshold", "alpha")} | {"attention": attention}
    stats = {"layers": {"attn": {"max_logits": jnp.asarray(logits)}}}
    with told(seed, **case, shapes=shapes, logits=logits.tolist()):
        params = nested(old)
        moved, state = clipped_by_update(
            params, nested(new), stats, options, case["is_jitted"]
        )
        at_rest = mc.clip_qk(params, stats, **options)
        for name, factor in scales.items():
            p, u = np.float64(old[name]), np.float64(new[name])
            after = leaf_at(moved, name)
            assert after.dtype == case["params"]
            compare(
                after, np.maximum(factor, LEAST) * (p + u), np.abs(p) + np.abs(u), name
            )
            compare(leaf_at(at_rest, name), factor * p, 0, f"{name} at rest")
        shared = case["layout"] == "normalized"
        compare_state(state, logits, case["threshold"], shared)


test_clips = family(check, 400)
