"""The private names that tests and benchmarks use: no other file of theirs has any."""

# What is imported here is for others to import.
# ruff: noqa: F401

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import muonclip_jax as mc
import muonclip_jax._attention.max_logits as max_logits_module
import muonclip_jax._muon.muon as muon_module
import muonclip_jax._muon.scale_by_muon as scale_module
import muonclip_jax._muonclip as muonclip_module
from muonclip_jax._attention.splash import _statistic as splash_statistic
from muonclip_jax._matrices.stacks import matrix_view, MatrixLeaf, MatrixView
from muonclip_jax._mesh.by_constraint import assign_slots
from muonclip_jax._mesh.on_mesh import Exchange, orthogonalize_on_mesh, plan_exchanges
from muonclip_jax._mesh.owners import (
    assign_owners,
    Cut,
    cut_of,
    groups_of,
    OwnedStack,
    Work,
)
from muonclip_jax._mesh.parcels import Parcels
from muonclip_jax._model.knowledge import knowledge_of
from muonclip_jax._muon import eight_bits
from muonclip_jax._muon.momentum import _accumulate as accumulate
from muonclip_jax._muon.orthogonalize import on_one_device
from muonclip_jax._newton_schulz.coefficients import check_schedule, resolve_schedule
from muonclip_jax._newton_schulz.iteration import collected
from muonclip_jax._newton_schulz.newton_schulz import make_solver
from muonclip_jax._newton_schulz.solver import Platform, PLATFORMS, Solver
from muonclip_jax._parameters import paths
from muonclip_jax._parameters.dimension_numbers import views_of
from muonclip_jax._parameters.leaf_rules import OF_MORE_AXES, OF_TWO_AXES
from muonclip_jax._parameters.leaf_rules import RULES as OF_ANY_RANK
from muonclip_jax._reading.facts import Facts
from muonclip_jax._reading.graph import Graph
from muonclip_jax._reading.heads_of_products import head_ids, heads_of
from muonclip_jax._reading.kernels import largest_by_sums
from muonclip_jax._reading.primitives import moves
from muonclip_jax._reading.softmaxes import Softmaxes
from muonclip_jax._reading.traced_call import call_of


#: Every rule on names and shapes.
RULES = (*OF_ANY_RANK, *OF_TWO_AXES, *OF_MORE_AXES)


def solver(platform: str | None = None, **settings: Any) -> Solver:
    """Of `mc.NewtonSchulz(**settings)`, for a platform: "cpu", "gpu" or "tpu"."""
    made = make_solver(mc.NewtonSchulz(**settings))
    if platform is None:
        return made
    return dataclasses.replace(made, platform=platform_named(platform))


def interpreted() -> Any:
    """For a kernel of Pallas Mosaic GPU: its threads and copies simulated on a CPU.

    Public in JAX 0.12.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


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
    known = knowledge_of(None, None, dimension_numbers)
    return views_of(known.verdicts(tree), tree)
