"""The candidate for NVIDIA Hopper, interpreted on a CPU and compiled for sm_90a."""

import importlib.util
import itertools
import json

import accelerator
import guards
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import symmetric_ahead_of_time
from first_contact import rows, symmetric, times
from first_contact.symmetric_kernel import BLOCK, place, symmetric_product, TILE
from gpu_compiler import process
from helpers import normal
from internals import interpreted


def operands(has_sum):
    """`y = x d` with powers of two in d is exact, so that `x y'` is symmetric."""
    if not has_sum:
        x = normal(0, 1, 3 * BLOCK, 64, dtype=jnp.float16)
        return x, x, None
    x = normal(1, 2, 2 * BLOCK, 128, dtype=jnp.float16)
    c = normal(2, 2, 2 * BLOCK, 2 * BLOCK, scale=8)
    return x, x * jnp.exp2(jnp.arange(128) % 3).astype(x.dtype), symmetrized(c)


def symmetrized(c):
    return (c + c.mT).astype(jnp.float16)


@pytest.mark.more
@pytest.mark.parametrize(
    ("has_sum", "alpha", "in_flight"), [(False, 1.0, 0), (True, -1.75, 1)]
)
def test_interpreted_against_float64(has_sum, alpha, in_flight):
    x, y, c = operands(has_sum)
    found = symmetric_product(
        x,
        y,
        c,
        alpha=alpha,
        ahead=2,
        in_flight=in_flight,
        multiprocessors=2,
        interpret=interpreted(),
    )
    assert found.dtype == jnp.float16
    found, x, y = (np.asarray(each, np.float64) for each in (found, x, y))
    c = np.zeros(found.shape) if c is None else np.asarray(c, np.float64)
    exact = alpha * (x @ y.mT) + c
    # Sums of n terms in float32, times alpha, and c; then half a unit of float16.
    terms = abs(alpha) * (abs(x) @ abs(y).mT) + abs(c)
    in_float32 = (x.shape[-1] + 2) * np.finfo(np.float32).eps * terms
    half_a_unit = np.finfo(np.float16).eps / 2
    assert (
        abs(found - exact) <= half_a_unit * (abs(exact) + in_float32) + in_float32
    ).all()
    block = np.arange(found.shape[-1]) // BLOCK
    is_off_diagonal = block[:, None] != block
    assert (found == found.mT)[:, is_off_diagonal].all()


@pytest.mark.parametrize("blocks", [1, 2, 3, 16])
def test_every_tile_below_the_diagonal_has_one_turn(blocks):
    count = 2 * blocks * (blocks + 1)
    matrix, row, column, is_below = place(jnp.arange(count), blocks)
    places = np.stack([matrix, row, np.broadcast_to(column, count)], axis=1)
    expected = {
        (matrix, i * TILE, j * BLOCK)
        for matrix, i in itertools.product(range(2), range(2 * blocks))
        for j in range(i // 2 + 1)
    }
    assert len(places) == len(expected) and set(map(tuple, places)) == expected
    np.testing.assert_array_equal(is_below, row // BLOCK != column // BLOCK)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 384, 64), "float16"), ((1, 256, 96), "float16"), ((1, 256, 64), "float32")],
)
def test_what_no_tile_fits_is_refused(shape, dtype):
    x = jnp.zeros(shape, dtype)
    with pytest.raises(ValueError, match="in multiples of 256 and n of 64"):
        symmetric_product(x, x)


PTXAS = """\
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are \
serialized due to insufficient register resources for the wgmma pipeline in line 912
ptxas warning : Registers are spilled to local memory in function 'f', 4340 bytes
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    2816 bytes stack frame, 4340 bytes spill stores, 4412 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
PTX = ".visible .entry f(\n)\n.maxntid 384, 1, 1\n"
PASSES = "dynamic_shared_memory_size %c229456_i32 args(%1)\n" * 2


def test_a_report_of_a_kernel_that_spills():
    """ptxas of tiles of 256 x 256, which need 512 registers of a thread."""
    found = symmetric_ahead_of_time.resources(PTXAS, PTX, PASSES)
    assert found[:3] == (168, 384, 4340 + 4412) and found.shared_bytes == 229_456
    assert found.warnings[0] == "C7511" and "spilled" in found.warnings[1]
    assert guards.held("x x'", found).startswith("too much: ")
    right = found._replace(spilled_bytes=0, warnings=())
    assert guards.held("x x'", right).startswith("ok: ")
    for worse in ({"warnings": ("C7517",)}, {"shared_bytes": 232_449}):
        assert guards.held("x x'", right._replace(**worse)).startswith("too much: ")
    with pytest.raises(ValueError, match="0 different matches of 'Used"):
        symmetric_ahead_of_time.resources(PTXAS.replace("Used", ""), PTX, PASSES)


@pytest.mark.more
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="NVIDIA's compiler is not installed; in CI `guards.py --required` asks it",
)
def test_compiled_for_hopper_it_neither_spills_nor_waits():
    with process() as executor:
        for name in symmetric_ahead_of_time.PRODUCTS:
            found = executor.submit(symmetric_ahead_of_time.compiled, name).result()
            assert found.threads == 384
            assert guards.held(name, found).startswith("ok: ")


def test_without_a_card_it_says_so(tmp_path):
    file = tmp_path / "candidates.json"
    arguments = ["--candidates", "--tiny", "--only", "symmetric", "--json", str(file)]
    assert accelerator.main(arguments) == 0
    right, _, fast = (table["rows"] for table in json.loads(file.read_text())["tables"])
    assert len(right) == 4 and {row[1] for row in right} == {"no Hopper GPU here"}
    assert [row[0] for row in fast] == ["symmetric kernel: no Hopper GPU here"]


def half(x, y, c, alpha, in_flight=0):
    """As a card's kernel has to be, by other means."""
    wide = alpha * jnp.matmul(x, y.mT, preferred_element_type=jnp.float32)
    return jnp.tril((wide if c is None else wide + c).astype(x.dtype))


def whole(*operands, **settings):
    found = half(*operands, **settings)
    return found + jnp.tril(found, -1).mT


@pytest.mark.parametrize(
    ("kernel", "outcome"), [(whole, "ok"), (half, rows.FAILED)], ids=["right", "wrong"]
)
def test_what_a_card_checks(monkeypatch, kernel, outcome):
    monkeypatch.setattr(symmetric, "missing", lambda: None)
    monkeypatch.setattr(symmetric, "by_kernel", jax.jit(kernel, static_argnums=3))
    found = [run() for run in symmetric.symmetric_checks(1).values()]
    assert len(found) == 4
    assert {x.error <= x.bound for x in found} == {outcome == "ok"}


@pytest.mark.more
def test_what_a_card_times(monkeypatch):
    monkeypatch.setattr(symmetric, "missing", lambda: None)
    monkeypatch.setattr(symmetric, "by_kernel", whole)
    monkeypatch.setattr(symmetric, "ROWS", (32,))
    monkeypatch.setattr(symmetric, "COUNT", 2)
    (part,) = symmetric.symmetric_parts(times.Times(times.TINY)).values()
    found = [row.name for row in part()]
    start = "of (2, 32, 128), wanted 1.2 times, against"
    assert found[0] == f"symmetric kernel, gram {start} the plain product"
    assert found[1] == f"symmetric kernel, gram {start} the same, a product in flight"
    assert len(found) == 4
