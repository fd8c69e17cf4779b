"""The private names that tests and benchmarks use: no other file of theirs has any."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import muonclip_jax._attention.max_logits as max_logits_module
import muonclip_jax._muon.muon as muon_module
import muonclip_jax._muon.scale_by_muon as scale_module
import muonclip_jax._muonclip as muonclip_module
from muonclip_jax._attention.splash import _statistic as splash_statistic
from muonclip_jax._layout.layout import read_layout
from muonclip_jax._matrices.stacks import matrix_view, MatrixView, plan_stacks, unstack
from muonclip_jax._mesh.block_layout import (
    axis_roles,
    AxisRoles,
    block_layout,
    local_view,
)
from muonclip_jax._mesh.by_constraint import (
    divide_stacks,
    orthogonalize_by_constraint,
    stacks_of,
)
from muonclip_jax._mesh.exchange import Exchange, EXCHANGES
from muonclip_jax._mesh.on_mesh import (
    orthogonalize_on_mesh,
    plan_exchanges,
    SharedStack,
)
from muonclip_jax._mesh.ownership import (
    assign_consecutive,
    assign_owners,
    groups_of,
    MOST_SLOTS,
    Work,
)
from muonclip_jax._model.owned_leaf import OwnedLeaf
from muonclip_jax._muon import eight_bits
from muonclip_jax._muon.momentum import _accumulate as accumulate
from muonclip_jax._muon.orthogonalize import on_one_device, orthogonalize
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.coefficients import check_schedule, resolve_schedule
from muonclip_jax._newton_schulz.platforms import Kernel, Platform, PLATFORMS
from muonclip_jax._newton_schulz.polar import cut_into_passes, METHODS
from muonclip_jax._newton_schulz.precondition import norm_by_hypotenuses
from muonclip_jax._newton_schulz.solver import make_solver, Solver
from muonclip_jax._parameters import paths
from muonclip_jax._parameters.dimension_numbers import resolve_verdicts, views_of
from muonclip_jax._qk_clip.heads import gammas
from muonclip_jax._reading.attention import Part
from muonclip_jax._reading.calls import call_of
from muonclip_jax._reading.facts import Facts
from muonclip_jax._reading.graph import Graph
from muonclip_jax._reading.heads import Heads, heads_of
from muonclip_jax._reading.primitives import moves
from muonclip_jax._reading.softmaxes import Softmaxes


# JAX 0.8 and 0.9 lack what the kernel is made of.
if jax.__version_info__ >= (0, 10):
    from muonclip_jax._newton_schulz import hopper as hopper_kernel
else:
    hopper_kernel = None


__all__ = [
    "EXCHANGES",
    "METHODS",
    "MOST_SLOTS",
    "AxisRoles",
    "Exchange",
    "Facts",
    "Graph",
    "Heads",
    "Kernel",
    "MatrixView",
    "OwnedLeaf",
    "Part",
    "Platform",
    "SharedStack",
    "Softmaxes",
    "Solver",
    "Work",
    "accumulate",
    "assign_consecutive",
    "assign_owners",
    "axis_roles",
    "block_layout",
    "call_of",
    "check_schedule",
    "cudnn",
    "cut_into_passes",
    "divide_stacks",
    "eight_bits",
    "gammas",
    "groups_of",
    "heads_of",
    "hopper_kernel",
    "local_view",
    "matrix_view",
    "matrix_views",
    "max_logits_module",
    "moves",
    "muon_module",
    "muonclip_module",
    "norm_by_hypotenuses",
    "on_one_device",
    "orthogonalize",
    "orthogonalize_by_constraint",
    "orthogonalize_on_mesh",
    "paths",
    "plan_exchanges",
    "plan_stacks",
    "platforms",
    "resolve_schedule",
    "scale_module",
    "splash_statistic",
    "stacks_of",
    "unstack",
]


def solver(
    platform: str | None = None,
    *,
    ns_coeffs: Any = "keller",
    ns_steps: int = 5,
    method: Any = "auto",
    dtype: Any = None,
    preconditioning: Any = "frobenius",
    kernel: Kernel = "xla",
) -> Solver:
    """One for a platform by its name: "cpu", "gpu" or "tpu"."""
    made = make_solver(ns_coeffs, ns_steps, method, dtype, preconditioning, kernel)
    if platform is None:
        return made
    return dataclasses.replace(made, platform=platform_named(platform))


def platform_named(name: str) -> Platform:
    return PLATFORMS.get(name, PLATFORMS["default"])


@contextlib.contextmanager
def platform_with(name: str, **values: Any) -> Iterator[Platform]:
    """A platform that has other values: programs are compiled anew, for it."""
    key = name if name in PLATFORMS else "default"
    usual = PLATFORMS[key]
    PLATFORMS[key] = dataclasses.replace(usual, **values)
    jax.clear_caches()
    try:
        yield PLATFORMS[key]
    finally:
        PLATFORMS[key] = usual
        jax.clear_caches()


def matrix_views(dimension_numbers: Any, tree: Any) -> list[MatrixView | None]:
    """The matrices of each leaf, whichever way they were given."""
    return views_of(resolve_verdicts(dimension_numbers, tree), tree)


def orthogonalized(
    solver: Solver, leaves: list[Any], views: list[MatrixView | None]
) -> list[Any]:
    """Leaves at one place, orthogonal."""
    return orthogonalize(solver, leaves, views, read_layout(list(leaves)))
