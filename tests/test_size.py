"""How much of the package one update goes through: what somebody has to read."""

import subprocess
import sys

import pytest
from helpers import script_environment


COUNT = """
import os, sys
import jax.numpy as jnp
import muonclip_jax as mc

root = os.path.dirname(mc.__file__)
params = {"w": jnp.ones((24, 64))}
tx = mc.muon(1e-3)
state, entered = tx.init(params), set()


def note(frame, event, argument):
    code = frame.f_code
    is_named = not code.co_name.startswith("<")
    if event == "call" and is_named and code.co_filename.startswith(root):
        entered.add((code.co_filename, code.co_qualname))


sys.setprofile(note)
tx.update(params, state, params)
sys.setprofile(None)
print(len(entered), len({file for file, _ in entered}))
"""

#: Functions and files of an eager update of one leaf on one CPU device.
MOST = 150, 28


@pytest.mark.more
def test_functions_that_one_update_enters():
    """In a process of its own: what a cache holds is not entered."""
    program = [sys.executable, "-c", COUNT]
    printed = subprocess.run(
        program, env=script_environment(), check=True, capture_output=True, text=True
    ).stdout
    functions, files = map(int, printed.split())
    assert 0 < functions <= MOST[0] and 0 < files <= MOST[1]
