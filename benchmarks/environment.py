"""One line on where a figure comes from: commit, versions, machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax


_NOT_RESULTS = [
    ":/",
    ":(top,exclude)benchmarks/results",
    ":(top,exclude)benchmarks/evidence/results",
    ":(top,exclude)benchmarks/evidence/experiments.md",
    ":(top,exclude)benchmarks/report.md",
]


def environment() -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "flax", "optax")
    )
    device = jax.devices()[0].device_kind
    machine = f"{os.cpu_count()} cores of {_processor()}, {device}"
    return (
        f"commit {_commit()}; Python {platform.python_version()}, {versions}; {machine}"
    )


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True
        )
        status = [*git, "status", "--porcelain", "-uno", "--"]
        dirty = subprocess.check_output([*status, *_NOT_RESULTS], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + (" with changes" if dirty else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
