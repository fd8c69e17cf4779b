"""The benchmarks that compile for GPU: what they read, and the plan where they can."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import gpu_ahead_of_time
import gpu_program
import pytest
from gpu_chips import Chip, CHIPS, target_of
from gpu_program import exchanged_bytes, work_by_kind
from hlo_program import parse


SCRIPT = pathlib.Path(gpu_ahead_of_time.__file__)

#: One product a second, one byte a second.
SLOW = Chip("slow", 9, 1, 1.0, 1, 1, 1, products=1.0, copies=1.0)

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


def test_work_of_a_program(monkeypatch):
    monkeypatch.setattr(gpu_program, "LAUNCH_SECONDS", 0.5)
    work = work_by_kind(parse(PROGRAM), SLOW)
    # Of `a` a quarter is read; of what is updated in place nothing.
    cut = (32 + 16) + (16 + 16)
    put = (32 + 4) + 32
    assert work["elementwise"] == (2, 0, cut + put, cut + put + 1)
    # Both operands are one array, read once; the workspace counts.
    assert work["products"] == (1, 2 * 2 * 2 * 4, 16 + 8 + 16, 40.5)
    assert work["all-to-all"].launches == 2


def test_work_of_a_product_that_writes_its_part_of_a_stack():
    program = """
%put (p0: f16[2,4], p1: f16[8,2], p2: s32[]) -> (f16[8,2], s8[16]) {
  %p0 = f16[2,4]{1,0} parameter(0)
  %p1 = f16[8,2]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %gemm = (f16[2,2]{1,0}, s8[16]{0}) custom-call(%p0, %p0), GEMM
  %out = f16[2,2]{1,0} get-tuple-element(%gemm), index=0
  %space = s8[16]{0} get-tuple-element(%gemm), index=1
  %dus = f16[8,2]{1,0} dynamic-update-slice(%p1, %out, %p2, %zero)
  ROOT %tuple = (f16[8,2]{1,0}, s8[16]{0}) tuple(%dus, %space)
}

ENTRY %main (a: f16[2,4], b: f16[8,2], i: s32[]) -> (f16[8,2], s8[16]) {
  %a = f16[2,4]{1,0} parameter(0)
  %b = f16[8,2]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = (f16[8,2]{1,0}, s8[16]{0}) fusion(%a, %b, %i), kind=kCustom, calls=%put
}
""".replace("GEMM", GEMM)
    work = work_by_kind(parse(program), SLOW)
    # The product, its operand, index and workspace, and of the stack what is written.
    assert work["products"][:3] == (1, 2 * 2 * 2 * 4, 16 + 4 + 16 + 8)
    assert work.keys() == {"products"}


def test_what_exchanges_send():
    assert exchanged_bytes(parse(PROGRAM)) == 16 + 16


def test_chips_as_the_compiler_wants_them():
    text = target_of(CHIPS["b200"])
    assert "cuda_compute_capability { major: 10 }" in text
    assert 'name: "NVIDIA B200"' in text and text.count("{") == text.count("}")


#: The most of each column of a plan, of separate leaves and of stacked ones, which go
#: through a loop in place: on one GPU, and on eight.
COLUMNS = ("launches", "TFLOP", "GB, elementwise", "least ms", "temporaries, GB")
CEILINGS = {
    "h200": {
        (1, "216 leaves"): (2500, 119, 333, 233, 0.9),
        (1, "stacked"): (1280, 119, 333, 231, 13.3),
        (8, "216 leaves"): (600, 15, 49, 31, 1.7),
        (8, "stacked"): (170, 15, 44, 29.5, 1.4),
    },
}


@pytest.fixture(scope="module", params=list(CEILINGS))
def compiled(request, tmp_path_factory):
    """A chip, and the rows of its table."""
    if not is_installed("jax_plugins.xla_cuda13"):
        pytest.skip("needs jax-cuda13-plugin, not a GPU; .ci/gpu installs it")
    file = tmp_path_factory.mktemp("runs") / "plans.json"
    chip = request.param
    subprocess.run(
        [sys.executable, SCRIPT, "--chips", chip, "--json", file],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    tables = json.loads(file.read_text())["tables"]
    [table] = tables
    return chip, rows_of(table)


def is_installed(name):
    parent, _ = name.split(".")
    return bool(importlib.util.find_spec(parent) and importlib.util.find_spec(name))


def rows_of(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_the_stage_of_kimi_k2(compiled):
    """The plan that the compiler makes keeps to what was reached once."""
    chip, updates = compiled
    assert len(updates) == 2 * len(CEILINGS[chip])
    for row in updates:
        leaves, _ = row["params"].split(", ")
        ceilings = CEILINGS[chip][int(row["GPUs"]), leaves]
        for column, most in zip(COLUMNS, ceilings, strict=True):
            assert 0 < row[column] <= most, (column, row)
