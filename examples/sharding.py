"""Shardings of the arrays of model.py's transformer on a mesh of two axes."""

import argparse
import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# Heads and hidden units over "tensor", the width over "fsdp", small leaves everywhere.
# Momenta end in the paths of their parameters, so the rules place those too.
RULES = (
    (r"(query|key|value)/kernel", P("fsdp", "tensor", None)),
    (r"(query|key|value)/bias", P("tensor", None)),
    (r"out/kernel", P("tensor", None, "fsdp")),
    (r"up/kernel", P("fsdp", "tensor")),
    (r"up/bias", P("tensor")),
    (r"down/kernel", P("tensor", "fsdp")),
    (r"embedding", P(None, "fsdp")),
    (r"head/kernel", P("fsdp", None)),
)
BATCH = P("fsdp")


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf of the parameters, or of a state that holds them."""
    return jax.tree.map_with_path(
        lambda path, _: NamedSharding(mesh, _spec(path)), tree
    )


def _spec(path: tuple[Any, ...]) -> P:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, spec in RULES:
        if re.search(f"{pattern}$", name):
            return spec
    return P()


def mesh_shape(args: argparse.Namespace, devices: int) -> tuple[int, int]:
    """Sizes of "fsdp" and "tensor"; ends the program where they fit nothing."""
    tensor = args.tensor
    fsdp = args.fsdp or max(1, devices // tensor)
    if fsdp * tensor != devices:
        raise SystemExit(
            f"--fsdp {fsdp} times --tensor {tensor} is not the number of devices, "
            f"{devices}"
        )
    check_divides("heads", args.heads, "tensor", tensor)
    check_divides("width", args.width, "fsdp", fsdp)
    check_divides("width", args.width, "heads", args.heads)
    check_divides("batch-size", args.batch_size, "fsdp", fsdp)
    return fsdp, tensor


def check_divides(name: str, size: int, by: str, parts: int) -> None:
    if size % parts:
        raise SystemExit(f"--{name} {size} is not divisible by --{by} {parts}")


def make_mesh(shape: tuple[int, int]) -> Mesh:
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=auto)
