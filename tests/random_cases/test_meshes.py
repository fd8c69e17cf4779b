"""Muon on eight simulated devices against muon on one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import chance, family, pick, told

import muonclip_jax as mc


MESHES = ({"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2})
TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
# Enough sizes that an axis of a mesh divides, one that none does, and nothing.
SHAPES = ((8, 16), (16, 8), (3, 8), (2, 8, 8), (3, 8, 16), (8, 4, 4), (0, 8), (8,), ())


def draw(generator):
    sizes = pick(generator, *MESHES)
    kinds = [pick(generator, *TYPES)] * len(sizes)
    if len(sizes) > 1 and chance(generator, 0.3):
        kinds = [pick(generator, *TYPES) for _ in sizes]
    count = int(generator.integers(1, 4))
    shapes = [pick(generator, *SHAPES) for _ in range(count)]
    return {
        "mesh": sizes,
        "kinds": kinds,
        "leaves": [(shape, spec(generator, shape, sizes, kinds)) for shape in shapes],
        "told": pick(generator, "nothing", "shardings", "specs"),
        "init": pick(generator, "eager", "jit"),
        "update": pick(generator, "jit", "jit", "eager"),
    }


def spec(generator, shape, sizes, kinds):
    """Each axis of the mesh cuts at most one axis, which it divides."""
    entries = [[] for _ in shape]
    for name in generator.permutation(list(sizes)):
        fits = [
            i
            for i, size in enumerate(shape)
            if size % math.prod(sizes[n] for n in (*entries[i], str(name))) == 0
            and kinds_agree((*entries[i], str(name)), sizes, kinds)
        ]
        if fits and chance(generator, 0.7):
            entries[pick(generator, *fits)].append(str(name))
    return P(*(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries))


def kinds_agree(names, sizes, kinds):
    """JAX wants one kind of mesh axis for each axis that is cut."""
    return len({kinds[list(sizes).index(name)] for name in names}) == 1


def updated(tx, params, gradients, case):
    init = jax.jit(tx.init) if case["init"] == "jit" else tx.init
    update = jax.jit(tx.update) if case["update"] == "jit" else tx.update
    state = init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    types = tuple(TYPES[kind] for kind in case["kinds"])
    devices = jax.devices()[: math.prod(case["mesh"].values())]
    mesh = jax.make_mesh(
        tuple(case["mesh"].values()), tuple(case["mesh"]), types, devices=devices
    )
    specs = {f"w{i}": leaf[1] for i, leaf in enumerate(case["leaves"])}
    numbers = {"ns_steps": 2, "dimension_numbers": matrices}
    trees = [
        {
            f"w{i}": generator.normal(size=shape).astype(np.float32)
            for i, (shape, _) in enumerate(case["leaves"])
        }
        for _ in range(2)
    ]
    with told(seed, **case):
        whole = [jax.tree.map(jnp.asarray, tree) for tree in trees]
        expected = updated(
            mc.muon(0.1, **numbers), whole[0], whole[1:], {"init": "", "update": ""}
        )
        placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        shardings = {"nothing": None, "shardings": placed, "specs": specs}
        tx = mc.muon(0.1, shardings=shardings[case["told"]], **numbers)
        with jax.set_mesh(mesh):
            params, *gradients = (jax.device_put(tree, placed) for tree in trees)
            found = updated(tx, params, gradients, case)
        for name, x in expected.items():
            assert found[name].shape == x.shape
            # JAX cannot read an empty array back that explicit axes cut.
            if x.size:
                np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5)


def matrices(params):
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree.map(lambda x: numbers if x.ndim > 1 else None, params)


test_meshes = family(check, 120)
