"""Compiles the attention kernels and their statistics for TPU, without a TPU.

    pip install -e '.[examples,tokamax]' 'jax[tpu]'
    TPU_WORKER_HOSTNAMES=localhost JAX_PLATFORMS=cpu \\
        python benchmarks/attention_ahead_of_time.py

Prints, for a training pass (forward and gradient) of one attention layer on one chip,
the temporary memory that the TPU compiler plans. It runs nothing and gives no time.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from environment import environment
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import muonclip_jax as mc


KERNELS: dict[str, Callable] = {
    "blockwise_attention": mc.blockwise_attention,
    "splash_attention": mc.splash_attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2x1", "v5p:2x2x1"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    print(environment(), end="\n\n")
    print("| topology | | " + " | ".join(map(str, args.lengths)) + " |")
    print("|---|---|" + "---|" * len(args.lengths))
    for topology in args.topologies:
        chip = one_chip(topology)
        for name, kernel in KERNELS.items():
            cells = [
                training_pass(kernel, length, chip, args) for length in args.lengths
            ]
            print_row(topology, name, cells)
        cells = [statistic(length, chip, args) for length in args.lengths]
        print_row(topology, "max_logits", cells)


def one_chip(topology: str) -> NamedSharding:
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    return NamedSharding(Mesh(np.array(devices[:1]), ("chip",)), PartitionSpec())


def training_pass(kernel: Callable, length: int, chip: NamedSharding, args) -> int:
    def loss(query, key, value):
        output, max_logits = kernel(query, key, value, is_causal=True)
        return output.astype(jnp.float32).sum(), max_logits

    grad = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    return temporaries(grad, inputs(length, chip, args))


def statistic(length: int, chip: NamedSharding, args) -> int:
    return temporaries(
        functools.partial(mc.max_logits, is_causal=True), inputs(length, chip, args)[:2]
    )


def inputs(length: int, chip: NamedSharding, args) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            (1, length, heads, args.head_dim), jnp.bfloat16, sharding=chip
        )
        for heads in (args.heads, args.key_heads, args.key_heads)
    ]


def temporaries(function: Callable, arguments: list[jax.ShapeDtypeStruct]) -> int:
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert memory is not None  # as it may be on other backends
    return memory.temp_size_in_bytes


def print_row(topology: str, name: str, cells: list[int]) -> None:
    sizes = " | ".join(f"{cell / 2**20:,.0f} MiB" for cell in cells)
    print(f"| {topology} | {name} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
