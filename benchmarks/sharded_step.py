"""Times Muon's update with matrices cut over eight simulated devices.

    python benchmarks/sharded_step.py

Matrices of GPT-2 124M and, at a quarter of its width, Llama-1B. Every leaf is cut along
its inputs, as under FSDP. The devices share this machine's
cores, so what is compared is the work of all of them, exchanges included, in float32.
Each side takes turns with the other; medians.
"""

import os


DEVICES = 8
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    f" --xla_force_host_platform_device_count={DEVICES}"
)

from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from alternating import alternate, compare  # noqa: E402
from gpt2 import BLOCK, optimizers, separate, Shapes, stacked, updates_by  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from models import llama  # noqa: E402
from optax_main import RELEASED  # noqa: E402
from tables import parser, Report  # noqa: E402


COLUMNS = {"leaves": "", "ours, s": ".2f", "optax, s": ".2f", f"{RELEASED}, s": ".2f"}
COLUMNS |= {"times faster": ".2f", f"than {RELEASED}": ".2f"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=3, help="of each")
    options.add_argument("--repeats", type=int, default=20)
    args = options.parse_args()
    report = Report(args)
    table = report.table(f"One update on {DEVICES} simulated devices", COLUMNS)
    for model, block in {"GPT-2": BLOCK, "Llama": llama(512, 128, 2048)}.items():
        for layout in (separate, stacked):
            times = alternate(updates(layout(args.layers, block)), args.repeats)
            name = f"{model}, {layout.__name__}"
            table.add(name, *compare(times, "ours", "optax", RELEASED))
    report.write()


def updates(shapes: Shapes) -> dict[str, Callable[[], Any]]:
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(*(None,) * (len(shape) - 2), "fsdp"))
        for name, shape in shapes.items()
    }
    return updates_by(shapes, optimizers(shapes, shardings=shardings), shardings)


if __name__ == "__main__":
    main()
