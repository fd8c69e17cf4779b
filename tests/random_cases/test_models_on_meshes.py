"""Small random models, read, recorded and clipped on meshes, against one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from helpers import mesh_of, on_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import BLOCK, chance, family, pick, told

import muonclip_jax as mc


WIDTH, HEAD_DIM = 8, 4
BATCH = (8, 5, WIDTH)
MESHES = ({"data": 2}, {"data": 2, "model": 2}, {"data": 1, "model": 2}, {"data": 4})

#: Of the largest entry, as in test_meshes.py: a step of Newton-Schulz magnifies an
#: error by at most 3.4445. Logits are sums of 4 products of sums of 8, twice.
BOUND = 1e-5


def draw(generator):
    heads, is_stacked = pick(generator, 2, 4), chance(generator, 0.5)
    return {
        "heads": heads,
        "keys": pick(generator, heads, heads, 2, 1),
        "layout": pick(generator, "heads", "flat", "fused"),
        "repeats": chance(generator, 0.5),  # keys, or queries are grouped
        "normed": chance(generator, 0.3),
        "stacked": is_stacked,
        "apart": () if is_stacked else tuple(range(pick(generator, 1, 1, 2))),
        "per_head": pick(generator, None, False),
        "differentiated": chance(generator, 0.3),
    }


def shapes_of(case):
    heads, keys = case["heads"], case["keys"]
    counts = {"a": heads, "b": keys, "c": keys}
    if case["layout"] == "fused":
        layer = {"abc": (WIDTH, (heads + 2 * keys) * HEAD_DIM)}
    elif case["layout"] == "flat":
        layer = {name: (WIDTH, n * HEAD_DIM) for name, n in counts.items()}
    else:
        layer = {name: (WIDTH, n, HEAD_DIM) for name, n in counts.items()}
    layer["d"] = heads * HEAD_DIM, WIDTH
    if case["normed"]:
        layer |= {"gain_a": (HEAD_DIM,), "gain_b": (HEAD_DIM,)}
    if case["stacked"]:
        layers = {f"layers_{n}": (2, *shape) for n, shape in layer.items()}
    else:
        layers = {f"layer{i}_{n}": s for i in case["apart"] for n, s in layer.items()}
    return layers | {"last": (WIDTH, 3)}


def forward(case, params, x, summed=lambda x: x):
    """Attention on a residual stream; `summed` adds up what devices have of heads."""
    part = functools.partial(layer, case, summed=summed)

    def named(prefix):
        return {n[len(prefix) :]: p for n, p in params.items() if n.startswith(prefix)}

    if case["stacked"]:
        x, _ = lax.scan(lambda x, p: (part(p, x), None), x, named("layers_"))
    else:
        for i in case["apart"]:
            x = part(named(f"layer{i}_"), x)
    return x @ params["last"]


def layer(case, p, x, summed):
    ratio = case["heads"] // case["keys"]
    normed = unit(x)
    if "abc" in p:
        ends = np.cumsum([case["heads"], case["keys"]]) * HEAD_DIM
        found = jnp.split(normed @ p["abc"], ends, axis=-1)
    else:
        found = [jnp.tensordot(normed, p[n], 1) for n in "abc"]
    q, k, v = (y.reshape(*x.shape[:2], -1, HEAD_DIM) for y in found)
    if case["normed"]:
        q, k = unit(q) * p["gain_a"], unit(k) * p["gain_b"]
    if case["repeats"]:
        k, v = (jnp.repeat(y, ratio, axis=2) for y in (k, v))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, HEAD_DIM)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(HEAD_DIM)
    hidden = jnp.triu(jnp.ones(logits.shape[-2:], bool), 1)
    weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, logits))
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return x + summed(out.reshape(*x.shape[:2], -1) @ p["d"])


def unit(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss_of(case):
    return lambda params, x: jnp.mean(forward(case, params, x) ** 2)


def in_shard_map(case, mesh, specs, check_vma):
    """The loss of devices that have some of the rows, and of the heads."""

    def of_device(params, x):
        def summed(y):
            return lax.psum(y, "model") if is_cut(specs) else y

        local = {
            n: case[n] // (mesh.shape["model"] if is_cut(specs) else 1)
            for n in ("heads", "keys")
        }
        y = forward(case | local, params, x, summed)
        return lax.pmean(jnp.mean(y * y), "data")

    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )


def is_cut(specs):
    return any("model" in spec for spec in specs.values())


def placement(generator, case):
    sizes = pick(generator, *MESHES)
    way = pick(generator, "jit", "jit", "around shard_map", "inside shard_map")
    size = sizes.get("model", 1)
    fits = case["keys"] % size == 0 and case["layout"] != "fused"
    specs = dict.fromkeys(shapes_of(case), P())
    if way == "around shard_map" and "model" in sizes and fits:
        specs = {name: heads_cut(case, name) for name in specs}
    elif way == "jit":
        specs = {n: anyhow(generator, s, sizes) for n, s in shapes_of(case).items()}
    return {
        "mesh": sizes,
        "way": way,
        "specs": specs,
        "told": chance(generator, 0.5),
        "check_vma": chance(generator, 0.5),
    }


def heads_cut(case, name):
    kind = name.rsplit("_", 1)[-1] if "gain" not in name else "gain"
    first = [None] * case["stacked"]
    if kind in ("a", "b", "c"):
        return P(*first, None, "model")
    return P(*first, "model") if kind == "d" else P()


def anyhow(generator, shape, sizes):
    entries = [None] * len(shape)
    for name, size in sizes.items():
        fits = [
            i
            for i, n in enumerate(shape)
            if n % size == 0 and entries[i] is None and n >= size
        ]
        if fits and chance(generator, 0.6):
            entries[pick(generator, *fits)] = name
    return P(*entries)


def make(case, reading, **where):
    return mc.muonclip(
        0.1,
        threshold=1.0,  # most heads are above
        model=reading,
        per_head=case["per_head"],
        orthogonalizer=mc.NewtonSchulz(steps=1),
        **where,
    )


def step_of(case, loss, tx, mean=lambda x: x):
    recorded = mc.record_attention(loss)

    def step(params, state, gradients, x):
        if case["differentiated"]:
            gradients, stats = jax.grad(recorded, has_aux=True)(params, x)
        else:
            _, stats = recorded(params, x)
        updates, state = tx.update(gradients, state, params, attention_stats=stats)
        return updates, state

    return step


@functools.lru_cache(1)
def alone(group):
    """A model that cases of a group share, and its step on one device."""
    generator = np.random.default_rng((group, 2))
    case = draw(generator)
    params, gradients = (
        {n: generator.normal(size=s).astype("f4") for n, s in shapes_of(case).items()}
        for _ in range(2)
    )
    if case["differentiated"]:
        # Logits of some 3. The gradient of a sharp softmax, which is the user's,
        # magnifies the rounding of logits of 30 beyond any bound on the optimizer.
        params = {n: x / math.sqrt(WIDTH) for n, x in params.items()}
    x = generator.normal(size=BATCH).astype(np.float32)
    loss = loss_of(case)
    reading = mc.read_model(loss, params, x)
    assert len(reading.attention) == max(1, len(case["apart"])), reading
    tx = make(case, reading)
    step = jax.jit(step_of(case, loss, tx))
    expected = step(params, tx.init(params), gradients, x)
    return case, (params, gradients, x), reading, expected


def check(seed):
    shared, numbers, reading, expected = alone(seed // BLOCK)
    case = shared | placement(np.random.default_rng((seed, 3)), shared)
    with told(seed, **case):
        compare(case, numbers, reading, expected)


def compare(case, numbers, reading, expected):
    mesh = mesh_of(**case["mesh"])
    params, gradients, x = numbers
    placed = on_mesh(mesh, case["specs"])
    shardings = placed if case["told"] else None
    loss = loss_of(case)
    if case["way"] == "around shard_map":
        loss = in_shard_map(case, mesh, case["specs"], case["check_vma"])
    with jax.set_mesh(mesh):
        params, gradients = jax.device_put((params, gradients), (placed, placed))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        found = mc.read_model(loss, params, x)
        assert found.labels == reading.labels
        assert len(found.attention) == len(reading.attention), found
        tx = make(case, found, shardings=shardings)
        state = tx.init(params)
        step = step_of(case, loss, tx)
        if case["way"] == "inside shard_map":
            step = inside(case, found, mesh)
        updates, after = jax.jit(step)(params, state, gradients, x)
    for x, y in zip(*map(jax.tree.leaves, (state, after)), strict=True):
        assert x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert_alike((updates, after), expected)


def inside(case, reading, mesh):
    """Every device records its rows; the optimizer joins them."""
    plain = loss_of(case)

    def loss(params, x):
        return lax.pmean(plain(params, x), "data")

    return jax.shard_map(
        step_of(case, loss, make(case, reading, axis_name="data")),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data")),
        out_specs=P(),
        check_vma=case["check_vma"],
    )


def assert_alike(found, expected):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        atol = BOUND * np.abs(y).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=str(path))


test_models = family(check, 100, quick=15)
