"""Muon and MuonClip on random meshes of simulated devices against one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import chance, family, pick, told

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
# Enough sizes that an axis of a mesh divides, one that none does, and nothing.
SHAPES = ((8, 16), (16, 8), (3, 8), (2, 8, 8), (3, 8, 16), (8, 4, 4), (0, 8), (8,), ())
KERNEL = (8, 4, 2)
LOGITS = (-3.0, 50.0, 99.0, 101.0, 400.0, np.inf, np.nan)
STEPS = 2
UPDATES = ("jit", "ahead of time", "ahead of time", "eager")

#: Of the largest entry. Two steps of Keller Jordan's polynomial magnify a singular
#: value, and its error, by at most 3.4445^2 = 12, and a float32 sum of 16 products is
#: good to 16 * 2^-24 = 1e-6: 1.2e-5.
BOUND = 1.2e-5
#: A sum that cancels keeps the rounding of its terms: gradients up to 4 in the state,
#: and what AdamW made of them, a rate of 0.1 times about 1, in updates.
ROUNDINGS = {None: 2**-24, "float32": 2**-24, "bfloat16": 2**-9, "int8": 2**-24}
#: Once momentum was rounded: the last bit may fall otherwise where a compiler fuses a
#: product and a sum, or in 8 bits the last code of 127, and 12 times that is the bound.
BOUNDS = {None: BOUND, "float32": BOUND, "bfloat16": 12 / 2**8, "int8": 12 / 127}


def draw(generator):
    sizes = pick(generator, *MESHES)
    kinds = [pick(generator, *TYPES)] * len(sizes)
    if len(sizes) > 1 and chance(generator, 0.3):
        kinds = [pick(generator, *TYPES) for _ in sizes]
    leaves = {}
    for i in range(int(generator.integers(1, 4))):
        shape = pick(generator, *SHAPES)
        leaves[f"w{i}"] = shape, spec(generator, shape, sizes, kinds)
    if chance(generator, 0.3) and named(sizes, kinds):
        leaves |= experts(generator, sizes, kinds)
    is_clipped = chance(generator, 0.3)
    if is_clipped:
        for name in ("query", "key"):
            leaves[f"attn/{name}/kernel"] = (
                KERNEL,
                spec(generator, KERNEL, sizes, kinds),
            )
    gradients, update = ["cut evenly"], pick(generator, *UPDATES)
    if set(kinds) == {"automatic"} and update != "eager":
        # An eager update sees how gradients are sharded, which must not contradict.
        gradients += ["cut evenly", "cut unevenly", "flat"]
    return {
        "mesh": sizes,
        "devices": generator.permutation(8)[: math.prod(sizes.values())].tolist(),
        "kinds": kinds,
        "leaves": leaves,
        "is_clipped": is_clipped,
        "told": pick(generator, "nothing", "shardings", "specs", "function", "some"),
        "init": pick(generator, "eager", "eager", "jit", "elsewhere"),
        "update": update,
        "gradients": pick(generator, *gradients),
        "mu_dtype": pick(generator, None, None, "float32", "bfloat16", "int8"),
        "neuron_b2": pick(generator, None, None, 0.9),
    }


def spec(generator, shape, sizes, kinds):
    """Each axis of the mesh cuts at most one axis, which it divides."""
    entries = [[] for _ in shape]
    for name in generator.permutation(named(sizes, kinds)):
        fits = [
            i
            for i, size in enumerate(shape)
            if size % math.prod(sizes[n] for n in (*entries[i], str(name))) == 0
            and kinds_agree((*entries[i], str(name)), sizes, kinds)
        ]
        if fits and chance(generator, 0.7):
            entries[pick(generator, *fits)].append(str(name))
    return P(*(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries))


def named(sizes, kinds):
    """The axes that may cut. From specs on a mesh of several kinds JAX drops those of
    one device, and takes exception to the difference: so with `optax.adam`.
    """
    return [n for n, size in sizes.items() if size > 1 or len(set(kinds)) == 1]


def kinds_agree(names, sizes, kinds):
    """JAX wants one kind of mesh axis for each axis that is cut."""
    return len({kinds[list(sizes).index(name)] for name in names}) == 1


def experts(generator, sizes, kinds):
    """One expert a group of devices, which may share it, next to plain matrices."""
    first, *rest = named(sizes, kinds)
    cut = rest[0] if rest and 16 % sizes[rest[0]] == 0 else None
    leaves = {"experts": ((sizes[first], 16, 8), P(first, cut))}
    for i in range(int(generator.integers(1, 3))):
        shape = (16, 16)
        leaves[f"dense{i}"] = shape, spec(generator, shape, sizes, kinds)
    return leaves


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *modules, name = path.split("/")
        module = tree
        for each in modules:
            module = module.setdefault(each, {})
        module[name] = leaf
    return tree


def matrices(params):
    def numbers(path, x):
        if "attn" in jax.tree_util.keystr(path):
            return optax.contrib.MuonDimensionNumbers(0, (1, 2))
        return optax.contrib.MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None

    return jax.tree.map_with_path(numbers, params)


def make(case, shardings=None):
    options = {name: case[name] for name in ("mu_dtype", "neuron_b2")}
    options |= {
        "orthogonalizer": mc.NewtonSchulz(steps=2),
        "dimension_numbers": matrices,
        "shardings": shardings,
    }
    return (mc.muonclip if case["is_clipped"] else mc.muon)(0.1, **options)


def shardings_of(generator, case, placed):
    specs = nested({name: spec for name, (_, spec) in case["leaves"].items()})
    some = jax.tree.map(lambda x: pick(generator, x, None), placed)
    return {
        "nothing": None,
        "shardings": placed,
        "specs": specs,
        "function": lambda params: placed,
        "some": some,
    }[case["told"]]


def walk(tx, step, state, params, gradients, stats):
    """The updates of every step, and the states before, between and after."""
    found, states = [], [state]
    for gradient in gradients:
        updates, state = step(gradient, state, params, stats)
        params = jax.tree.map(moved, params, updates)
        found.append(updates)
        states.append(state)
    return found, states


def moved(param, update):
    """By NumPy, so that a param stays sharded as it is; JAX reads no empty one."""
    if not param.size:
        return param
    return jax.device_put(np.asarray(param) + np.asarray(update), param.sharding)


def step_of(tx, case, mesh=None):
    def step(gradient, state, params, stats):
        extra = {"attention_stats": stats} if case["is_clipped"] else {}
        if mesh is not None:
            gradient = arranged(gradient, params, case["gradients"], mesh)
        return tx.update(gradient, state, params, **extra)

    return step


def arranged(gradient, params, how, mesh):
    """Gradients as only a program has them, where `update` sees tracers."""
    if how == "cut unevenly":
        axes = tuple(mesh.axis_names)
        cut = NamedSharding(mesh, P(axes))
        return jax.tree.map(
            lambda g: jax.lax.with_sharding_constraint(g, cut) if g.ndim else g,
            gradient,
        )
    # An axis of the mesh is split where one row becomes a matrix.
    return jax.tree.map(lambda g, p: g.reshape(p.shape), gradient, params)


def placed_gradients(trees, case, placed, mesh):
    if case["gradients"] != "flat":
        return [jax.device_put(tree, placed) for tree in trees]
    cut = NamedSharding(mesh, P(tuple(mesh.axis_names)))

    def put(x):
        x = x.reshape(-1)
        return jax.device_put(x, cut if x.size and x.size % mesh.size == 0 else None)

    return [jax.tree.map(put, tree) for tree in trees]


def check(seed):
    generator = np.random.default_rng(seed)
    case = draw(generator)
    with told(seed, **case):
        compare(generator, case)


def compare(generator, case):
    mesh = Mesh(
        np.array(jax.devices())[case["devices"]].reshape(*case["mesh"].values()),
        tuple(case["mesh"]),
        axis_types=tuple(TYPES[kind] for kind in case["kinds"]),
    )
    shapes = {name: shape for name, (shape, _) in case["leaves"].items()}
    whole, *gradients = (
        nested({n: jnp.float32(generator.normal(size=s)) for n, s in shapes.items()})
        for _ in range(1 + STEPS)
    )
    row = generator.choice(LOGITS, KERNEL[1]).astype(np.float32)
    stats = {"attn": {"max_logits": row}}

    alone = make(case)
    expected = walk(
        alone, jax.jit(step_of(alone, case)), alone.init(whole), whole, gradients, stats
    )
    placed = nested(
        {n: NamedSharding(mesh, spec) for n, (_, spec) in case["leaves"].items()}
    )
    tx = make(case, shardings_of(generator, case, placed))
    with jax.set_mesh(mesh):
        params = jax.device_put(whole, placed)
        gradients = placed_gradients(gradients, case, placed, mesh)
        init = {"eager": tx.init, "jit": jax.jit(tx.init)}.get(case["init"])
        state = init(params) if init else alone.init(whole)
        step = step_of(tx, case, mesh)
        if case["update"] != "eager":
            step = jax.jit(step)
        if case["update"] == "ahead of time" and stays(case):
            step = step.lower(gradients[0], state, params, stats).compile()
        found = walk(tx, step, state, params, gradients, stats)
    if case["update"] != "eager" and stays(case):
        first, *later = found[1]
        for state in later:
            assert_sharded_alike(first, state)
    assert_alike(found, expected, case["mu_dtype"])


def stays(case):
    """Whether a step returns the state sharded as it was.

    One that was made elsewhere moves in the first step, and so does what is empty,
    which JAX shards as it likes.
    """
    is_empty = any(0 in shape for shape, _ in case["leaves"].values())
    return case["init"] != "elsewhere" and not is_empty


def assert_sharded_alike(state, other):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(other), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (
            f"{name}: {x.sharding} became {y.sharding}"
        )


def assert_alike(found, expected, dtype):
    (updates, states), (desired, desired_states) = found, expected
    # Momentum was nothing yet.
    first = BOUND if dtype == "int8" else BOUNDS[dtype]
    floor = 0.2 * ROUNDINGS[dtype]
    for i, bound in enumerate([first] + [BOUNDS[dtype]] * (STEPS - 1)):
        assert_close(updates[i], desired[i], bound, floor, f"update {i}")
    if dtype != "int8":  # codes on scales that differ by a bit
        floor = 4 * ROUNDINGS[dtype]
        assert_close(states[-1], desired_states[-1], BOUNDS[dtype], floor, "state")


def assert_close(found, expected, bound, floor, name):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.shape == y.shape and x.dtype == y.dtype
        # JAX cannot read an empty array back that explicit axes cut.
        if not y.size:
            continue
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        largest = np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max()
        atol = bound * largest + floor
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name + str(path))


# A block is 14 seconds of compiling.
test_meshes = pytest.mark.more(family(check, 200, quick=40))
