"""Muon on a mesh against Muon on one device: the same numbers, less work, two trips."""

import functools
import logging
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import few, more
from hlo_costs import hlo_costs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
IN = MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
# Three shapes: gate and down have one, but a mesh cuts them along different sides.
SHAPES = {
    "gate": (6, 16, 64),
    "down": (6, 64, 16),
    "query": (16, 8, 4),
    "experts": (3, 8, 8, 16),
}
NUMBERS = {name: IN if name == "query" else PLAIN for name in SHAPES}
LAYOUTS = {
    "fsdp": (
        {"fsdp": 8},
        {
            "gate": P(None, "fsdp"),
            "down": P(None, "fsdp"),
            "query": P("fsdp"),
            "experts": P(None, None, None, "fsdp"),
        },
    ),
    "fsdp and tensor": (
        {"fsdp": 4, "tensor": 2},
        {
            "gate": P(None, "fsdp", "tensor"),
            "down": P(None, ("tensor", "fsdp")),
            "query": P("fsdp", "tensor"),
            "experts": P(None, "tensor", "fsdp"),
        },
    ),
    "expert": (
        {"expert": 4, "fsdp": 2},
        {
            "gate": P(None, ("expert", "fsdp")),
            "down": P(None, "fsdp", "expert"),
            "query": P("fsdp"),
            "experts": P(None, "expert", "fsdp"),
        },
    ),
    "data": ({"data": 8}, {name: P() for name in SHAPES}),
    "stack": (
        {"data": 4, "layer": 2},
        {"gate": P("layer"), "down": P("layer", "data"), "query": P(), "experts": P()},
    ),
}
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

# Two steps compile faster than five.
make = functools.partial(
    mc.muon, 1e-2, dimension_numbers=NUMBERS, orthogonalizer=mc.NewtonSchulz(steps=2)
)


def random_tree(seed):
    generator = np.random.default_rng(seed)
    # Leaves of other scales, so that one taken for another is seen.
    return {
        name: (scale * generator.normal(size=shape)).astype(np.float32)
        for scale, (name, shape) in zip([1, 30, 1e-3, 7], SHAPES.items(), strict=True)
    }


def momentum_of(state):
    is_muon = lambda x: isinstance(x, mc.ScaleByMuonState)  # noqa: E731
    (found,) = filter(is_muon, jax.tree.leaves(state, is_leaf=is_muon))
    return found.mu


def two_steps(tx, grads, params, jit=jax.jit):
    """The second update, and the momentum after it."""
    state, update = tx.init(params), jit(tx.update)
    _, state = update(grads, state, params)
    updates, state = update(grads, state, params)
    return updates, momentum_of(state)


@functools.cache
def on_one_device():
    return two_steps(make(), random_tree(1), random_tree(0))


def placed(layout, types="auto"):
    axes, specs = LAYOUTS[layout]
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(TYPES[types],) * len(axes)
    )
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params, grads = jax.device_put((random_tree(0), random_tree(1)), (shardings,) * 2)
    return mesh, shardings, params, grads


def assert_as_on_one_device(results):
    chex.assert_trees_all_close(results, on_one_device(), rtol=1e-5, atol=1e-7)


def assert_where(tree, shardings):
    for name, sharding in shardings.items():
        assert tree[name].sharding.is_equivalent_to(sharding, tree[name].ndim), name


@pytest.mark.parametrize("layout", few(LAYOUTS, "expert"))
@pytest.mark.parametrize(
    ("types", "told"), [more("auto", True), ("auto", False), ("explicit", False)]
)
def test_same_as_on_one_device(layout, types, told):
    _, shardings, params, grads = placed(layout, types)
    results = two_steps(make(shardings=shardings if told else None), grads, params)
    assert_as_on_one_device(results)
    for tree in results:
        assert_where(tree, shardings)


@pytest.mark.more
def test_specs_on_the_mesh_that_is_set():
    mesh, shardings, params, grads = placed("fsdp and tensor")
    specs = {name: sharding.spec for name, sharding in shardings.items()}
    with jax.set_mesh(mesh):
        assert_as_on_one_device(two_steps(make(shardings=specs), grads, params))


@pytest.mark.more
def test_a_function_of_the_params_and_a_prefix():
    mesh, shardings, params, grads = placed("data")
    for given in (lambda params: shardings, NamedSharding(mesh, P())):
        assert_as_on_one_device(two_steps(make(shardings=given), grads, params))


@pytest.mark.more
def test_without_jit():
    _, shardings, params, grads = placed("expert")
    results = two_steps(make(), grads, params, jit=lambda f: f)
    assert_as_on_one_device(results)
    assert_where(results[0], shardings)


@pytest.mark.more
def test_under_vmap():
    """Two runs at once, of which nobody says how they are sharded."""
    _, _, params, grads = placed("fsdp")
    tx = make()
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (grads, params))
    state = jax.vmap(tx.init)(both[1])
    updates, _ = jax.jit(jax.vmap(tx.update))(both[0], state, both[1])
    plain = make()
    first, _ = plain.update(random_tree(1), plain.init(random_tree(0)), random_tree(0))
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], updates), first, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("way", ["pmap", "shard_map"])
def test_where_devices_are_told_what_to_do(way):
    """Inside `pmap` and `shard_map` every device updates what it sees."""
    mesh, _, params, grads = placed("data")
    tx = make()
    state = tx.init(params)
    if way == "pmap":
        repeated = jax.tree.map(lambda x: np.stack([x] * 8), (grads, state, params))
        results, new_state = jax.pmap(tx.update, axis_name="data")(*repeated)
        results, new_state = jax.tree.map(lambda x: x[3], (results, new_state))
    else:
        update = jax.shard_map(
            tx.update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        results, new_state = jax.jit(update)(grads, state, params)
    expected, _ = make().update(
        random_tree(1), make().init(random_tree(0)), random_tree(0)
    )
    chex.assert_trees_all_close(results, expected, rtol=1e-5, atol=1e-7)


def lowered_update(layout, types="auto", **arguments):
    _, shardings, params, grads = placed(layout, types)
    tx = make(shardings=shardings, **arguments)
    return jax.jit(tx.update).lower(grads, tx.init(params), params)


def compiled_update(layout):
    return lowered_update(layout).compile()


def traffic(compiled):
    # Loops over a device's share run once or so; what they hold is what counts.
    trips = {f"stack{i}": 1 for i in range(8)}
    return hlo_costs(compiled.as_text(), trips).collectives


@pytest.mark.parametrize(
    ("layout", "all_to_all", "all_gather"),
    # Stacks of which devices hold blocks, and such as several devices hold alike: the
    # results of those go to all, cut as they are.
    [
        more("fsdp", 4, 0),
        ("fsdp and tensor", 4, 0),
        more("expert", 4, 1),
        more("data", 0, 3),
        more("stack", 1, 3),
    ],
)
def test_two_exchanges_for_each_stack(layout, all_to_all, all_gather):
    found = traffic(compiled_update(layout))
    counts = {kind: (t.count, t.in_loops) for kind, t in found.items()}
    expected = {"all-to-all": (2 * all_to_all, 0), "all-gather": (all_gather, 0)}
    assert counts == {kind: pair for kind, pair in expected.items() if pair[0]}


@pytest.mark.parametrize("count, exchanges", [(8, 2), (9, 1), (16, 2)])
def test_a_large_leaf_that_all_devices_share_is_sent_by_itself(count, exchanges):
    """A stack of two would have to be whole before any of it is sent."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(mesh, P(None, "fsdp"))
    leaf = jax.ShapeDtypeStruct((count, 4096, 4096), jnp.float32, sharding=placed)
    params = {"gate": leaf, "up": leaf}
    tx = mc.scale_by_muon(
        dimension_numbers=dict.fromkeys(params, PLAIN), shardings=placed
    )
    state = jax.eval_shape(tx.init, params)
    text = jax.jit(tx.update).lower(params, state).as_text()
    assert text.count("stablehlo.all_to_all") == 2 * exchanges


@pytest.mark.more
def test_no_device_waits_for_another_between_the_exchanges():
    lines = compiled_update("fsdp").as_text().splitlines()
    sent = [i for i, line in enumerate(lines) if " all-to-all(" in line]
    loops = [i for i, line in enumerate(lines) if re.search(r"stack\d+/while\"", line)]
    loops = [i for i in loops if " while(" in lines[i]]
    assert len(sent) == 8 and len(loops) == 4
    assert sent[3] < min(loops) and max(loops) < sent[4]


def test_no_matrix_is_whole_on_the_wire():
    """What a device sends is its share and the padding of it, not a matrix to each."""
    found = traffic(compiled_update("fsdp"))["all-to-all"]
    entries = sum(map(np.prod, SHAPES.values())) / 8
    assert found.bytes <= 2 * 4 * entries * 2  # two ways, float32, twice for padding


def test_the_peer_sends_far_more():
    _, _, params, grads = placed("fsdp")
    tx = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: {
            name: MuonDimensionNumbers(len(x.shape) - 2, len(x.shape) - 1)
            for name, x in params.items()
        },
        ns_steps=2,
    )
    matrices = [
        {k: v for k, v in tree.items() if k != "query"} for tree in (grads, params)
    ]
    update = jax.jit(tx.update).lower(matrices[0], tx.init(matrices[1]), matrices[1])
    theirs = sum(t.bytes for t in traffic(update.compile()).values())
    ours = sum(t.bytes for t in traffic(compiled_update("fsdp")).values())
    assert theirs > 3 * ours


def test_the_second_step_compiles_nothing(caplog):
    mesh, shardings, params, grads = placed("fsdp and tensor")
    tx = make(shardings=shardings)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh), jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, compiled = tx.init(params), []
        for _ in range(2):
            caplog.clear()
            params, state = step(params, state, grads)
            compiled.append(re.findall(r"Compiling jit\(\w+\)", caplog.text))
    assert compiled == [["Compiling jit(step)"], []]
    assert_where(params, shardings)


@pytest.mark.more
def test_the_wire_is_bfloat16_where_the_iteration_is_short():
    for dtype, on_the_wire in {"float16": "bf16", "float32": "f32"}.items():
        # Compiled for CPU it would be float32: XLA has no other exchange there.
        text = lowered_update(
            "fsdp", orthogonalizer=mc.NewtonSchulz(dtype=dtype)
        ).as_text()
        sent = re.findall(r"all_to_all.*-> tensor<[\dx]*x(\w+)>", text)
        assert sent and set(sent) == {on_the_wire}


BAD = {
    "an axis the mesh lacks": (
        {"gate": P(None, "model")},
        r"'model'.* of 'gate' .*lacks: \['model'\]; the mesh is mesh\(fsdp: 8\)",
    ),
    "too many entries": ({"gate": P(None, None, None, "fsdp")}, "'gate'.*too many"),
    "not divisible": (
        {"gate": P("fsdp")},
        r"'gate' of shape \(6, 16, 64\) does not div",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_specs_that_cannot_work(case):
    specs, message = BAD[case]
    mesh, _, params, _ = placed("fsdp")
    own = LAYOUTS["fsdp"][1] | specs
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        make(shardings=own).init(params)


def test_a_parameter_on_another_mesh():
    _, shardings, params, _ = placed("fsdp")
    other = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    moved = shardings | {"query": NamedSharding(other, P("tensor"))}
    # As it is, and as it would have to be.
    with pytest.raises(
        ValueError,
        match=r"P\('tensor',?\) on mesh\(fsdp: 4, tensor: 2\) for 'query'.*"
        r"P\('fsdp',?\) on mesh\(fsdp: 8\)",
    ):
        make(shardings=moved).init(params)
    shapes = jax.eval_shape(lambda: params)
    with pytest.raises(ValueError, match="'down' and 'query' are on different meshes"):
        make(shardings=moved).init(shapes)


def test_specs_without_a_mesh():
    with pytest.raises(ValueError, match="no mesh: call jax.set_mesh"):
        make(shardings=P()).init(jax.eval_shape(lambda: random_tree(0)))


def test_explicit_axes_that_contradict_the_shardings():
    _, shardings, params, grads = placed("fsdp", "explicit")
    wrong = shardings | {
        "gate": NamedSharding(shardings["gate"].mesh, P(None, None, "fsdp"))
    }
    with pytest.raises(ValueError, match="for 'gate', which is on"):
        jax.jit(make(shardings=wrong).update)(grads, make().init(params), params)
