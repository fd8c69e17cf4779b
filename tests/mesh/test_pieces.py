"""Stacks cut into pieces that travel one after the other, as for GPU, run on CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._mesh.on_mesh import orthogonalize_on_each_device
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.make_solver import make_solver


pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
SOLVER = make_solver("keller", 5, "auto", jnp.float32, "frobenius", "xla").on("gpu")
CASES = {  # axes of the mesh, shape, spec
    "rows": ({"fsdp": 8}, (24, 16, 40), P(None, "fsdp")),
    "columns": ({"fsdp": 8}, (24, 16, 40), P(None, None, "fsdp")),
    "both": ({"fsdp": 4, "tensor": 2}, (24, 40, 16), P(None, "fsdp", "tensor")),
    "copies": ({"data": 2, "fsdp": 4}, (24, 16, 40), P(None, "fsdp")),
    "uneven": ({"fsdp": 8}, (21, 16, 40), P(None, "fsdp")),
}


@pytest.fixture
def in_pieces(monkeypatch):
    monkeypatch.setattr(platforms, "PIECE_ENTRIES", 1)


def compiled(case, leaves=1):
    axes, shape, spec = CASES[case]
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    specs = [spec] * leaves
    on_device = functools.partial(
        orthogonalize_on_each_device,
        views=[matrix_view(shape, PLAIN)] * leaves,
        mesh=axes,
        specs=specs,
    )
    on_mesh = jax.shard_map(
        lambda x: on_device(SOLVER, x),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=False,
    )
    x = [
        jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
        for i in range(leaves)
    ]
    return jax.jit(on_mesh).lower(x).compile(), x


def count_exchanges(program):
    return len(re.findall(r" all-to-all(-start)?\(", program.as_text()))


@pytest.mark.parametrize("case", few(CASES, "both", "uneven"))
def test_pieces_change_nothing(in_pieces, case):
    program, leaves = compiled(case, leaves=2)
    for x, y in zip(leaves, program(leaves), strict=True):
        expected = jax.vmap(mc.newton_schulz)(x)
        np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("case", "leaves", "exchanges"),
    [("rows", 1, 2 * 3), ("rows", 4, 2 * platforms.PIECES["gpu"]), ("uneven", 1, 2)],
)
def test_number_of_exchanges(in_pieces, case, leaves, exchanges):
    """Three matrices for each device are three pieces; uneven shares are one."""
    program, _ = compiled(case, leaves)
    assert count_exchanges(program) == exchanges


def test_what_is_small_travels_at_once():
    program, _ = compiled("rows")
    assert count_exchanges(program) == 2
