"""A step on a mesh of some processes, from a checkpoint or to one.

Arguments: the address of the coordinator, how many processes, which one this is, how
many devices each has, the folder, and "save" or "restore".
"""

import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


SHAPES = {"up": (4, 8, 16), "qkv": (8, 24), "bias": (8,)}
SPECS = {"up": P("a", None, "b"), "qkv": P("b", "a"), "bias": P(("a", "b"))}


def numbers(seed):
    generator = np.random.default_rng(seed)
    return {n: generator.normal(size=s).astype("f4") for n, s in SHAPES.items()}


def main(address, count, index, devices, folder, what):
    count, folder = int(count), pathlib.Path(folder)
    jax.config.update("jax_num_cpu_devices", int(devices))
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, int(index))
    total = jax.device_count()
    mesh = jax.make_mesh((total // 2, 2), ("a", "b"))
    placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def put(tree):
        return {
            n: jax.make_array_from_callback(x.shape, placed[n], lambda i, x=x: x[i])
            for n, x in tree.items()
        }

    tx = mc.muon(
        0.1,
        neuron_b2=0.9,
        orthogonalizer=mc.NewtonSchulz(steps=2),
        shardings=placed,
        dimension_numbers={
            "up": mc.MuonDimensionNumbers(1, 2),
            "qkv": mc.MatrixAxes(0, 1, parts=(8, 8, 8)),
            "bias": None,
        },
    )
    params = put(numbers(0))
    state, update = tx.init(params), jax.jit(tx.update)
    checkpointer = ocp.StandardCheckpointer()
    if what == "save":
        for seed in (1, 2):
            _, state = update(put(numbers(seed)), state, params)
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
    else:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        state = checkpointer.restore(folder / "state", like)
    updates, _ = update(put(numbers(3)), state, params)
    found = process_allgather((state, updates), tiled=True)
    if int(index) == 0:
        names = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(found)]
        leaves = map(np.asarray, jax.tree.leaves(found))
        np.savez(folder / f"{what}.npz", **dict(zip(names, leaves, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
