"""Attention forward and backward, however it is called, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import chance, family, pick, told

import muonclip_jax as mc


CALLS = (
    "eager",
    "jit",
    "disable_jit",
    "checkpoint",
    "vmap",
    "shard_map",
    "shard_map of gradient",
    "explicit batch",
    "explicit heads",
)


def differentiate(function, axis=None):
    """Arrays to (output, statistic) and gradients; maximized and summed over an axis.

    The gradient of what all devices share, such as a bias, is summed by its type.
    """

    def loss(trained, others):
        arrays = trained | others
        weights = arrays.pop("weights")
        output, largest = function(**arrays)
        total = (output * weights).sum()
        if axis:
            total, largest = jax.lax.psum(total, axis), jax.lax.pmax(largest, axis)
        return total, (output, largest)

    def run(arrays):
        others = {n: x for n, x in arrays.items() if n in ("mask", "weights")}
        trained = {n: x for n, x in arrays.items() if n not in others}
        grads, results = jax.grad(loss, has_aux=True)(trained, others)
        return results, grads

    return run


def one_by_one(function):
    """Under `vmap` over the batch."""

    def attend(**arrays):
        axes = {n: None if x.shape[0] == 1 else 0 for n, x in arrays.items()}
        spread = {n: x[0] if x.shape[0] == 1 else x for n, x in arrays.items()}

        def one(arrays):
            output, largest = function(**{n: x[None] for n, x in arrays.items()})
            return output[0], largest

        output, largest = jax.vmap(one, (axes,))(spread)
        return output, largest.max(0)

    return attend


def over_batch(arrays):
    return {n: P() if x.shape[0] == 1 else P("x") for n, x in arrays.items()}


def on_devices(function, call, arrays):
    specs = over_batch(arrays)
    if call == "shard_map of gradient":
        grads = {n: specs[n] for n in arrays if n not in ("mask", "weights")}
        run, out_specs = differentiate(function, "x"), ((P("x"), P()), grads)
        return jax.shard_map(run, in_specs=(specs,), out_specs=out_specs)

    def local(arrays):
        output, largest = function(**arrays)
        return output, jax.lax.pmax(largest, "x")

    def attend(**arrays):
        specs = over_batch(arrays)
        out_specs = (P("x"), P())
        return jax.shard_map(local, in_specs=(specs,), out_specs=out_specs)(arrays)

    return differentiate(attend)


def over_heads(arrays):
    """Where two devices can share them."""

    def spec(name, x):
        axis = 1 if name in ("bias", "mask") else 2
        cut = ["x" if a == axis and x.shape[a] % 2 == 0 else None for a in range(4)]
        return P(*cut)

    return {name: spec(name, x) for name, x in arrays.items()}


def called(function, call, arrays):
    function = jax.checkpoint(function) if call == "checkpoint" else function
    function = one_by_one(function) if call == "vmap" else function
    run = differentiate(function)
    if call == "disable_jit":
        with jax.disable_jit():
            return run(arrays)
    if call == "eager":
        return run(arrays)
    if call.startswith("shard_map"):
        with jax.set_mesh(jax.make_mesh((2,), ("x",), (AxisType.Auto,))):
            return jax.jit(on_devices(function, call, arrays))(arrays)
    if call.startswith("explicit"):
        mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
        specs = over_heads(arrays) if "heads" in call else over_batch(arrays)
        with jax.set_mesh(mesh):
            sharded = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
            return jax.jit(run)(jax.device_put(arrays, sharded))
    return jax.jit(run)(arrays)


BATCH, WIDTH = 4, 2


def recorded(query, key, value, **options):
    """What `attention_fn` returns, and what it sows."""

    def call(layer):
        options["module"] = layer
        return mc.attention_fn(query, key, value, deterministic=True, **options)

    output, sown = nnx.capture(call, nnx.Intermediate)(nnx.Module())
    (statistic,) = jax.tree.leaves(sown)
    return output, statistic


def by_flax(query, key, value, **options):
    return recorded(query, key, value, **options)


def by_kernel(query, key, value, **options):
    kernel = functools.partial(mc.blockwise_attention, block_size=2)
    return recorded(query, key, value, kernel=kernel, **options)


def by_max_logits(query, key, value, **options):
    output, _ = mc.blockwise_attention(query, key, value, block_size=3, **options)
    return output, mc.max_logits(query, key, **options)


FUNCTIONS = {
    "blockwise": functools.partial(mc.blockwise_attention, block_size=3),
    "one block": mc.blockwise_attention,
    "max_logits": by_max_logits,
    "attention_fn": by_flax,
    "kernel": by_kernel,
}


def draw(generator):
    function, call = pick(generator, *FUNCTIONS), pick(generator, *CALLS)
    heads = pick(generator, (2, 2), (4, 2), (2, 1))
    if (function, call) == ("attention_fn", "explicit heads"):
        # jax.nn, which Flax calls, cannot share a key head among devices.
        heads = pick(generator, (2, 2), (4, 2))
    lengths = pick(generator, (1, 1), (5, 5), (3, 5), (4, 3))
    return {
        "function": function,
        "call": call,
        "heads": heads,
        "lengths": lengths,
        # A row of the bias for every head, or one for all; and batch or not.
        "bias": pick(generator, None, (1, heads[0]), (BATCH, 1), (1, 1)),
        "mask": pick(generator, None, (1, 1), (BATCH, heads[0])),
        "is_causal": chance(generator, 0.4),
    }


def arrays_of(generator, case):
    (heads, key_heads), (queries, keys) = case["heads"], case["lengths"]
    shapes = {
        "query": (BATCH, queries, heads, WIDTH),
        "key": (BATCH, keys, key_heads, WIDTH),
        "value": (BATCH, keys, key_heads, WIDTH),
        "weights": (BATCH, queries, heads, WIDTH),
    }
    if case["bias"]:
        shapes["bias"] = (*case["bias"], queries, keys)
    arrays = {n: generator.normal(size=s) for n, s in shapes.items()}
    arrays = {n: x.astype(np.float32) for n, x in arrays.items()}
    if case["mask"]:
        mask = generator.random((*case["mask"], queries, keys)) < 0.7
        # Every query sees the first key: what jax.nn does otherwise is its own.
        mask[..., 0] = True
        arrays["mask"] = mask
    return arrays


def reference(arrays, is_causal):
    """Output, statistic and gradients of `sum(output * weights)`, in float64."""
    wide = {n: np.float64(x) for n, x in arrays.items() if n != "mask"}
    query, weights = wide["query"], wide["weights"]
    group = query.shape[2] // wide["key"].shape[2]
    key, value = (np.repeat(wide[name], group, axis=2) for name in ("key", "value"))
    scale = 1 / np.sqrt(WIDTH)
    alone = scale * np.einsum("bqhd,bkhd->bhqk", query, key)
    logits = alone + wide.get("bias", 0.0)
    seen = np.broadcast_to(arrays.get("mask", True), logits.shape)
    if is_causal:
        seen = seen & np.tri(*logits.shape[-2:], dtype=bool)
    logits = np.where(seen, logits, -np.inf)
    shares = np.exp(logits)
    shares /= shares.sum(-1, keepdims=True)
    d_shares = np.einsum("bqhd,bkhd->bhqk", weights, value)
    mean = (shares * d_shares).sum(-1, keepdims=True)
    d_logits = shares * (d_shares - mean)
    gradients = {
        "query": scale * np.einsum("bhqk,bkhd->bqhd", d_logits, key),
        "key": shared(scale * np.einsum("bhqk,bqhd->bkhd", d_logits, query), group),
        "value": shared(np.einsum("bhqk,bqhd->bkhd", shares, weights), group),
    }
    if "bias" in wide:
        spread = tuple(a for a in (0, 1) if wide["bias"].shape[a] == 1)
        gradients["bias"] = d_logits.sum(spread, keepdims=True)
    output = np.einsum("bhqk,bkhd->bqhd", shares, value)
    return (output, np.where(seen, alone, -np.inf).max((0, 2, 3))), gradients


def shared(gradient, group):
    """Summed over the query heads that share a key head."""
    batch, length, heads, width = gradient.shape
    return gradient.reshape(batch, length, heads // group, group, width).sum(3)


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    numbers = arrays_of(generator, case)
    function = functools.partial(
        FUNCTIONS[case["function"]], is_causal=case["is_causal"]
    )
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    with told(seed, **case):
        arrays = {n: jnp.asarray(x) for n, x in numbers.items()}
        (output, largest), grads = called(function, case["call"], arrays)
        (expected, statistic), gradients = reference(numbers, case["is_causal"])
        close(output, expected)
        close(largest, statistic)
        for name, gradient in gradients.items():
            close(grads[name], gradient, err_msg=f"gradient of {name}")


test_attention_everywhere = family(check, 160)
