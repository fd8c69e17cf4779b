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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import tpu_ahead_of_time  # noqa: E402
from hlo_costs import Costs, Traffic  # noqa: E402
from tables import Report  # noqa: E402


SMALL = {
    "separate": {"a": (16, 16), "b": (16, 32), "c": (32, 16)},
    "stacked": {"a": (3, 16, 16), "b": (3, 16, 32)},
}
STEPS = 5
SQUARE_STEP, WIDE_STEP = 3 * 2 * 16**3, 2 * 2 * 16 * 16 * 32 + 2 * 16**3


@pytest.mark.parametrize(
    ("preset", "flops"),
    [
        ("separate", STEPS * (SQUARE_STEP + 2 * WIDE_STEP)),
        ("stacked", STEPS * 3 * (SQUARE_STEP + WIDE_STEP)),
    ],
)
def test_the_update_of_a_preset(preset, flops):
    chip = SingleDeviceSharding(jax.devices()[0])
    updates = list(tpu_ahead_of_time.compile_updates(preset, SMALL[preset], chip))
    assert [update.implementation for update in updates] == ["ours", "optax"]
    assert updates[1].costs == Costs(flops=flops)
    # Gradients, momentum and parameters, and a few counters.
    bytes_of_matrices = 3 * 4 * sum(map(np.prod, SMALL[preset].values()))
    for update in updates:
        assert 0 <= update.argument_bytes - bytes_of_matrices < 64
        assert update.temporary_bytes > 0 and update.seconds > 0


def test_arguments_are_placed():
    chip = NamedSharding(Mesh(np.array(jax.devices()[1:2]), ("chip",)), PartitionSpec())
    tx = tpu_ahead_of_time.optimizers(SMALL["stacked"])["ours"]
    grads, state, params = tpu_ahead_of_time.arguments(tx, SMALL["stacked"], chip)
    assert params["b"].shape == grads["b"].shape == (3, 16, 32)
    leaves = jax.tree.leaves((grads, state, params))
    assert len(leaves) > 6 and {leaf.sharding for leaf in leaves} == {chip}


def test_presets_hold_the_same_matrices_in_either_layout():
    sizes = {
        name: sum(map(np.prod, shapes.values()))
        for name, shapes in tpu_ahead_of_time.presets(16).items()
    }
    gpt2, llama = (
        12 * 12 * 768**2,
        16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192),
    )
    assert list(sizes.values()) == [gpt2, gpt2, llama, llama]


def test_table_file_and_picture(capsys, tmp_path):
    updates = [
        tpu_ahead_of_time.Compiled(
            preset, name, Costs(3_000_000_000, cycles, {"all-gather": Traffic(1, 2)}),
            temporary_bytes=5_000_000, argument_bytes=6_000_000, seconds=1.25,
        )
        for preset in SMALL
        for name, cycles in {"ours": 1_000_000, "optax": 4_000_000}.items()
    ]  # fmt: skip
    args = argparse.Namespace(json=tmp_path / "new" / "a.json")
    report = Report(args)
    table = report.table("title", tpu_ahead_of_time.COLUMNS)
    tpu_ahead_of_time.add_rows(table, updates[:2])
    *_, ours, theirs = capsys.readouterr().out.splitlines()
    assert ours == "| separate | ours | 3 | 1.00 | 0.25 | 5 | 6 | 1.2 |"
    assert theirs.startswith("| separate | optax | 3 | 4.00 | 1.00 |")
    report.write()
    (content,) = json.loads(args.json.read_text())["tables"]
    assert [row[3] for row in content["rows"]] == [1.0, 4.0]
    tpu_ahead_of_time.draw(tmp_path / "new" / "a.png", "v5p:2x2x1", updates)
    assert (tmp_path / "new" / "a.png").stat().st_size > 5_000


ON_TPU = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import jax, jax.numpy as jnp, tpu_ahead_of_time
from hlo_costs import hlo_costs

chip = tpu_ahead_of_time.one_chip("v5p:2x2x1")
x = jax.ShapeDtypeStruct((6, 256, 512), jnp.float32, sharding=chip)
for function in (lambda x: x @ x.mT, lambda x: x[0] @ x[1].T @ x[2]):
    compiled = jax.jit(function).lower(x).compile()
    costs = hlo_costs(compiled.as_text())
    assert costs.flops == compiled.cost_analysis()["flops"] and costs.cycles > 0
tpu_ahead_of_time.presets = lambda layers: {SMALL!r}
tpu_ahead_of_time.main()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, not a TPU"
)
def test_for_tpu(tmp_path):
    subprocess.run(
        [sys.executable, "-c", ON_TPU, "--json", tmp_path / "a.json"],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"},
    )
    (table,) = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert len(table["rows"]) == 4 and all(row[3] > 0 for row in table["rows"])
