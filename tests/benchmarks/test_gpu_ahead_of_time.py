"""What the benchmark that compiles for GPU counts in a program."""

from gpu_chips import Rates
from gpu_program import exchanged_bytes, work_by_kind
from hlo_program import parse


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
