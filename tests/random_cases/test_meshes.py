"""Muon and MuonClip on random meshes of simulated devices against one device."""

import functools
import math

import jax
import jax.numpy as jnp
import meshes
import numpy as np
from helpers import on_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import BLOCK, family, pick, told
from trees import nested

import muonclip_jax as mc


LOGITS = (-3.0, 50.0, 99.0, 101.0, 400.0, np.inf, np.nan)
STEPS = 3

#: Of the largest entry. Two steps of Keller Jordan's polynomial, or one of Polar
#: Express, magnify a singular value, and its error, by at most 3.4445^2 = 12, and a
#: float32 sum of 16 products is good to 16 * 2^-24 = 1e-6: 1.2e-5.
BOUND = 1.2e-5
#: A sum that cancels keeps the rounding of its terms: gradients up to 4 in the state,
#: and what AdamW made of them, a rate of 0.1 times about 1, in updates.
ROUNDINGS = {"float32": 2**-24, "bfloat16": 2**-9, "int8": 2**-24}
#: After the update of a clipped kernel the weight, up to 4, is one of its dtype: one
#: that falls on the other neighbor, twice their rounding away, in two of the steps.
ON_A_GRID = 2 * 4 * 2
#: Once momentum was rounded: the last bit may fall otherwise where a compiler fuses a
#: product and a sum, or in 8 bits the last code of 127, and 12 times that is the bound.
BOUNDS = {"float32": BOUND, "bfloat16": 12 / 2**8, "int8": 12 / 127}


def make(case, **where):
    entries = nested({n: entry for n, (_, entry) in case["leaves"].items()})
    maker = mc.muonclip if case["is_clipped"] else mc.muon
    # As a function, since in a tree `None` means that the rest is found by names.
    options = {"dimension_numbers": lambda _: entries, **case["options"]}
    return maker(0.1, **options, **where)


@functools.lru_cache(1)
def alone(group):
    """What cases of a group share: an optimizer, and what it does on one device."""
    generator = np.random.default_rng((group, 0))
    case = meshes.optimizer(generator)
    draw = functools.partial(jnp.asarray, dtype=case["dtype"])
    whole, *gradients = (
        nested(
            {n: draw(generator.normal(size=s)) for n, (s, _) in case["leaves"].items()}
        )
        for _ in range(1 + STEPS)
    )
    row = generator.choice(LOGITS, meshes.KERNEL[1]).astype(np.float32)
    numbers = jax.device_put((whole, gradients, {"attn": {"max_logits": row}}))
    tx = make(case)
    # Committed, as after a step: one compilation.
    params = jax.device_put(numbers[0], jax.devices()[0])
    step = jax.jit(step_of(tx, case))
    return case, numbers, walk(step, tx.init(params), params, *numbers[1:])


COMPILED = []


def note_compilation(event, seconds, **_):
    if "backend_compile" in event:
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


def walk(step, state, params, gradients, stats, stays=False):
    """The updates of every step, and the states before, between and after."""
    found, states = [], [state]
    for gradient in gradients:
        seen = len(COMPILED)
        updates, state = step(gradient, state, params, stats)
        if stays and found:
            assert len(COMPILED) == seen, "another compilation"
        params = jax.tree.map(moved, params, updates)
        found.append(updates)
        states.append(state)
    return found, states


def moved(param, update):
    """By NumPy, so that a param stays sharded as it is; JAX reads no empty one."""
    if not param.size:
        return param
    sum_ = np.asarray(param) + np.asarray(update).astype(param.dtype)
    return jax.device_put(sum_, param.sharding)


def step_of(tx, case, how="", mesh=None):
    def step(gradient, state, params, stats):
        extra = {"attention_stats": stats} if case["is_clipped"] else {}
        if how == "cut unevenly":
            cut = NamedSharding(mesh, P(tuple(mesh.axis_names)))
            constrain = jax.lax.with_sharding_constraint
            gradient = jax.tree.map(
                lambda g: constrain(g, cut) if g.ndim else g, gradient
            )
        # An axis of the mesh is split where one row becomes a matrix.
        gradient = jax.tree.map(lambda g, p: g.reshape(p.shape), gradient, params)
        return tx.update(gradient, state, params, **extra)

    return step


def mapped(step, case, mesh, specs, state):
    """`step` inside `shard_map` or `pmap`, with other gradients for each replica."""
    replicas = case["replicas"]
    count = math.prod(case["mesh"][axis] for axis in replicas)  # 1 of none
    shares = jnp.linspace(0.5, 1.5, count) if count > 1 else jnp.ones(1)

    def on_device(share, gradient, *rest):
        gradient = jax.tree.map(lambda g: g * share.astype(g.dtype).sum(), gradient)
        return step(gradient, *rest)

    if case["update"] == "pmap":
        devices = mesh.devices.ravel().tolist()
        axes = 0, *[None] * 4
        on_devices = jax.pmap(
            on_device, "i", in_axes=axes, out_axes=None, devices=devices
        )
        return functools.partial(on_devices, np.resize(shares, mesh.size))

    def spec_of(path, x):
        if x.size:
            return x.sharding.spec
        # What has no entries is replicated, but a block of it has another shape.
        (name,) = (key.key for key in path if getattr(key, "key", "") in specs)
        return specs[name]

    of_state = jax.tree.map_with_path(spec_of, state)
    on_devices = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(replicas), specs, of_state, specs, P()),
        out_specs=(specs, of_state),
        check_vma=case["check_vma"],
    )
    cut = NamedSharding(mesh, P(replicas))
    return jax.jit(functools.partial(on_devices, jax.device_put(shares, cut)))


def shardings_of(generator, case, placed):
    return {
        "nothing": None,
        "shardings": placed,
        "specs": nested(case["specs"]),
        "function": lambda params: placed,
        "some": jax.tree.map(lambda x: pick(generator, x, None), placed),
    }[case["told"]]


def placed_gradients(trees, case, placed, mesh):
    if case["gradients"] != "flat":
        return [jax.device_put(tree, placed) for tree in trees]
    cut = NamedSharding(mesh, P(tuple(mesh.axis_names)))

    def put(x):
        x = x.reshape(-1)
        return jax.device_put(x, cut if x.size and x.size % mesh.size == 0 else None)

    return [jax.tree.map(put, tree) for tree in trees]


def check(seed):
    shared, numbers, expected = alone(seed // BLOCK)
    generator = np.random.default_rng((seed, 1))
    dtype = shared["options"]["mu_dtype"]
    case = shared | meshes.placement(generator, shared["leaves"], dtype)
    with told(seed, **case):
        compare(generator, case, numbers, expected)


def compare(generator, case, numbers, expected):
    mesh, (whole, gradients, stats) = meshes.mesh_of(case), numbers
    placed = nested(on_mesh(mesh, case["specs"]))
    if case["update"] == "pmap":
        tx = make(case, axis_name="i", slow_axes=case["slow"])
        step = mapped(step_of(tx, case), case, mesh, None, None)
        found = walk(step, tx.init(whole), whole, gradients, stats)
        assert_alike(found, expected, case)
        return
    replicas = case["replicas"] or None
    told = shardings_of(generator, case, placed)
    tx = make(case, shardings=told, axis_name=replicas, slow_axes=case["slow"] or None)
    with jax.set_mesh(mesh):
        params = jax.device_put(whole, placed)
        gradients = placed_gradients(gradients, case, placed, mesh)
        init = jax.jit(tx.init) if case["init"] == "jit" else tx.init
        state = make(case).init(whole) if case["init"] == "elsewhere" else init(params)
        step = step_of(tx, case, case["gradients"], mesh)
        # A state that was made elsewhere moves in the first step.
        stays = case["init"] != "elsewhere"
        if case["update"] == "shard_map":
            specs = nested(case["specs"])
            step = mapped(step, case, mesh, specs, state)
        elif case["update"] != "eager":
            step = jax.jit(step)
        if case["update"] == "ahead of time" and stays:
            step = step.lower(gradients[0], state, params, stats).compile()
        found = walk(step, state, params, gradients, stats, stays)
    if stays:
        for state in found[1][1:]:
            assert_stayed(found[1][0], state)
    assert_alike(found, expected, case)


def assert_stayed(state, other):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(other), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert type_of(x) == type_of(y), f"{name}: {type_of(x)} became {type_of(y)}"
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (
            f"{name}: {x.sharding} became {y.sharding}"
        )


def type_of(x):
    """As `jit` and `scan` compare them."""
    kind = jax.typeof(x)
    return kind.shape, kind.dtype, kind.weak_type, kind.sharding.spec


def assert_alike(found, expected, case):
    (updates, states), (desired, desired_states) = found, expected
    dtype = case["options"]["mu_dtype"] or case["dtype"]
    rounding = max(ROUNDINGS[dtype], ROUNDINGS[case["dtype"]])
    bound = max(BOUNDS[dtype], BOUNDS[case["dtype"]])
    # Momentum was nothing yet.
    first = BOUNDS[case["dtype"]] if dtype == "int8" else bound
    for i, share in enumerate([first] + [bound] * (STEPS - 1)):
        for name, tree in updates[i].items():
            floor = (ON_A_GRID if name == "attn" else 0.2) * rounding
            assert_close(tree, desired[i][name], share, floor, f"update {i} of {name}")
    if dtype != "int8":  # codes on scales that differ by a bit
        assert_close(states[-1], desired_states[-1], bound, 4 * rounding, "state")


def assert_close(found, expected, bound, floor, name):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.shape == y.shape and x.dtype == y.dtype
        # JAX cannot read an empty array back that explicit axes cut.
        if not y.size:
            continue
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        # A maximum over replicas says infinite of a logit that is not a number.
        x, y = (np.where(np.isnan(z), np.inf, z) for z in (x, y))
        largest = np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max()
        atol = bound * largest + floor
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name + str(path))


test_meshes = family(check, 600, quick=40)
