"""Costs read from compiled programs: arithmetic, cycles and collectives."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_costs import Costs, hlo_costs, LINK, Traffic
from jax.sharding import Mesh, PartitionSpec


SQUARE = jnp.zeros((32, 32))
STACK = jnp.zeros((5, 32, 48))
PRODUCT = 2 * 32**3

CASES = {
    "product": (lambda x: x @ x, [SQUARE], PRODUCT),
    "vector": (lambda x, y: x @ y, [SQUARE, jnp.zeros(32)], 2 * 32**2),
    "batch": (lambda x: x @ x.mT, [STACK], 5 * 2 * 32 * 32 * 48),
    "two axes contracted": (
        lambda x: jnp.einsum("abc,abd->cd", x, x),
        [STACK],
        2 * 48 * 48 * 5 * 32,
    ),
    "loop": (
        lambda x: jax.lax.fori_loop(0, 7, lambda _, y: y @ x, x),
        [SQUARE],
        7 * PRODUCT,
    ),
    "loop not from 0": (
        lambda x: jax.lax.while_loop(
            lambda carry: carry[0] >= 4,
            lambda carry: (carry[0] - 3, carry[1] @ x),
            (18, x),
        ),
        [SQUARE],
        5 * PRODUCT,
    ),
    "map": (
        lambda x: jax.lax.map(lambda y: y @ y.T, x),
        [STACK],
        5 * 2 * 32 * 32 * 48,
    ),
    "loop in a map": (
        lambda x: jax.lax.map(
            lambda y: jax.lax.fori_loop(0, 3, lambda _, z: z @ (y.T @ y), y), x
        ),
        [STACK],
        5 * 3 * 2 * 32 * 48 * 48 + 5 * 2 * 32 * 48 * 48,
    ),
    "branches": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x),
        [SQUARE],
        2 * PRODUCT,
    ),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "VALID"),
        [jnp.zeros((2, 3, 17, 11)), jnp.zeros((8, 3, 3, 5))],
        2 * (2 * 8 * 8 * 4) * (3 * 3 * 5),
    ),
}


def compiled(function, arguments):
    return jax.jit(function).lower(*arguments).compile()


def without_trip_counts(text):
    assert "known_trip_count" in text
    return re.sub(r'"known_trip_count":{"n":"\d+"}', "", text)


@pytest.mark.parametrize("case", CASES)
def test_flops_of_a_program(case):
    function, arguments, flops = CASES[case]
    assert hlo_costs(compiled(function, arguments).as_text()) == Costs(flops=flops)


@pytest.mark.parametrize("case", [name for name in CASES if "loop" in name])
def test_trips_are_counted_where_the_compiler_does_not_note_them(case):
    function, arguments, flops = CASES[case]
    text = without_trip_counts(compiled(function, arguments).as_text())
    assert hlo_costs(text).flops == flops


def test_trips_that_depend_on_data_are_an_error():
    text = compiled(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: y @ x, x), [SQUARE, 3]
    ).as_text()
    with pytest.raises(ValueError, match="depends on data"):
        hlo_costs(text)


# Compiled for v5p, shortened: five rounds of a product and each kind of collective, and
# one gather after them.
TPU = (pathlib.Path(__file__).parents[1] / "data/tpu_loop.hlo").read_text()
MATRIX = 2 * 1024**2  # bytes


def test_a_program_for_tpu():
    in_loop = Traffic(count=5, bytes=5 * MATRIX, in_loops=5)
    assert hlo_costs(TPU) == Costs(
        flops=5 * 2 * 1024**3,
        cycles=8745 + 5 * 24115,
        collectives={
            "collective-permute": in_loop,
            "reduce-scatter": in_loop,
            "all-to-all": in_loop,
            "all-gather": Traffic(count=6, bytes=9 * MATRIX, in_loops=5),
        },
    )


def test_a_batch_of_products_on_tpu_is_a_convolution():
    # Line of `jnp.matmul` on (12, 768, 3072) and (12, 768, 768), compiled for v5p.
    text = """
ENTRY %main (x: f32[12,768,3072], a: f32[12,768,768]) -> f32[12,768,3072] {
  %x = f32[12,768,3072]{2,1,0:T(8,128)} parameter(0)
  %a = f32[12,768,768]{2,1,0:T(8,128)} parameter(1)
  ROOT %convolution-base-dilated.109 = f32[12,768,3072]{2,1,0:T(8,128)} \
convolution(%a, %x), window={size=12 stride=11 lhs_dilate=12}, \
dim_labels=0bf_0io->0bf, metadata={op_name="jit(f)/dot_general" stack_frame_id=131}
}
"""
    assert hlo_costs(text).flops == 12 * 2 * 768 * 768 * 3072


def test_collectives_of_a_program_for_two_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(y, "x") / 2, x)
        return jax.lax.all_gather(x, "x", tiled=True)

    text = f.lower(jnp.zeros((6, 5))).compile().as_text()
    assert hlo_costs(text).collectives == {
        "all-reduce": Traffic(count=3, bytes=3 * 3 * 5 * 4, in_loops=3),
        "all-gather": Traffic(count=1, bytes=6 * 5 * 4),
    }


def test_what_is_exposed_is_sent_while_nothing_runs():
    """Ten times an exchange that waits, one half hidden and one hidden."""
    size = 100 * 2 * LINK
    shape = f"s8[{size}]"
    text = f"""
%body (x: {shape}) -> {shape} {{
  %x = {shape}{{0}} parameter(0)
  %waits = {shape}{{0}} all-to-all(%x), dimensions={{0}}
  %s = (({shape}), {shape}, u32[]{{:S(2)}}) all-to-all-start(%waits), dimensions={{0}}
  %t = ({shape}, {shape}, u32[]{{:S(2)}}) collective-permute-start(%x)
  %f = {shape}{{0}} fusion(%x), kind=kLoop, calls=%g, config={{"estimated_cycles":"50"}}
  %d = {shape}{{0}} all-to-all-done(%s)
  %h = {shape}{{0}} fusion(%x), kind=kLoop, calls=%g, config={{"estimated_cycles":"60"}}
  %e = {shape}{{0}} collective-permute-done(%t)
  ROOT %y = {shape}{{0}} add(%d, %e)
}}

%g (x: {shape}) -> {shape} {{
  ROOT %x = {shape}{{0}} parameter(0)
}}

%condition (x: {shape}) -> pred[] {{
  %x = {shape}{{0}} parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (x: {shape}) -> {shape} {{
  %x = {shape}{{0}} parameter(0)
  ROOT %loop = {shape}{{0}} while(%x), condition=%condition, body=%body, \
config={{"known_trip_count":{{"n":"10"}}}}
}}
"""
    costs = hlo_costs(text)
    exposed = {kind: traffic.exposed for kind, traffic in costs.collectives.items()}
    assert exposed == {"all-to-all": 10 * size * 3 // 2, "collective-permute": 0}
    assert costs.exposed == 0.5
    assert hlo_costs(text.replace("estimated", "other")).exposed == 1.0
    # Over a ring of 16 chips a quarter as much is sent.
    far = text.replace("dimensions={0}", "replica_groups=[1,16]<=[16]")
    assert hlo_costs(far, sides=(16, 1, 1)).exposed == (1 + 7 / 8) / 3
