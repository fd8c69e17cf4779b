"""Shapes of known models' parameters, and how the chips that train them shard them."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpt2 import Layout, separate, Shapes, stacked
from jax.sharding import PartitionSpec as P


Specs = dict[str, P]


@dataclass(frozen=True)
class Model:
    """Leaves by name, and their specs on the axes of a mesh, by default one chip."""

    shapes: Shapes
    specs: Specs = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=lambda: {"chip": 1})
    topology: str = "v5p:2x2x1"  # of one slice
    slices: int = 1
    adam: tuple[str, ...] = ()  # leaves that hold no matrix
    mu_dtype: str | None = None


class Stage(NamedTuple):
    """Matrices of experts on one device of a pipeline."""

    matrices: int
    shape: tuple[int, int]

    def shapes(self, layout: Layout) -> Shapes:
        return layout(self.matrices, {"expert": self.shape})


KIMI_K2_STAGE = Stage(216, (2048, 7168))


def models(llama_layers: int) -> dict[str, Model]:
    few, all_layers = f"Llama-1B, {llama_layers} layers", llama(2048, 512, 8192)
    return {
        "GPT-2 124M, separate": Model(separate(12)),
        "GPT-2 124M, stacked": Model(stacked(12)),
        f"{few}, separate": Model(separate(llama_layers, all_layers)),
        f"{few}, stacked": Model(stacked(llama_layers, all_layers)),
        "Llama-1B, FSDP 64, separate": fsdp(separate(16, all_layers)),
        "Llama-1B, FSDP 64, stacked": fsdp(stacked(16, all_layers)),
        "Llama-1B, FSDP 16 x tensor 4": fsdp_and_tensor(stacked(16, all_layers)),
        "Llama-8B, FSDP 64": fsdp(stacked(32, llama(4096, 1024, 14336))),
        "Llama-1B, 2 slices of FSDP 64": two_slices(stacked(16, all_layers)),
        "Llama-405B, 40 layers, 2 slices of FSDP 64": two_slices(
            stacked(40, llama(16384, 1024, 53248))
        ),
        "Mixtral-like, expert 8 x FSDP 8": mixture_of_experts(32, 8, 4096, 14336),
        "Kimi K2, expert 128 x FSDP 8": kimi_k2(),
        "MoE, 2 layers, expert 2 x data 2 x model 2": experts_on_nodes(1),
        "MoE, 2 layers, 8 copies of that": experts_on_nodes(8),
    }


def llama(width: int, keys: int, hidden: int) -> Shapes:
    return {
        "query": (width, width),
        "out": (width, width),
        "key": (width, keys),
        "value": (width, keys),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def fsdp(shapes: Shapes) -> Model:
    specs = {name: _last_two(shape, "fsdp", None) for name, shape in shapes.items()}
    return Model(shapes, specs, {"fsdp": 64}, "v5p:4x4x4")


def two_slices(shapes: Shapes) -> Model:
    """FSDP inside a slice, and a copy in each."""
    mesh = {"slice": 2, "fsdp": 64}
    return dataclasses.replace(fsdp(shapes), mesh=mesh, slices=2)


def fsdp_and_tensor(shapes: Shapes) -> Model:
    """The layers that read the stream cut along their outputs, the others mirrored."""
    specs = {
        name: _last_two(shape, "tensor", "fsdp")
        if name in ("out", "down")
        else _last_two(shape, "fsdp", "tensor")
        for name, shape in shapes.items()
    }
    return Model(shapes, specs, {"fsdp": 16, "tensor": 4}, "v5p:4x4x4")


def mixture_of_experts(layers: int, experts: int, width: int, hidden: int) -> Model:
    """Mixtral's: experts on their own devices, everything else over all of them."""
    dense = llama(width, width // 4, hidden)
    expert = {name: dense.pop(name) for name in ("gate", "up", "down")}
    return _with_experts(
        stacked(layers, dense | {"router": (width, experts)}),
        {name: (layers, experts, *shape) for name, shape in expert.items()},
        {"expert": 8, "fsdp": 8},
        topology="v5p:4x4x4",
    )


def experts_on_nodes(nodes: int) -> Model:
    """Experts (experts, width, hidden) over three axes of a node of 8, as in MaxText.

    Each node has a copy; between nodes links are slow.
    """
    width, hidden, cut = 4096, 14336, P("expert", "data", "model")
    dense = llama(width, width // 4, hidden)
    experts = {name: (8, *dense.pop(name)) for name in ("gate", "up", "down")}
    shapes: Shapes = {
        f"{name}{i}": shape
        for i in range(2)
        for name, shape in (dense | experts).items()
    }
    specs = {
        name: cut if len(shape) > 2 else P("data", "model")
        for name, shape in shapes.items()
    }
    mesh = {"node": nodes, "expert": 2, "data": 2, "model": 2}
    topology = "v5p:2x2x2" if nodes == 1 else "v5p:4x4x4"
    return Model(shapes, specs, mesh, topology)


def kimi_k2() -> Model:
    """61 layers of latent attention, 60 of 384 experts (arXiv:2507.20534, table 2)."""
    width, hidden, vocabulary = 7168, 2048, 163_840
    attention = {
        "query_down": (width, 1536),
        "query_up": (1536, 64 * (128 + 64)),
        "key_value_down": (width, 512 + 64),
        "key_value_up": (512, 64 * (128 + 128)),
        "out": (64 * 128, width),
    }
    expert = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    first = {"gate": (width, 18432), "up": (width, 18432), "down": (18432, width)}
    shared = {f"shared_{name}": shape for name, shape in expert.items()}
    embeddings: Shapes = {name: (vocabulary, width) for name in ("embed", "head")}
    return _with_experts(
        stacked(61, attention)
        | stacked(60, shared | {"router": (width, 384)})
        | {f"first_{name}": (1, *shape) for name, shape in first.items()}
        | embeddings,
        {name: (60, 384, *shape) for name, shape in expert.items()},
        {"expert": 128, "fsdp": 8},
        topology="v5p:8x8x16",
        adam=tuple(embeddings),
        mu_dtype="bfloat16",
    )


def _with_experts(
    dense: Shapes, experts: Shapes, mesh: dict[str, int], **settings: Any
) -> Model:
    """Experts `(layers, experts, m, n)` on their own devices, the dense leaves on all.

    A dense leaf is cut along its first axis, or the last where that does not divide.
    """
    devices = math.prod(mesh.values())
    specs = {
        name: _last_two(shape, tuple(mesh), None)
        if shape[-2] % devices == 0
        else _last_two(shape, None, tuple(mesh))
        for name, shape in dense.items()
    }
    specs |= {name: P(None, "expert", "fsdp", None) for name in experts}
    return Model(dense | experts, specs, mesh, **settings)


def _last_two(shape: tuple[int, ...], *axes: Any) -> P:
    return P(*(None,) * (len(shape) - 2), *axes)
