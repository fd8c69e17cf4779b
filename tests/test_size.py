"""How much of the package one update goes through: what somebody has to read."""

import subprocess
import sys

import pytest
from helpers import script_environment


COUNT = """
import os, sys
import jax, jax.numpy as jnp
import muonclip_jax as mc
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

root, entered = os.path.dirname(mc.__file__), set()


def note(frame, event, argument):
    code = frame.f_code
    is_named = not code.co_name.startswith("<")
    if event == "call" and is_named and code.co_filename.startswith(root):
        entered.add((code.co_filename, code.co_qualname))


def count(update, *arguments):
    sys.setprofile(note)
    update(*arguments)
    sys.setprofile(None)
    print(len(entered), len({file for file, _ in entered}))
"""

ONE_DEVICE = """
params = {"w": jnp.ones((24, 64))}
tx = mc.muon(1e-3)
count(tx.update, params, tx.init(params), params)
"""

MESH = """
mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
sharded = NamedSharding(mesh, PartitionSpec("data"))
params = {"w": jax.ShapeDtypeStruct((24, 64), jnp.float32, sharding=sharded)}
tx = mc.muon(1e-3, shardings=sharded)
state = jax.eval_shape(tx.init, params)
count(jax.eval_shape, tx.update, params, state, params)
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "update, functions, files",
    [
        # An eager update of one leaf on one CPU device, and one that is traced with
        # shardings given. Both reached when written: to go beyond is to add a concept.
        pytest.param(ONE_DEVICE, 106, 23, id="one device"),
        pytest.param(MESH, 166, 28, id="a mesh"),
    ],
)
def test_functions_that_one_update_enters(update, functions, files):
    """In a process of its own: what a cache holds is not entered."""
    printed = subprocess.run(
        [sys.executable, "-c", COUNT + update],
        env=script_environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    entered = tuple(map(int, printed.split()))
    assert entered > (0, 0) and entered[0] <= functions and entered[1] <= files
