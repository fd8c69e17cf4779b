"""Muon on the device: against torch and float64, by kernel, on a mesh, its dtypes."""

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from internals import solver
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from spectra import Case, synthetic

import muonclip_jax as mc

from .rounding import DTYPES, normal, own_dtype, platform, relative_error, units
from .rows import Checks, Compared, Outcome, worst


GOLDENS = Path(__file__).parents[2] / "tests/data"
VERSIONS = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "torch")
SPECTRA = ("Gaussian", "power law 1/k", "1 to 1e-4", "rank 10")


def muon_checks(width: int) -> Checks:
    """`width` is the short side of most matrices."""
    return {
        "devices": devices,
        "dtype of the iteration": dtype_of_iteration,
        "dtypes of updates": dtypes_of_updates,
        **golden_checks(),
        **newton_schulz_checks(width),
        **mesh_checks(width),
    }


def devices() -> str:
    found = jax.devices()
    memory = (found[0].memory_stats() or {}).get("bytes_limit")
    size = f"{memory / 1e9:.0f} GB for JAX on each" if memory else "memory unknown"
    return f"{len(found)} x {found[0].device_kind}, {size}; {', '.join(versions())}"


def versions() -> Iterable[str]:
    for name in VERSIONS:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def dtype_of_iteration() -> str:
    """The one whose result is that of the default, for results tell, not tables."""
    x = normal(0, 64, 200)
    default = mc.newton_schulz(x)
    taken = min(
        DTYPES.values(),
        key=lambda dtype: float(
            jnp.abs(mc.newton_schulz(x, dtype=dtype) - default).max()
        ),
    )
    if taken != own_dtype():
        raise ValueError(f"iterates in {taken}, not in {own_dtype()}")
    return f"ok: {taken}"


def dtypes_of_updates() -> str:
    for dtype in ("float32", "bfloat16"):
        params = {"w": normal(0, 64, 200).astype(dtype)}
        tx = mc.muon(1e-3)
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        found = {x.dtype.name for x in jax.tree.leaves((updates, state)) if x.ndim == 2}
        if found != {dtype}:
            raise ValueError(f"params of {dtype}, updates and momentum of {found}")
    return "ok: float32, bfloat16"


def golden_checks() -> Checks:
    """In float32 as exactly as on CPU, then as the platform iterates."""
    scales, momenta = ("original", "match_rms_adamw"), ("nesterov", "heavyball")
    dtypes = dict.fromkeys(["float32", own_dtype()])
    return {
        f"torch's trajectory, {scale}, {momentum}, {dtype}": functools.partial(
            against_torch, scale, momentum, dtype
        )
        for scale, momentum, dtype in itertools.product(scales, momenta, dtypes)
    }


def against_torch(scale: str, momentum: str, dtype: Any) -> Compared:
    """Each of five steps adds a direction whose entries may be off by 4 units."""
    recorded = np.load(GOLDENS / f"torch_muon_{scale}_{momentum}.npz")
    matches = scale == "match_rms_adamw"
    names = [name.split("_")[0] for name in recorded if name.endswith("grads")]
    params: Any = {name: jnp.asarray(recorded[f"{name}_params"][0]) for name in names}
    tx = mc.muon(
        0.02,
        beta=0.95,  # as recorded
        nesterov=momentum == "nesterov",
        consistent_rms=0.2 if matches else None,
        # Of float32 the form that asks for exact products.
        orthogonalizer=mc.NewtonSchulz(dtype=dtype, method="gram"),
    )
    state, error = tx.init(params), 0.0
    for t in range(5):
        grads = {name: jnp.asarray(recorded[f"{name}_grads"][t]) for name in names}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name in names:
            off = np.abs(params[name] - recorded[f"{name}_params"][t + 1])
            error = np.maximum(error, off.max())
    largest_scale = 0.2 * 64**0.5 if matches else 8**0.5  # of the matrix 8 x 64
    rounding = 0 if dtype == "float32" else units(4 * 5 * 0.02 * largest_scale, dtype)
    return Compared(float(error), 1e-5 + rounding)


def newton_schulz_checks(width: int) -> Checks:
    """Every spectrum in every shape; the row has the worst for its bound."""
    spectra_by_name = {
        name: matrix for name, matrix in synthetic().items() if name in SPECTRA
    }
    gaussian = spectra_by_name["Gaussian"]
    inputs = {
        **spectra_by_name,
        "entries of 1e-30": gaussian * np.float32(1e-30),
        "entries of 1e30": gaussian * np.float32(1e30),
    }
    return {
        f"newton_schulz, {method}, {name}": functools.partial(
            against_polynomial, method, shapes_of(matrix, width)
        )
        for method in ("standard", "gram")
        for name, matrix in inputs.items()
    } | {"newton_schulz, zeros": functools.partial(zeros_stay, width)}


def shapes_of(x: np.ndarray, width: int) -> list[np.ndarray]:
    """Wide, square, and tall with sides that no tile divides."""
    wide = x[:width, : 4 * width]
    return [wide, wide[:, :width], wide[: width - 5, : 2 * width - 3].T]


def against_polynomial(method: Any, matrices: list[np.ndarray]) -> Compared:
    def compare(x: np.ndarray) -> Compared:
        case = Case(x, "keller")
        y = np.asarray(mc.newton_schulz(jnp.asarray(x), method=method))
        return Compared(case.relative_error(y), polynomial_bound(case))

    return worst(map(compare, matrices))


def polynomial_bound(case: Case) -> float:
    """Rounding `X` makes noise in all directions, and each is lifted by its slope."""
    shares = case.singular / np.linalg.norm(case.singular)
    lifts = case.values / shares
    lift = np.sqrt(np.mean(lifts**2)) / np.linalg.norm(case.values)
    return units(8 + lift, own_dtype())


def zeros_stay(width: int) -> Compared:
    zeros = jnp.zeros((2, width, 2 * width))
    outputs = [mc.newton_schulz(zeros, method=m) for m in ("standard", "gram")]
    return Compared(float(np.max(np.abs(outputs))), 0.0)


def mesh_checks(width: int) -> Checks:
    return {
        f"sharded against one device, {kind.name} axes": functools.partial(
            sharded_against_one_device, kind, width
        )
        for kind in (AxisType.Auto, AxisType.Explicit)
    }


def sharded_against_one_device(kind: AxisType, width: int) -> Outcome:
    count = len(jax.devices())
    if count == 1:
        return "one device"
    mesh = jax.make_mesh((count,), ("fsdp",), axis_types=(kind,))
    rows = count * math.ceil(width / count)
    grads = {str(i): normal(i, rows, 2 * rows) for i in range(3)}
    grads["stack"] = normal(3, 5, rows, 2 * rows)
    shardings = {
        name: NamedSharding(mesh, P(*(None,) * (x.ndim - 2), "fsdp", None))
        for name, x in grads.items()
    }
    one = one_update(grads, None)
    many = one_update(jax.device_put(grads, shardings), shardings)
    errors = [relative_error(many[name], one[name]) for name in grads]
    return Compared(float(np.max(errors)), units(4, wire_dtype()))


def one_update(grads: Any, shardings: Any) -> Any:
    numbers = MuonDimensionNumbers(-2, -1)
    tx = mc.scale_by_muon(dimension_numbers=numbers, shardings=shardings)
    return jax.jit(tx.update)(grads, jax.jit(tx.init)(grads))[0]


def wire_dtype() -> str:
    return solver(platform()).wire_dtype(jnp.dtype("float32")).name
