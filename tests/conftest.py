"""Eight CPU devices, for pmap and shard_map; set before JAX starts."""

import os

import pytest


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
