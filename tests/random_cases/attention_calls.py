"""The ways of calling attention, each with its gradient."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


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
