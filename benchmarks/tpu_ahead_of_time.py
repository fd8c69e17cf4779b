"""Compiles Muon's update for TPUs, without a TPU: ours and optax's, of main first.

    pip install -e '.[examples]' 'jax[tpu]'
    TPU_WORKER_HOSTNAMES=localhost JAX_PLATFORMS=cpu \\
        python benchmarks/tpu_ahead_of_time.py                      # on one chip
    ... python benchmarks/tpu_ahead_of_time.py --model '64, stacked' tensor expert
    ... python benchmarks/tpu_ahead_of_time.py --model Kimi --only ours
    ... python benchmarks/tpu_ahead_of_time.py --model slices --only ours

Arithmetic, memory, traffic and cycles are what the TPU compiler plans and estimates for
one chip, the busiest where they differ, in one update. It makes no estimate for the
collectives themselves: exposed are the bytes for which no other work is scheduled
meanwhile, at 100 GB/s a link (`hlo_costs.py`). Nothing runs, so none of it is a time;
the seconds are those of tracing and compiling here.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt2 import optimizers
from hlo_costs import Costs, hlo_costs
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from models import Model, models
from optax_main import RELEASED
from shares import even_flops, loops_of_devices
from tables import parser, Report, Table


@dataclass(frozen=True)
class Compiled:
    """One update of a model, as compiled; costs and bytes are those of one chip."""

    model: str
    implementation: str
    costs: Costs
    even_flops: float | None  # if every chip did as much of our products
    temporary_bytes: int
    argument_bytes: int
    seconds: float


COLUMNS = {
    "update": "",
    "by": "",
    "GFLOP": ",.0f",
    "if even": ",.0f",
    "Mcycles": ".2f",
    "of optax's": ".2f",
    "collectives, MB": "",
    "exposed": ".0%",
    "temporaries, MB": ",.0f",
    "arguments, MB": ",.0f",
    "trace and compile, s": ".1f",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--model", nargs="+", help="names or parts; default: those on one chip"
    )
    options.add_argument("--only", choices=("ours", "optax", RELEASED))
    options.add_argument("--layers", type=int, default=4, help="of Llama-1B's 16")
    args = options.parse_args()
    report = Report(args)
    table = report.table("One update, compiled for one chip", COLUMNS)
    for name, model in models(args.layers).items():
        named = any(part in name for part in args.model or ())
        if named if args.model else not model.specs:
            mesh = tpu_mesh(model)
            add_rows(table, [*compile_updates(name, model, mesh, args.only)])
    report.write()


def tpu_mesh(model: Model) -> Mesh:
    """The model's mesh over the chips of its topology, the first if there are more.

    Names of axes count, not where in a slice the chips are: the compiler's estimates
    know no distance.
    """
    settings = {"num_slices": model.slices} if model.slices > 1 else {}
    chips = topologies.get_topology_desc(
        platform="tpu", topology_name=model.topology, **settings
    ).devices
    chips = sorted(chips, key=lambda chip: getattr(chip, "slice_index", 0))
    shape = tuple(model.mesh.values())
    chosen = np.array(chips[: int(np.prod(shape))]).reshape(shape)
    return Mesh(chosen, tuple(model.mesh), axis_types=(AxisType.Auto,) * len(shape))


def sides_of(mesh: Mesh) -> list[int]:
    """How many chips a slice has along each side; hosts of 2 x 2 are numbered so."""
    places = [getattr(chip, "coords", (0, 0, 0)) for chip in mesh.devices.flat]
    return [int(last) + 1 for last in np.max(places, axis=0)]


def arguments(
    tx: optax.GradientTransformation, model: Model, mesh: Mesh
) -> tuple[Any, Any, Any]:
    """Gradients, state and parameters by shape, dtype and sharding."""
    shardings = shardings_of(model, mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(path, leaf):
        # Momentum is sharded as its parameter; counters are everywhere.
        names = [key.key for key in path if getattr(key, "key", None) in shardings]
        sharding = shardings[names[-1]] if names else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
        for name, shape in model.shapes.items()
    }
    state = jax.eval_shape(tx.init, params)
    return params, jax.tree_util.tree_map_with_path(placed, state), params


def shardings_of(model: Model, mesh: Mesh) -> dict[str, NamedSharding]:
    whole = PartitionSpec()
    return {k: NamedSharding(mesh, model.specs.get(k, whole)) for k in model.shapes}


def compile_updates(
    name: str, model: Model, mesh: Mesh, only: str | None = None
) -> Iterator[Compiled]:
    sides = optimizers(
        model.shapes,
        adam=model.adam,
        mu_dtype=model.mu_dtype,
        shardings=shardings_of(model, mesh),
    )
    for implementation, tx in sides.items():
        if only in (None, implementation):
            yield compile_update(name, implementation, tx, model, mesh)


def compile_update(
    name: str,
    implementation: str,
    tx: optax.GradientTransformation,
    model: Model,
    mesh: Mesh,
) -> Compiled:
    start = time.perf_counter()
    compiled = program(tx, model, mesh)
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None  # as on other backends
    is_ours = implementation == "ours" and bool(model.specs)
    loops = loops_of_devices(model, "tpu") if is_ours else [{}]
    sides = sides_of(mesh)
    return Compiled(
        name,
        implementation,
        busiest([hlo_costs(text, trips, sides) for trips in loops]),
        even_flops(model, "tpu") if is_ours else None,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        seconds,
    )


def program(
    tx: optax.GradientTransformation, model: Model, mesh: Mesh
) -> jax.stages.Compiled:
    inputs = arguments(tx, model, mesh)
    jax.clear_caches()
    # As in training, the old state makes room for the new.
    update = jax.jit(tx.update, donate_argnums=1)
    return update.lower(*inputs).compile(compiler_options=options_of(mesh))


def options_of(mesh: Mesh) -> dict[str, str] | None:
    """Exchanges that the compiler may start before it waits for them: not on v5e."""
    kind = mesh.devices.flat[0].device_kind
    if not kind.startswith("TPU") or kind == "TPU v5 lite":
        return None
    return {"xla_tpu_enable_async_all_to_all": "true"}


def busiest(devices: list[Costs]) -> Costs:
    """The most of everything, though it be on different devices."""
    return Costs(
        max(costs.flops for costs in devices),
        max(costs.cycles for costs in devices),
        devices[0].collectives,
    )


def add_rows(table: Table, updates: list[Compiled]) -> None:
    peers = [u.costs.cycles for u in updates if u.implementation == "optax"]
    for update in updates:
        table.add(
            update.model,
            update.implementation,
            update.costs.flops / 1e9,
            update.even_flops / 1e9 if update.even_flops else None,
            update.costs.cycles / 1e6,
            update.costs.cycles / peers[0] if peers else None,
            show_traffic(update.costs),
            update.costs.exposed,
            update.temporary_bytes / 1e6,
            update.argument_bytes / 1e6,
            update.seconds,
        )


def show_traffic(costs: Costs) -> str:
    kinds = [
        f"{traffic.count} {kind}: {traffic.bytes / 1e6:,.0f}"
        for kind, traffic in sorted(costs.collectives.items())
    ]
    return "; ".join(kinds) or "none"


if __name__ == "__main__":
    main()
