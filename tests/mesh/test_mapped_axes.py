"""Blocks and replicas inside `jax.shard_map` against one device that has everything.

Heads of query and key cut by a tensor axis, keys that all devices share, rows of the
batch along others: updates, state and metrics are those of the whole.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    first_update,
    mesh_of,
    more,
    normal,
    on_mesh,
    one_at_a_time,
    step_of,
    trained,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import flat_layer, fused_layer, gains_layer
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

FEATURES, HEADS, WIDTH = 6, 4, 3
GAINS = ("query_ln", "key_ln")
CHECKED = pytest.mark.parametrize("check", [True, more(False)])


def mapped(function, mesh, in_specs, out_specs, check, **options):
    options |= dict(in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return jax.jit(jax.shard_map(function, mesh=mesh, **options))


def layer(seed, key_heads=HEADS, stack=()):
    shapes = {"query": (FEATURES, HEADS), "key": (FEATURES, key_heads)}
    layer = {
        name: {
            "kernel": normal((seed, i, 0), *stack, *shape, WIDTH),
            "bias": normal((seed, i, 1), *stack, *shape[1:], WIDTH),
        }
        for i, (name, shape) in enumerate(shapes.items())
    }
    return layer | {
        "out": {"kernel": normal((seed, 2), *stack, HEADS, WIDTH, FEATURES)}
    }


def cut_layer(heads, key_heads, stack=()):
    return {
        "query": {"kernel": P(*stack, None, heads), "bias": P(*stack, heads)},
        "key": {"kernel": P(*stack, None, key_heads), "bias": P(*stack, key_heads)},
        "out": {"kernel": P(*stack, heads)},
    }


def specs_of(state):
    def spec(x):
        return x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()

    return jax.tree.map(spec, state)


def assert_close(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def clipped(params, specs, stats, cut, mesh, check, **options):
    """Two steps inside `shard_map`, and the same of whole layers by one device.

    `stats` have an axis of replicas in front, `cut` is their spec.
    """
    options |= {"orthogonalizer": mc.NewtonSchulz(steps=2)}
    alone = mc.muonclip(1e-2, **options)
    tx = mc.muonclip(1e-2, shardings=specs, axis_name=cut[0], **options)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    of_state = specs_of(state)
    assert {*jax.tree.leaves(of_state[1])} == {P()}

    def step(grads, state, params, stats):
        stats = jax.tree.map(lambda x: x[0], stats)
        return step_of(tx)(grads, state, params, attention_stats=stats)

    step = mapped(step, mesh, (specs, of_state, specs, cut), (specs, of_state), check)
    found, grads = params, jax.tree.map(lambda x: x[::-1], params)
    for _ in range(2):
        found, state = step(grads, state, found, stats)
    largest = jax.tree.map(lambda x: x.max(0), stats)
    expected, desired = trained(alone, params, [grads] * 2, attention_stats=largest)
    assert_close(found, expected)
    assert_close(state, desired)
    attention = options.get("attention")
    numbers = functools.partial(mc.scalars, attention=attention, heads=True)
    assert_close(numbers(state, found), numbers(desired, expected))
    assert numbers(state, found)["num_clipped"] > 0
    for x in jax.tree.leaves((found, state)):
        copies = {}  # of each block; they may not differ
        for shard in x.addressable_shards:
            first = copies.setdefault(str(shard.index), shard.data)
            np.testing.assert_array_equal(shard.data, first)


@pytest.mark.more
@pytest.mark.parametrize(
    ("key_heads", "all_heads", "check"),
    [
        (1, False, True),
        more(2, True, False),
        more(2, True, True),
        more(2, False, False),
        more(4, False, True),
    ],
)
def test_heads_cut_by_a_tensor_axis(key_heads, all_heads, check):
    """With one key head a group of queries, for which the devices have no block."""
    mesh = mesh_of(data=2, tensor=4)
    key_cut = "tensor" if key_heads == 4 else None
    params = {"a": layer(0, key_heads), "b": layer(1, key_heads)}
    specs = dict.fromkeys(params, cut_layer("tensor", key_cut))
    # By replica and head; what one replica sees another need not.
    stats = {
        "a": {"max_logits": jnp.array([[400.0, 9, 9, 9], [9, 9, 9, 90]])},
        "b": {"max_logits": jnp.array([[5.0, 5, 300, jnp.inf], [5, 5, 5, 200]])},
    }
    cut = P("data") if all_heads else P("data", "tensor")
    clipped(params, specs, stats, cut, mesh, check)


@pytest.mark.more
@CHECKED
def test_layers_of_a_stack_cut_by_a_pipeline_axis(check):
    mesh = mesh_of(data=2, pipe=2, tensor=2)
    params = {"layers": layer(3, 2, stack=(4,))}
    specs = {"layers": cut_layer("tensor", "tensor", stack=("pipe",))}
    rows = jnp.arange(32.0).reshape(2, 4, 4) * 9
    stats = {"layers": {"max_logits": rows}}
    attention = functools.partial(mc.flax_attention_layers, stack_axes={"layers": 0})
    for cut in (P("data", "pipe", "tensor"), P("data")):
        clipped(params, specs, stats, cut, mesh, check, attention=attention)


@CHECKED
@pytest.mark.parametrize("own", [False, True])
def test_an_axis_that_cuts_heads_and_divides_the_batch(own, check):
    """FSDP: heads are gathered in the model, so that all devices see all of them; or
    a device has its own heads of the whole batch.
    """
    mesh = mesh_of(fsdp=4)
    params = {"attn": layer(5)}
    specs = {"attn": cut_layer("fsdp", "fsdp")}
    seen = jnp.array([[800.0, 5, 5, 5], [5, 5, 5, 5], [5, 5, 300, 5], [5, 90, 5, 5]])
    alone, tx = mc.qk_clip(), mc.qk_clip(shardings=specs, axis_name="fsdp")
    zeros = jax.tree.map(jnp.zeros_like, params)

    def update(params, zeros, seen):
        stats = {"attn": {"max_logits": seen if own else seen[0]}}
        state = mc.qk_clip(shardings=specs).init(params)
        return tx.update(zeros, state, params, attention_stats=stats)

    row = seen.max(0)
    update = mapped(update, mesh, (specs, specs, P("fsdp")), (specs, P()), check)
    stats = {"attn": {"max_logits": row}}
    expected = alone.update(zeros, alone.init(params), params, attention_stats=stats)
    assert_close(update(params, zeros, row if own else seen), expected)


@pytest.mark.more
@CHECKED
def test_gains_that_all_heads_share(check):
    mesh = mesh_of(data=2, tensor=4)
    gains = {name: {"scale": normal(i, WIDTH)} for i, name in enumerate(GAINS)}
    params = {"attn": layer(7) | gains}
    whole = dict.fromkeys(GAINS, P())
    specs = {"attn": cut_layer("tensor", "tensor") | whole}
    stats = {"attn": {"max_logits": jnp.array([[5.0, 5, 300, 5], [5, 400, 5, 5]])}}
    attention = [gains_layer("attn")]
    # Every device may have the largest logit of all heads, or those of its own.
    for cut in (P("data"), P("data", "tensor")):
        clipped(params, specs, stats, cut, mesh, check, attention=attention)


@pytest.mark.more
@CHECKED
def test_gains_of_a_stack_cut_by_a_pipeline_axis(check):
    mesh = mesh_of(pipe=2, tensor=2)
    gains = {n: {"scale": normal(i, 4, WIDTH)} for i, n in enumerate(GAINS)}
    params = {"layers": layer(7, stack=(4,)) | gains}
    specs = cut_layer("tensor", "tensor", stack=("pipe",))
    specs = {"layers": specs | {name: {"scale": P("pipe")} for name in GAINS}}
    rows = jnp.arange(16.0).reshape(4, 4) * 20
    clip = functools.partial(mc.clip_qk, attention=[gains_layer("layers")])

    def inside(params, rows):
        return clip(params, {"layers": {"max_logits": rows}}, shardings=specs)

    expected = clip(params, {"layers": {"max_logits": rows}})
    for cut in (P(), P("pipe"), P("pipe", "tensor")):
        found = mapped(inside, mesh, (specs, cut), specs, check)(params, rows)
        assert_close(found, expected)


# Functions of the params


@pytest.mark.more
@CHECKED
def test_a_mask_is_a_function_of_whole_leaves(check):
    mesh = mesh_of(fsdp=8)
    params = {"up": normal(0, 16, 24), "table": {"embedding": normal(1, 40, 8)}}
    specs = {"up": P(None, "fsdp"), "table": {"embedding": P("fsdp")}}

    def numbers(x):
        return Numbers(0, 1) if x.shape[0] == 16 else None

    options = {
        "weight_decay": 1.0,
        "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.size > 300, p),
        "dimension_numbers": lambda p: jax.tree.map(numbers, p),
        "orthogonalizer": mc.NewtonSchulz(steps=2),
    }
    tx = mc.muon(1e-2, shardings=specs, **options)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = functools.partial(first_update, tx)
    found = mapped(update, mesh, (specs, specs), specs, check)(zeros, params)
    assert_close(found, first_update(mc.muon(1e-2, **options), zeros, params))
    assert np.abs(found["up"]).max() > 0 and np.abs(found["table"]["embedding"]).max()


#: Of leaves that hold nothing but matrices.
MATRICES = {
    "dimension_numbers": Numbers(-2, -1),
    "orthogonalizer": mc.NewtonSchulz(steps=2),
}


def update_inside(shardings, specs, params, check=True):
    tx = mc.scale_by_muon(shardings=shardings, **MATRICES)
    update = functools.partial(first_update, tx)
    return mapped(update, mesh_of(fsdp=8), (specs,), specs, check)(params)


@pytest.mark.more
@CHECKED
def test_shardings_as_a_function(check):
    params = {"up": normal(0, 16, 24), "down": normal(1, 24, 16)}
    specs = {"up": P(None, "fsdp"), "down": P("fsdp")}

    def by_shape(params):
        entries = {24: "fsdp"}
        return jax.tree.map(lambda x: P(*map(entries.get, x.shape)), params)

    def by_name(params):
        return {name: specs[name] for name, x in params.items() if x.ndim == 2}

    with pytest.raises(ValueError, match=r"function that reads \.shape of the params"):
        update_inside(by_shape, specs, params, check)
    expected = first_update(mc.scale_by_muon(**MATRICES), params)
    assert_close(update_inside(by_name, specs, params, check), expected)


# Means


@CHECKED
@pytest.mark.parametrize("averages_itself", [more(True), False])
def test_gradients_of_a_mean_loss_are_the_mean(averages_itself, check):
    """As the manual has it: `jax.grad` of `jax.lax.pmean(loss)`, checked or not.

    Of the sum, Muon hides the size, but momentum and AdamW's second moment have it.
    """
    params = {"up": normal(0, 6, 10), "bias": normal(1, 10)}
    x = normal(2, 24, 6)
    options = dict(
        dimension_numbers={"up": Numbers(0, 1), "bias": None},
        orthogonalizer=mc.NewtonSchulz(steps=2),
    )

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["up"] + params["bias"]) ** 2)

    tx = mc.muon(1e-2, axis_name="batch", **options)

    def step(params, state, x):
        def whole(params):
            return jax.lax.pmean(loss(params, x), "batch")

        return tx.update(jax.grad(whole)(params), state, params)

    alone = mc.muon(1e-2, **options)
    expected = alone.update(jax.grad(loss)(params, x), alone.init(params), params)
    step = mapped(step, mesh_of(batch=8), (P(), P(), P("batch")), P(), check)
    assert_close(step(params, tx.init(params), x), expected)


def test_gradients_of_the_own_rows_are_summed_where_types_are_checked():
    """By JAX, before the update sees them; the manual says so."""
    params, x = {"up": normal(0, 6, 10)}, normal(2, 24, 6)
    tx = mc.scale_by_muon(axis_name="batch", **MATRICES)

    def momentum(params, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"])))(params)
        return tx.update(grads, tx.init(params))[1].mu["up"]

    def found(check):
        step = mapped(momentum, mesh_of(batch=4), (P(), P("batch")), P(), check)
        return step(params, x)

    assert_close(found(True), 4 * found(False))


# Axes of several kinds


@pytest.mark.more
@CHECKED
@pytest.mark.parametrize(
    "axis_name, is_told, kind",
    one_at_a_time([None, "data"], [False, True], [AxisType.Auto, AxisType.Explicit]),
)
def test_next_to_axes_that_are_not_mapped(axis_name, is_told, kind, check):
    mesh = mesh_of(kind, data=2, fsdp=4)
    params = {"up": normal(0, 8, 12), "down": normal(1, 12, 8), "bias": normal(2, 12)}
    specs = {"up": P(None, "fsdp"), "down": P("fsdp"), "bias": P("fsdp")}
    placed = on_mesh(mesh, specs)
    numbers = {"up": Numbers(0, 1), "down": Numbers(0, 1), "bias": None}
    options = dict(dimension_numbers=numbers, orthogonalizer=mc.NewtonSchulz(steps=2))
    alone = mc.muon(1e-2, **options)
    shardings = placed if is_told else None
    tx = mc.muon(1e-2, axis_name=axis_name, shardings=shardings, **options)
    params = jax.device_put(params, placed)
    grads = jax.tree.map(jnp.sin, params)
    with jax.set_mesh(mesh):
        state = tx.init(params)
        update = mapped(tx.update, None, P(), P(), check, axis_names={"data"})
        found, _ = update(grads, state, params)
    whole = jax.tree.map(np.asarray, params)
    assert_close(found, first_update(alone, jax.tree.map(jnp.sin, whole), whole))


def update_of_micro_batches(grads, check):
    """Side by side on each device."""
    tx = mc.scale_by_muon(axis_name=("d", "v"), **MATRICES)

    def update(grads):
        def of_one(grads):
            return tx.update(grads, tx.init(grads))

        grads = jax.tree.map(lambda x: x[0], grads)
        return jax.tree.map(lambda x: x[None], jax.vmap(of_one, axis_name="v")(grads))

    return mapped(update, mesh_of(d=4), (P("d"),), P("d"), check)(grads)


@pytest.mark.more
def test_replicas_of_shard_map_and_of_vmap():
    grads = {"up": normal(0, 4, 3, 8, 12), "wide": normal(1, 4, 3, 2, 8, 12)}
    mean = jax.tree.map(lambda x: x.mean((0, 1)), grads)
    alone = mc.scale_by_muon(**MATRICES)
    expected = alone.update(mean, alone.init(mean))
    found = update_of_micro_batches(grads, check=False)
    for replica in np.ndindex(4, 3):
        assert_close(jax.tree.map(lambda x, i=replica: x[i], found), expected)


# Errors


def test_axes_of_vmap_where_types_are_checked():
    """JAX has no collectives there; its own answer is a bare `AssertionError`."""
    match = r"\['v'\] are axes of jax.vmap.*check_vma=False"
    with pytest.raises(ValueError, match=match):
        update_of_micro_batches({"up": normal(0, 4, 3, 8, 12)}, check=True)


def test_shardings_that_types_contradict():
    params = {"up": normal(0, 16, 24)}
    with pytest.raises(ValueError, match=r"\['fsdp'\] cut 'up', but it is the same on"):
        update_inside({"up": P("fsdp")}, {"up": P()}, params)
    with pytest.raises(ValueError, match=r"'up' differs along \['fsdp'\]"):
        update_inside(
            {"up": P(), "down": P("fsdp")},
            {"up": P("fsdp"), "down": P("fsdp")},
            params | {"down": normal(1, 16, 24)},
        )


ATTENTION, CUT = {"attn": layer(0)}, {"attn": cut_layer("tensor", "tensor")}


def in_shard_map(mesh, seen, rows, check):
    """An update of the clip, whose state and statistics are cut by these specs."""
    tx = mc.qk_clip(shardings=CUT)

    def update(params, state, seen):
        stats = {"attn": {"max_logits": seen}}
        return tx.update(params, state, params, attention_stats=stats)

    return mapped(update, mesh, (CUT, rows, seen), (CUT, rows), check)


@CHECKED
def test_rows_of_the_state_that_are_cut(check):
    state = mc.qk_clip().init(ATTENTION)
    rows = jax.tree.map(lambda x: P("tensor") if x.ndim else P(), state)
    update = in_shard_map(mesh_of(tensor=4), P("tensor"), rows, check)
    message = "state of qk_clip is of 1 heads, but the params have 4.*PartitionSpec()"
    with pytest.raises(ValueError, match=message):
        update(ATTENTION, state, jnp.ones(4))


@pytest.mark.parametrize("seen", [P("data"), P(("data", "tensor"))])
def test_statistics_that_differ_along_an_axis_without_a_name(seen):
    update = in_shard_map(mesh_of(data=2, tensor=4), seen, P(), True)
    with pytest.raises(ValueError, match=r"attention_stats differ along \['data'\]"):
        update(ATTENTION, mc.qk_clip().init(ATTENTION), jnp.ones(8))


def clip_of_blocks(layer, cut, kernels):
    """QK-Clip of kernels that an axis cuts, against all of them on one device.

    The function returned takes the largest logits, and how they are cut.
    """
    alone = functools.partial(mc.clip_qk, attention=[layer])
    params = {name: {"kernel": kernel} for name, kernel in kernels.items()}
    specs = {name: {"kernel": cut} for name in kernels}

    def clip(params, row):
        return alone(params, {"max_logits": row}, shardings=specs)

    def check(row, spec):
        inside = mapped(clip, mesh_of(tensor=4), (specs, spec), specs, True)
        assert_close(inside(params, row), alone(params, {"max_logits": row}))

    return check


def test_heads_that_a_fused_kernel_cuts():
    """A block has a part of the queries, and no keys: all heads, or an error."""
    kernel, row = normal(0, 6, 3 * HEADS * 2), jnp.array([5.0, 300, 5, 400])
    check = clip_of_blocks(fused_layer("", 2), P(None, "tensor"), {"c_attn": kernel})
    check(row, P())
    message = r"'tensor'\] cut 'c_attn/kernel' across heads"
    with pytest.raises(ValueError, match=message):
        check(row, P("tensor"))


@pytest.mark.parametrize("heads", [2, 6])
def test_blocks_that_cut_through_heads(heads):
    """Flat kernels, whose columns the axis divides, but not their heads."""
    kernels = {n: normal(i, 6, heads * 4) for i, n in enumerate(("q_proj", "k_proj"))}
    check = clip_of_blocks(flat_layer("", 4), P(None, "tensor"), kernels)
    check(jnp.arange(heads) * 90.0, P())
    message = r"'tensor'\] cut 'q_proj/kernel' across heads"
    with pytest.raises(ValueError, match=message):
        # As many as a device would have if a block had whole heads only.
        check(jnp.ones(4), P("tensor"))
