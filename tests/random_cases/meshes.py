"""Random meshes, and random leaves and settings of an optimizer on them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from seeds import chance, pick

import muonclip_jax as mc


MESHES = (
    {"a": 8},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 2},
    {"a": 3, "b": 2},
    # Axes that cut nothing, and meshes of one device.
    {"a": 1, "b": 4},
    {"a": 2, "b": 1, "c": 2},
    {"a": 1},
    {"a": 1, "b": 1},
)
TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}

LAST = MuonDimensionNumbers(-2, -1)
QKV = mc.MatrixAxes(0, 1, parts=(4, 8, 4), head_dim=(4, 4, None))
#: Enough sizes that an axis of a mesh divides, one that none does, one row, nothing.
LEAVES = (
    *(((8, 16), LAST), ((16, 8), LAST), ((3, 8), LAST), ((5, 7), LAST), ((1, 8), LAST)),
    *(((2, 8, 8), LAST), ((3, 8, 16), LAST), ((2, 2, 8, 4), LAST)),
    ((8, 4, 4), MuonDimensionNumbers((0, 1), 2)),
    *(((0, 8), LAST), ((2, 0, 4), LAST), ((8,), None), ((), None)),
    ((8, 16), QKV),
    ((2, 8, 24), mc.MatrixAxes(1, 2, parts=(16, 8))),
    ((4, 24), mc.MatrixAxes(0, 1, parts=(2, 4, 6), groups=2)),
)
KERNEL = (8, 4, 2)
HEADS = MuonDimensionNumbers(0, (1, 2))


def saturated(x):
    """A user's own orthogonalizer, by SVD: large singular values become 1."""
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    s = s * jax.lax.rsqrt(s * s + jnp.mean(s * s, -1, keepdims=True))
    return (u * s[..., None, :]) @ v


def optimizer(generator):
    """Leaves, by path, and the settings of an optimizer of them."""
    leaves = {}
    for i in range(1 + chance(generator, 0.3)):
        leaves[f"w{i}"] = pick(generator, *LEAVES)
    if chance(generator, 0.2):  # one expert a group of devices, or several
        leaves["experts"] = pick(generator, (2, 16, 8), (4, 16, 8)), LAST
    is_clipped = chance(generator, 0.2)
    if is_clipped:
        leaves |= {f"attn/{name}/kernel": (KERNEL, HEADS) for name in ("query", "key")}
    return {
        "leaves": leaves,
        "is_clipped": is_clipped,
        "dtype": pick(generator, "float32", "float32", "float32", "bfloat16"),
        "options": {
            "mu_dtype": pick(generator, None, None, "float32", "bfloat16", "int8"),
            "neuron_b2": pick(generator, None, 0.9),
            "nesterov": chance(generator, 0.5),
            "weight_decay": pick(generator, 0.0, 0.1),
            "consistent_rms": pick(generator, 0.2, None),
            "orthogonalizer": pick(
                generator,
                mc.NewtonSchulz(steps=2),
                mc.NewtonSchulz("cubic5", steps=2),
                mc.NewtonSchulz("polar_express", steps=1, method="standard"),
                saturated,
            ),
        },
    }


def placement(generator, leaves, dtype):
    """A mesh, how it cuts the leaves, and from where the update is called."""
    sizes = pick(generator, *MESHES)
    kinds = [pick(generator, *TYPES)] * len(sizes)
    if len(sizes) > 1 and chance(generator, 0.3):
        kinds = [pick(generator, *TYPES) for _ in sizes]
    rare = pick(generator, "eager", "pmap")
    update = pick(generator, "jit", "ahead of time", "shard_map", "shard_map", rare)
    specs = {
        name: P() if update == "pmap" else spec(generator, shape, sizes, kinds)
        for name, (shape, _) in leaves.items()
    }
    # int8 finds directions of whole matrices, which blocks are not. On one device
    # nothing says how state is sharded, which `shard_map` asks for.
    is_alone = math.prod(sizes.values()) == 1
    if update == "shard_map" and (dtype == "int8" or is_alone):
        specs = dict.fromkeys(specs, P())
    cuts = {axis for spec in specs.values() for entry in spec for axis in named(entry)}
    free = [axis for axis in sizes if axis not in cuts]
    gradients = ["cut evenly"]
    if set(kinds) == {"automatic"} and update in ("jit", "ahead of time"):
        # An eager update sees how gradients are sharded, which must not contradict.
        gradients += ["cut unevenly", "flat"]
    is_mapped = update in ("shard_map", "pmap")
    init = pick(generator, "eager", "eager", "jit", "elsewhere")
    return {
        "mesh": sizes,
        "devices": generator.permutation(8)[: math.prod(sizes.values())].tolist(),
        "kinds": kinds,
        "specs": specs,
        "told": "shardings"
        if is_mapped
        else pick(generator, "nothing", "shardings", "specs", "function", "some"),
        "init": "eager" if is_mapped else init,
        "update": update,
        "check_vma": chance(generator, 0.5),
        "replicas": tuple(free) if is_mapped and chance(generator, 0.7) else (),
        "gradients": pick(generator, *gradients),
        "slow": tuple(
            axis
            for axis in (["i"] if update == "pmap" else sizes)
            if chance(generator, 0.2)
        ),
    }


def named(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def spec(generator, shape, sizes, kinds):
    """Each axis of the mesh cuts at most one axis, which it divides."""
    entries = [[] for _ in shape]
    # Of one device on a mesh of several kinds JAX drops axes from specs, and takes
    # exception to the difference: so with `optax.adam`.
    axes = [n for n, size in sizes.items() if size > 1 or len(set(kinds)) == 1]
    for name in map(str, generator.permutation(axes)):
        fits = [
            i
            for i, size in enumerate(shape)
            if size % math.prod(sizes[n] for n in (*entries[i], name)) == 0
            # JAX wants one kind of mesh axis for each axis that is cut.
            and len({kinds[list(sizes).index(n)] for n in (*entries[i], name)}) == 1
        ]
        if fits and chance(generator, 0.7):
            entries[pick(generator, *fits)].append(name)
    return P(*(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries))


def mesh_of(case):
    return Mesh(
        np.array(jax.devices())[case["devices"]].reshape(*case["mesh"].values()),
        tuple(case["mesh"]),
        axis_types=tuple(TYPES[kind] for kind in case["kinds"]),
    )
