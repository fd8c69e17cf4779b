"""Eight CPU devices and one cache of compiled programs, set before JAX starts.

Workers of pytest-xdist and scripts inherit both from the process that started them. To
keep the programs from run to run, set `JAX_COMPILATION_CACHE_DIR` yourself.
"""

import functools
import gc
import importlib.metadata
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
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags.append("--xla_force_host_platform_device_count=8")
    if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
        # The compiler of fusions took two fifths of these tests' time. Newer versions
        # have no other, and XLA ends a process that names a flag it does not know.
        major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
        if (int(major), int(minor)) < (0, 11):
            flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)

# Traces are many objects and few circles: looking for these took 6 % of the time.
gc.set_threshold(20_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="warn of a test without the marker `more` that takes more CPU seconds; "
        "one that takes twice as many fails, since machines differ",
    )


def pytest_make_parametrize_id(val):
    """A case is named by what it is, where pytest would number it."""
    if val is None or isinstance(val, bool | int | float | str):
        return None
    said = getattr(val, "__name__", None) or repr(val)
    if said == "<lambda>":
        said = " ".join(val.__code__.co_names)
    # Workers have to agree: neither addresses nor the order of a set.
    unlike = "<" in said or ("{" in said and not isinstance(val, dict))
    return None if unlike or not said or len(said) > 80 else said


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Docstring examples are in the package alone: no file here is read for them."""
    return [found for found in (yield) if type(found) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Holds the default run to its time, where `--cpu-limit` asks for it."""
    result = yield
    limit = item.config.getoption("cpu_limit")
    seconds = cpu_seconds() - item.stash[STARTED]
    marked = {mark.name for mark in item.iter_markers()} & {"more", "slow", "always"}
    if limit and seconds > limit and not marked:
        said = f"{item.nodeid} takes {seconds:.1f} CPU seconds: mark it `more`"
        if seconds > 2 * limit:
            pytest.fail(said, pytrace=False)
        item.warn(pytest.PytestWarning(said))
    return result


STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


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
