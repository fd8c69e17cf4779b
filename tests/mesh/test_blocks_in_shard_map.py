"""Blocks of leaves inside `jax.shard_map`: `shardings` alongside `axis_name`."""

import functools
import math
import re

import chex
import jax
import optax
import pytest
from helpers import first_update, mesh_of, more, normal, step_of
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
PARAMS = {
    "up0": normal(0, 16, 24),
    "up1": normal(1, 16, 24),
    "down": normal(2, 24, 16),
    "both": normal(3, 16, 24),
    "stack": normal(4, 4, 24, 16),
    "heads": normal(5, 12, 4, 6),
    "whole": normal(6, 10, 12),
    "bias": normal(7, 24),
    "norm": normal(8, 5),
}
SPECS = {
    "up0": P("fsdp"),
    "up1": P("fsdp"),
    "down": P(None, "fsdp"),
    "both": P("fsdp", "tensor"),
    "stack": P("fsdp", None, "tensor"),
    "heads": P("fsdp", "tensor"),
    "whole": P(),
    "bias": P("tensor"),
    "norm": P(),
}
NUMBERS = {
    **{name: Numbers(-2, -1) for name in ("up0", "up1", "down", "both", "stack")},
    **{"heads": Numbers(0, (1, 2)), "whole": Numbers(0, 1), "bias": None, "norm": None},
}


mesh = functools.partial(mesh_of, **SIZES)


def make(**options):
    return mc.muon(1e-2, dimension_numbers=NUMBERS, weight_decay=0.3, **options)


def grads_at(step):
    return {k: normal((step, 5), *x.shape) for k, x in PARAMS.items()}


def walk(step, state, steps=3):
    params = PARAMS
    for i in range(steps):
        params, state = step(grads_at(i), state, params)
    return params


@functools.cache
def expected(**options):
    tx = make(**options)
    return walk(jax.jit(step_of(tx)), tx.init(PARAMS))


def specs_of_state(state):
    """The momentum of a leaf is sharded as the leaf, and so are vectors of matrices."""

    def spec(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        entries = [*SPECS.get(name, P())][: x.ndim]
        fits = zip(x.shape, entries, strict=False)
        return P(*(None if size == 1 else entry for size, entry in fits))

    return jax.tree.map_with_path(spec, state)


def assert_close(actual, desired):
    chex.assert_trees_all_close(actual, desired, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("names", [["both"], more(["up0", "both", "whole"])])
def test_a_step_of_its_own(names):
    """`normalize_neurons` after `scale_by_muon`, with the same shardings."""
    params, specs = ({name: of[name] for name in names} for of in (PARAMS, SPECS))

    def direction(shardings):
        options = dict(dimension_numbers=Numbers(-2, -1), shardings=shardings)
        return optax.chain(mc.scale_by_muon(**options), mc.normalize_neurons(**options))

    update = functools.partial(first_update, direction(specs))
    update = jax.shard_map(update, mesh=mesh(), in_specs=(specs,), out_specs=specs)
    assert_close(jax.jit(update)(params), first_update(direction(None), params))


@pytest.mark.more
def test_replicas_average_over_the_axes_that_do_not_cut_a_leaf():
    tx = make(shardings=SPECS, axis_name=("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh()):
        step, state = step_of(tx), tx.init(PARAMS)
    of_state = specs_of_state(state)

    def scaled(grads, state, params):
        """Gradients that differ between replicas, and whose mean is `grads`."""
        number = jax.lax.axis_index("data")
        grads = jax.tree.map(lambda g: g * (0.5 + number), grads)
        across = jax.lax.axis_index("fsdp")
        for name in ("whole", "norm"):
            grads[name] = grads[name] * (0.5 + across)
        return step(grads, state, params)

    mapped = jax.shard_map(
        scaled,
        mesh=mesh(),
        in_specs=(SPECS, of_state, SPECS),
        out_specs=(SPECS, of_state),
    )
    assert_close(walk(jax.jit(mapped), state), expected())


def test_work_is_shared_and_blocks_travel_twice():
    matrices = {str(i): normal(i, 48, 96) for i in range(8)}

    def compiled(params, cut, axis_name):
        specs = dict.fromkeys(params, cut)
        options = dict(dimension_numbers=Numbers(0, 1), shardings=specs)
        tx = mc.scale_by_muon(axis_name=axis_name, **options)
        step = functools.partial(first_update, tx)
        step = jax.shard_map(step, mesh=mesh(), in_specs=(specs,), out_specs=specs)
        return jax.jit(step).lower(params).compile()

    one = compiled({"0": matrices["0"]}, P(), None).cost_analysis()["flops"]
    shared = compiled(matrices, P("fsdp", "tensor"), "data")
    share = math.prod(SIZES.values())
    assert shared.cost_analysis()["flops"] <= 1.3 * len(matrices) * one / share
    text = shared.as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 2
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    assert "all-reduce" not in text


@pytest.mark.more
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_the_derivative_is_that_of_whole_leaves(way, check):
    names = ["up0", "both", "whole"]
    params, specs = ({name: of[name] for name in names} for of in (PARAMS, SPECS))
    alone = mc.scale_by_muon(dimension_numbers=Numbers(-2, -1))
    cut = mc.scale_by_muon(dimension_numbers=Numbers(-2, -1), shardings=specs)

    def directions(tx, grads, tangents):
        update = functools.partial(first_update, tx)
        if way == "backward":
            return jax.vjp(update, grads)[1](tangents)[0]
        return jax.jvp(update, (grads,), (tangents,))[1]

    tangents = {k: normal((9, i), *params[k].shape) for i, k in enumerate(names)}
    mapped = jax.shard_map(
        functools.partial(directions, cut),
        mesh=mesh(),
        in_specs=(specs, specs),
        out_specs=specs,
        check_vma=check,
    )
    desired = directions(alone, params, tangents)
    assert_close(jax.jit(mapped)(params, tangents), desired)


def test_8_bits_want_whole_matrices():
    tx = make(shardings=SPECS, mu_dtype="int8")
    update = functools.partial(first_update, tx, params=PARAMS)
    update = jax.shard_map(update, mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS)
    with pytest.raises(ValueError, match="shard_map cuts 'both', 'down', 'heads'"):
        update(PARAMS)
