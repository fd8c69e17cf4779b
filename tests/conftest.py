"""Eight CPU devices and one cache of compiled programs, set before JAX starts.

Workers of pytest-xdist and scripts inherit both from the process that started them. To
keep the programs from run to run, set `JAX_COMPILATION_CACHE_DIR` yourself.
"""

import collections
import functools
import os
import tempfile

import pytest


if "PYTEST_XDIST_WORKER" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="muonclip_jax")  # gone at the end
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _programs.name)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers fill the cores
    # Most programs of tests take longer to compile than to run. Where `.ci/run` looks
    # at numbers it optimizes them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_force_host_platform_device_count=8"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items):
    """Marks `more` what repeats values of parameters in another combination.

    Of a product of parameters, `pytest` alone runs cases that have each value of each
    parameter once; `.ci/run` runs them all.
    """
    products = collections.defaultdict(list)
    for item in items:
        marked = any(item.iter_markers("more")) or any(item.iter_markers("slow"))
        if hasattr(item, "callspec") and not marked:
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        left = set().union(*map(values_of, cases))
        while left:  # the usual greedy cover
            best = max(cases, key=lambda case: len(left & values_of(case)))
            left -= values_of(best)
            cases.remove(best)
        for case in cases:
            case.add_marker(pytest.mark.more)


def values_of(case) -> set:
    """By `parametrize`, of one name or several that vary together, and by fixture."""
    params = case.callspec.params
    together = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        together.append([name.strip() for name in names])
    together += [[name] for name in params.keys() - set().union(*together)]
    return {(*names, *(id(params[name]) for name in names)) for names in together}


@functools.cache
def has_float16() -> bool:
    """Whether XLA compiles float16 here: without F16C it calls what nobody links."""
    import jax
    import jax.numpy as jnp

    try:
        jax.jit(lambda x: x.astype(jnp.float32))(jnp.ones(4, jnp.float16))
    except jax.errors.JaxRuntimeError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skips float16 where `.ci/run` takes F16C away, and only what asks for it."""
    try:
        return (yield)
    except Exception as error:
        if "Failed to materialize symbols" in str(error) and not has_float16():
            pytest.skip("no float16 by XLA on a processor without F16C")
        raise


@pytest.fixture(scope="module")
def fast_compilation():
    """Where nobody looks at numbers: fast also when `.ci/run` asks to optimize."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


_MORE = [
    pytest.param(name, marks=pytest.mark.more)
    for name in ("FrozenDict", "Linen boxes", "NNX variables")
]


@pytest.fixture(params=["plain", *_MORE])
def every_container(request, monkeypatch):
    """Params in each of the containers that libraries pass on, for a whole file."""
    import containers

    containers.passed_in(request.param, monkeypatch)
