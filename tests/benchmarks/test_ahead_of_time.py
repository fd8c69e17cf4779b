"""Programs compiled ahead of time for TPU and GPU, and the limits that stop CI."""

import argparse

import guards
import jax
import numpy as np
import pytest
import tpu_ahead_of_time
from gpu_chips import Rates
from gpu_program import exchanged_bytes, work_by_kind
from hlo_costs import Costs
from hlo_program import parse
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from models import Model, models
from optax_main import RELEASED
from shares import loops_of_devices


pytestmark = pytest.mark.usefixtures("fast_compilation")

SMALL = {
    "separate": Model({"a": (16, 16), "b": (16, 32), "c": (32, 16)}),
    "stacked": Model({"a": (3, 16, 16), "b": (3, 16, 32)}),
}
CUT = Model(
    {"a": (3, 16, 16), "b": (5, 16, 32), "embed": (64, 16)},
    {"a": P(None, "x"), "b": P(None, None, "x"), "embed": P("x")},
    {"x": 4},
    adam=("embed",),
)
STEPS = 5
SQUARE_STEP, WIDE_STEP = 3 * 2 * 16**3, 2 * 2 * 16 * 16 * 32 + 2 * 16**3


def mesh_of(model):
    shape = tuple(model.mesh.values())
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(model.mesh), axis_types=(AxisType.Auto,) * len(shape))


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("separate", STEPS * (SQUARE_STEP + 2 * WIDE_STEP)),
        ("stacked", STEPS * 3 * (SQUARE_STEP + WIDE_STEP)),
    ],
)
def test_the_update_of_a_model(name, flops):
    model = SMALL[name]
    updates = list(tpu_ahead_of_time.compile_updates(name, model, mesh_of(model)))
    assert [update.implementation for update in updates] == ["ours", "optax", RELEASED]
    assert updates[1].costs == updates[2].costs == Costs(flops=flops)
    # Gradients, momentum and parameters, and a few counters.
    bytes_of_matrices = 3 * 4 * sum(map(np.prod, model.shapes.values()))
    for update in updates:
        assert 0 <= update.argument_bytes - bytes_of_matrices < 64
        assert update.temporary_bytes > 0


@pytest.mark.more
def test_the_update_of_a_model_on_a_mesh():
    updates = tpu_ahead_of_time.compile_updates("cut", CUT, mesh_of(CUT), "ours")
    (update,) = updates
    # An owner gets one parcel of both stacks, and sends one back.
    assert update.costs.collectives["all-to-all"].count == 2
    assert update.costs.collectives["all-to-all"].in_loops == 0
    # As compiled for CPU, with loops as often as the plan for TPU has them run there,
    # which is as often as that for CPU.
    assert update.even_flops < update.costs.flops < 2 * update.even_flops
    # A quarter of everything: gradients, parameters, and one or two moments.
    entries = {name: np.prod(shape) for name, shape in CUT.shapes.items()}
    expected = 4 * (3 * (entries["a"] + entries["b"]) + 4 * entries["embed"]) / 4
    assert 0 <= update.argument_bytes - expected < 64


def test_how_often_each_device_runs_its_loops():
    """Nine large matrices on four devices, and three small ones."""
    model = Model(
        {"large": (9, 128, 2**17), "small": (3, 16, 32)},
        {"large": P(None, "x"), "small": P(None, "x")},
        {"x": 4},
    )
    # The one with three of the large ones does none of the small ones.
    assert loops_of_devices(model, "tpu") == [
        {"stack0": 2, "stack1": 1},
        {"stack0": 3, "stack1": 0},
    ]
    # Three matrices and two are both iterated at once.
    alone = Model({"small": (5, 16, 32)}, {"small": P(None, "x")}, {"x": 2})
    assert loops_of_devices(alone, "tpu") == [{}]


def test_the_size_of_known_models():
    """Without norms and biases; Llama's without embeddings."""
    sizes = {
        name: sum(map(np.prod, model.shapes.values()))
        for name, model in models(4).items()
    }
    assert sizes["Llama-8B, FSDP 64"] == pytest.approx(6.98e9, rel=1e-3)
    assert sizes["Mixtral-like, expert 8 x FSDP 8"] == pytest.approx(46.4e9, rel=1e-2)
    assert sizes["Kimi K2, expert 128 x FSDP 8"] == pytest.approx(1.026e12, rel=1e-2)


def test_a_figure_may_grow_by_a_fifth():
    assert guards.within("x", 119.0, 100.0).startswith("ok: x")
    assert guards.within("x", 121.0, 100.0).startswith("too much: x")


@pytest.mark.parametrize(
    "is_required, word", [(True, "too much: no_such"), (False, "skipped: no_such")]
)
def test_what_is_not_installed_is_skipped_with_a_sentence(is_required, word):
    """But not in CI."""
    args = argparse.Namespace(required=is_required)
    (line,) = guards.checked("no_such", lambda: iter(["ok"]), args)
    assert line.startswith(word)
    assert [*guards.checked("json", lambda: iter(["ok"]), args)] == ["ok"]


def test_exchanges_come_before_all_loops_and_after_them():
    """As in `xxLLxx`; loops between exchanges wait for the slowest device each time."""
    program = """
ENTRY %main {
  %a = f32[8] all-to-all(%x), metadata={}
  %b = (s32[]) while(%y), metadata={op_name="jit(update)/stack0/while"}
  %c = f32[8] all-to-all-done(%b)
}
"""
    assert guards.order_of(program) == "xLx"


#: One product a second, one byte a second.
SLOW = Rates(products=1.0, copies=1.0, launch=0.5)

GEMM = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}'
)
PROGRAM = """
HloModule jit_f, is_scheduled=true

%cut (p0: f32[8,4], p1: f16[2,4]) -> (f16[2,4], f16[2,4]) {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f16[2,4]{1,0} parameter(1)
  %bitcast.1 = f32[8,4]{1,0} bitcast(%p0)
  %slice.1 = f32[2,4]{1,0} slice(%bitcast.1), slice={[0:2], [0:4]}
  %convert.1 = f16[2,4]{1,0} convert(%slice.1)
  %add.1 = f16[2,4]{1,0} add(%convert.1, %p1)
  ROOT %tuple.1 = (f16[2,4]{1,0}, f16[2,4]{1,0}) tuple(%convert.1, %add.1)
}

%put (p0: f32[8,4], p1: f32[2,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[2,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main (a: f32[8,4], b: f16[2,4], c: f32[2,4], i: s32[]) -> f16[2,2] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f16[2,4]{1,0} parameter(1)
  %c = f32[2,4]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %fusion.1 = (f16[2,4]{1,0}, f16[2,4]{1,0}) fusion(%a, %b), kind=kLoop, calls=%cut
  %fusion.2 = f32[8,4]{1,0} fusion(%a, %c, %i), kind=kLoop, calls=%put
  %one = f16[2,4]{1,0} get-tuple-element(%fusion.1), index=0
  %start = ((f16[2,4]), f16[2,4]) all-to-all-start(%one), dimensions={0}
  %gemm = (f16[2,2]{1,0}, s8[16]{0}) custom-call(%b, %b), GEMM
  %done = f16[2,4]{1,0} all-to-all-done(%start)
  %start.1 = ((f16[2,4]), f16[2,4]) all-to-all-start(%done), dimensions={0}
  %done.1 = f16[2,4]{1,0} all-to-all-done(%start.1)
  ROOT %result = f16[2,2]{1,0} get-tuple-element(%gemm), index=0
}
""".replace("GEMM", GEMM)


def test_work_of_a_program():
    work = work_by_kind(parse(PROGRAM), SLOW)
    # Of `a` a quarter is read; of what is updated in place nothing.
    cut = (32 + 16) + (16 + 16)
    put = (32 + 4) + 32
    assert work["elementwise"] == (2, 0, cut + put, cut + put + 1)
    # Both operands are one array, read once; the workspace counts.
    assert work["products"] == (1, 2 * 2 * 2 * 4, 16 + 8 + 16, 40.5)
    assert work["all-to-all"].launches == 2


def test_what_exchanges_send():
    assert exchanged_bytes(parse(PROGRAM)) == 16 + 16
