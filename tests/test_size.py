"""How much of the package one task goes through: what somebody has to read."""

import os
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

HEADS = """
import jax
from internals import Heads, OwnedLeaf, Part

carriers = Heads, OwnedLeaf, Part


def says_heads(value, depth=3):
    if isinstance(value, carriers):
        return True
    inner = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, (dict, list, tuple)) and depth
    return bool(is_nested) and any(says_heads(x, depth - 1) for x in inner)


def note(frame, event, argument):
    code = frame.f_code
    if code.co_name.startswith("<") or not code.co_filename.startswith(root):
        return
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [frame.f_locals.get(x) for x in given] if event == "call" else [argument]
    if event in ("call", "return") and any(map(says_heads, values)):
        entered.add((code.co_filename, code.co_qualname))


def loss(params, x):
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[n]) for n in "qkv")
    return jnp.sum(jax.nn.softmax(q @ k.mT) @ v)


def recorded_and_clipped(params, x):
    _, stats = mc.record_attention(loss)(params, x)
    mc.clip_qk(params, stats, 1.0, model=reading)


params, x = {n: jnp.ones((8, 2, 4)) for n in "qkv"}, jnp.ones((3, 8))
reading = mc.read_model(loss, params, x)
count(recorded_and_clipped, params, x)
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "task, functions, files",
    [
        # An eager update of one leaf on one CPU device, and one that is traced with
        # shardings given. Both reached when written: to go beyond is to add a concept.
        pytest.param(ONE_DEVICE, 90, 19, id="one device"),
        pytest.param(MESH, 130, 22, id="a mesh"),
        # From a recorded loss to scaled weights: those that are given, or give, what
        # says which entry is of which head.
        pytest.param(HEADS, 24, 11, id="heads"),
    ],
)
def test_functions_that_are_entered(task, functions, files):
    """In a process of its own: what a cache holds is not entered."""
    tests = os.pathsep.join(
        [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    )
    printed = subprocess.run(
        [sys.executable, "-c", COUNT + task],
        env=script_environment() | {"PYTHONPATH": tests},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    entered = tuple(map(int, printed.split()))
    assert entered > (0, 0) and entered[0] <= functions and entered[1] <= files
