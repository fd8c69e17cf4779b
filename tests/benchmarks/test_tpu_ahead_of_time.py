"""The benchmark that compiles for TPU, on CPU: costs, loops and sizes."""

import jax
import numpy as np
import pytest
import tpu_ahead_of_time
from hlo_costs import Costs
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


def test_the_size_of_known_models():
    """Without norms and biases; Llama's without embeddings."""
    sizes = {
        name: sum(map(np.prod, model.shapes.values()))
        for name, model in models(4).items()
    }
    assert sizes["Llama-8B, FSDP 64"] == pytest.approx(6.98e9, rel=1e-3)
    assert sizes["Mixtral-like, expert 8 x FSDP 8"] == pytest.approx(46.4e9, rel=1e-2)
    assert sizes["Kimi K2, expert 128 x FSDP 8"] == pytest.approx(1.026e12, rel=1e-2)
