"""Files of tests are imported by every worker before its first test."""

import os

import pytest
from helpers import ROOT, run_script


IMPORTS = """
import importlib, os, sys
import chex, flax.linen, flax.nnx, jax, jax.numpy as jnp, optax, pytest, muonclip_jax
compiled = []
def listen(event, seconds, **_):
    if "backend_compile" in event:
        compiled.append(event)

jax.monitoring.register_event_duration_secs_listener(listen)
jax.jit(jnp.sin)(1.0)
assert compiled  # so it is seen
for name in sys.argv[1:]:
    sys.path.insert(0, os.path.dirname(name))
    compiled.clear()
    importlib.import_module(os.path.basename(name).removesuffix(".py"))
    print(name, len(compiled))
"""


@pytest.mark.more
def test_no_file_of_tests_computes_at_import(tmp_path, monkeypatch, pytestconfig):
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folders = [ROOT, *pytestconfig.getini("pythonpath")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [x for x in files if "libraries" not in x.parts]
    printed = run_script(script, *files).stdout.splitlines()
    found = dict(map(str.split, printed))
    assert len(found) == len(files)
    # Arrays of ones are a program each, of milliseconds.
    assert {name: n for name, n in found.items() if int(n) > 30} == {}
