"""Compiles the attention kernels and their statistics for TPU, without a TPU.

    pip install -e '.[examples,tokamax]' 'jax[tpu]'
    TPU_WORKER_HOSTNAMES=localhost JAX_PLATFORMS=cpu \\
        python benchmarks/attention_ahead_of_time.py

Prints, for a training pass (forward and gradient) of one attention layer on one chip,
the temporary memory in MiB that the TPU compiler plans. It runs nothing and gives no
time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import parser, Report

import muonclip_jax as mc


LENGTHS, HEADS, KEY_HEADS, HEAD_DIM = (2048, 8192, 16384), 8, 2, 128


def gradient(kernel: Callable) -> Callable:
    def loss(query, key, value):
        output, max_logits = kernel(query, key, value, is_causal=True)
        return output.astype(jnp.float32).sum(), max_logits

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)


PASSES: dict[str, Callable] = {
    "blockwise_attention": gradient(mc.blockwise_attention),
    "splash_attention": gradient(mc.splash_attention),
    "max_logits": lambda query, key, _: mc.max_logits(query, key, is_causal=True),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--topologies", nargs="+", default=["v5e:2x2x1", "v5p:2x2x1"])
    args = options.parse_args()
    report = Report(args)
    lengths = {f"length {n}": ",.0f" for n in LENGTHS}
    table = report.table("Temporaries, MiB", {"topology": "", "": ""} | lengths)
    for topology in args.topologies:
        chip = one_chip(topology)
        for name, one_pass in PASSES.items():
            cells = [temporaries(one_pass, inputs(n, chip)) for n in LENGTHS]
            table.add(topology, name, *cells)
    report.write()


def one_chip(topology: str) -> NamedSharding:
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    return NamedSharding(Mesh(np.array(devices[:1]), ("chip",)), PartitionSpec())


def inputs(length: int, chip: NamedSharding) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.bfloat16, sharding=chip)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def temporaries(function: Callable, arguments: list[jax.ShapeDtypeStruct]) -> float:
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert memory is not None  # as it may be on other backends
    return memory.temp_size_in_bytes / 2**20


if __name__ == "__main__":
    main()
