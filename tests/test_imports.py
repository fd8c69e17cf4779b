"""Files of tests are imported by every worker before its first test: fast, then."""

import os
import pathlib

import pytest
from helpers import ROOT, run_script


IMPORTS = """
import importlib, os, sys, time
import chex, flax.linen, flax.nnx, jax, optax, pytest, muonclip_jax
jax.devices()
for name in sys.argv[1:]:
    sys.path.insert(0, os.path.dirname(name))
    began = time.process_time()
    importlib.import_module(os.path.basename(name).removesuffix(".py"))
    print(name, time.process_time() - began)
"""


@pytest.mark.more
def test_no_file_of_tests_computes_at_import(tmp_path, monkeypatch):
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folders = [str(ROOT / x) for x in (".", "tests", "benchmarks", "examples")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [x for x in files if "libraries" not in x.parts]
    printed = run_script(script, *files).stdout.splitlines()
    seconds = {pathlib.Path(k): float(v) for k, v in map(str.split, printed)}
    assert len(seconds) == len(files)
    assert {k: v for k, v in seconds.items() if v > 0.5} == {}
