"""Processes that save with Orbax, and others on another mesh that restore."""

import multiprocessing
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, script_environment

import muonclip_jax as mc


SCRIPT = pathlib.Path(__file__).with_name("saved_by_processes.py")


def run(folder, what, processes, devices):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = script_environment() | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    # The programs of several processes are not in the cache, which warns of that.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, address, *map(str, arguments)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in (
            (processes, index, devices, folder, what) for index in range(processes)
        )
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return dict(np.load(folder / f"{what}.npz"))


@pytest.mark.more
@pytest.mark.parametrize("other", [(1, 2), (2, 4)])
def test_restored_on_another_mesh(tmp_path, other):
    saved = run(tmp_path, "save", 2, 2)
    restored = run(tmp_path, "restore", *other)
    assert saved.keys() == restored.keys()
    for name, x in saved.items():
        y = restored[name]
        if name.startswith("[0]"):
            assert x.tobytes() == y.tobytes() and x.dtype == y.dtype, name
        else:  # A matrix is iterated whole, by one device, whatever the mesh is.
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-6 * np.abs(x).max())


def tiny_update(queue=None):
    params = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    tx = mc.muon(0.1, weight_decay=0.0)
    updates, _ = tx.update(params, tx.init(params), params)
    found = np.asarray(updates["w"])
    if queue is not None:
        queue.put(found)
    return found


@pytest.mark.more
def test_spawned():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=tiny_update, args=(queue,))
    child.start()
    found = queue.get(timeout=300)
    child.join()
    assert child.exitcode == 0
    np.testing.assert_array_equal(found, tiny_update())


FORKED = """
import os, warnings
import muonclip_jax as mc

warnings.simplefilter("ignore")  # JAX warns of every fork
pid = os.fork()
import numpy as np
params = {"w": np.ones((3, 4), np.float32)}
tx = mc.muon(0.1)
updates, _ = tx.update(params, tx.init(params), params)
assert np.isfinite(np.asarray(updates["w"])).all()
if pid:
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
"""


@pytest.mark.more
def test_forked_before_anything_was_computed():
    """To import the package starts no thread of JAX, which a fork would lose."""
    environment = script_environment() | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
