"""Eight CPU devices and one cache of compiled programs, set before JAX starts.

Workers of pytest-xdist and scripts inherit both from the process that started them. To
keep the programs from run to run, set `JAX_COMPILATION_CACHE_DIR` yourself.
"""

import os
import tempfile

import pytest


if "PYTEST_XDIST_WORKER" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="muonclip_jax")  # gone at the end
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _programs.name)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers fill the cores
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_force_host_platform_device_count=8"
    )


@pytest.fixture(scope="module")
def fast_compilation():
    """Programs that take longer to compile than to run."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.fixture(params=["plain", "FrozenDict", "Linen boxes", "NNX variables"])
def every_container(request, monkeypatch):
    """Params in each of the containers that libraries hand over, for a whole file."""
    import containers

    containers.hand_over_in(request.param, monkeypatch)
