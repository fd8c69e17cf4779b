"""The benchmark that compiles for TPU: on CPU, and with libtpu where there is one."""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tpu_ahead_of_time
from hlo_costs import Costs, Traffic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Model, models
from optax_main import RELEASED
from shares import even_flops, loops_of_devices
from tables import Report


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

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


def test_the_update_of_a_model_on_a_mesh():
    updates = tpu_ahead_of_time.compile_updates("cut", CUT, mesh_of(CUT), "ours")
    (update,) = updates
    assert update.costs.collectives["all-to-all"].count == 4
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


def test_how_often_each_device_runs_its_loops_where_nobody_gives_shardings():
    """Nine large matrices in order, and both small ones after the last of them."""
    model = Model(
        {"large": (9, 128, 2**17), "small": (2, 16, 32)},
        {"large": P(None, "x"), "small": P(None, "x")},
        {"x": 4},
    )
    assert loops_of_devices(model, "tpu", told=False) == [
        {"stack0": 0, "stack1": 1},
        {"stack0": 3, "stack1": 0},
    ]


def test_arithmetic_shared_out_evenly():
    standard = Model({"a": (5, 16, 16)}, {"a": P()}, {"x": 4})
    assert even_flops(standard, "cpu") == 5 * STEPS * SQUARE_STEP / 4


def test_arguments_are_placed():
    mesh = mesh_of(CUT)
    tx = tpu_ahead_of_time.optimizers(CUT.shapes, adam=CUT.adam)["ours"]
    grads, state, params = tpu_ahead_of_time.arguments(tx, CUT, mesh)
    assert params["b"].shape == grads["b"].shape == (5, 16, 32)
    for leaf in jax.tree.leaves((grads, state, params)):
        cut = [
            P(*spec)
            for name, spec in CUT.specs.items()
            if leaf.shape == CUT.shapes[name]
        ]
        assert leaf.sharding == NamedSharding(mesh, cut[0] if cut else P())


def test_models_hold_the_same_matrices_in_either_layout():
    sizes = {
        name: sum(map(np.prod, model.shapes.values()))
        for name, model in models(16).items()
    }
    gpt2, llama = (
        12 * 12 * 768**2,
        16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192),
    )
    one_chip = [size for name, size in sizes.items() if not models(16)[name].specs]
    assert one_chip == [gpt2, gpt2, llama, llama]
    assert {size for name, size in sizes.items() if "1B" in name} == {llama}


def test_the_size_of_known_models():
    """Without norms and biases; Llama's without embeddings."""
    sizes = {
        name: sum(map(np.prod, model.shapes.values()))
        for name, model in models(4).items()
    }
    assert sizes["Llama-8B, FSDP 64"] == pytest.approx(6.98e9, rel=1e-3)
    assert sizes["Mixtral-like, expert 8 x FSDP 8"] == pytest.approx(46.4e9, rel=1e-2)
    assert sizes["Kimi K2, expert 128 x FSDP 8"] == pytest.approx(1.026e12, rel=1e-2)


@pytest.mark.parametrize("name", [k for k, model in models(4).items() if model.specs])
def test_every_leaf_of_a_model_on_a_mesh_divides(name):
    model = models(4)[name]
    assert model.specs.keys() == model.shapes.keys()
    for leaf, spec in model.specs.items():
        for size, entry in zip(model.shapes[leaf], spec, strict=False):
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            assert size % np.prod([model.mesh[axis] for axis in names], dtype=int) == 0


def compiled(name, by, cycles):
    traffic = Traffic(1, 2 * 10**6, exposed=5 * 10**5)
    costs = Costs(3 * 10**9, cycles, {"all-gather": traffic})
    even = 2e9 if by == "ours" else None
    return tpu_ahead_of_time.Compiled(name, by, costs, even, 5_000_000, 6_000_000, 1.25)


UPDATES = [
    compiled(name, by, cycles)
    for name in SMALL
    for by, cycles in {"ours": 1_000_000, "optax": 4_000_000}.items()
]


def test_table_and_file(capsys, tmp_path):
    args = argparse.Namespace(json=tmp_path / "new" / "a.json")
    report = Report(args)
    table = report.table("title", tpu_ahead_of_time.COLUMNS)
    tpu_ahead_of_time.add_rows(table, UPDATES[:2])
    *_, ours, theirs = capsys.readouterr().out.splitlines()
    expected = (
        "separate | ours | 3 | 2 | 1.00 | 0.25 | 1 all-gather: 2 | 25% | 5 | 6 | 1.2"
    )
    assert ours == f"| {expected} |"
    assert theirs.startswith("| separate | optax | 3 | - | 4.00 | 1.00 |")
    report.write()
    (content,) = json.loads(args.json.read_text())["tables"]
    assert [row[4] for row in content["rows"]] == [1.0, 4.0]


ON_TPU = """
import jax, jax.numpy as jnp, tpu_ahead_of_time
from hlo_costs import hlo_costs
from jax.sharding import NamedSharding, PartitionSpec as P
from models import Model

small = {
    "one chip": Model({"a": (3, 256, 256), "b": (256, 512)}),
    "cut, on a mesh": Model(
        {"a": (3, 256, 256), "b": (6, 256, 512)},
        {"a": P(None, "x"), "b": P(None, "x")},
        {"x": 4},
    ),
}
mesh = tpu_ahead_of_time.tpu_mesh(small["one chip"])
x = jax.ShapeDtypeStruct((6, 256, 512), jnp.float32, sharding=NamedSharding(mesh, P()))
for function in (lambda x: x @ x.mT, lambda x: x[0] @ x[1].T @ x[2]):
    compiled = jax.jit(function).lower(x).compile()
    costs = hlo_costs(compiled.as_text())
    assert costs.flops == compiled.cost_analysis()["flops"] and costs.cycles > 0
tpu_ahead_of_time.models = lambda layers: small
tpu_ahead_of_time.main()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, not a TPU"
)
@pytest.mark.parametrize(
    ("chosen", "collectives"),
    [
        ([], "none"),
        (["--model", "cut", "none"], "4 all-to-all"),
        (["--model", "cut", "none", "--without-shardings"], "4 all-to-all"),
    ],
)
def test_for_tpu(tmp_path, chosen, collectives):
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "PYTHONPATH": str(BENCHMARKS),
    }
    subprocess.run(
        [sys.executable, "-c", ON_TPU, "--json", tmp_path / "a.json", *chosen],
        check=True,
        env=os.environ | environment,
    )
    (table,) = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert len(table["rows"]) == 3 and all(row[4] > 0 for row in table["rows"])
    ours = table["rows"][0]
    assert ours[6].startswith(collectives)
