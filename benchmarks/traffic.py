"""What an update sends, as it is planned, and the least that has to be sent.

    python benchmarks/traffic.py

For each device of each model on a mesh. The plan is the same for TPUs and GPUs: blocks
go in bfloat16, of which a matrix is iterated whole. Nothing is compiled.
"""

from models import models
from shares import sent
from tables import parser, Report


COLUMNS = {"update": "", "exchanges": "", "sent, MB": ",.0f", "least, MB": ",.0f"}
SLOW = "node"


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    table = report.table("What a device sends in one update", COLUMNS)
    for name, model in models(4).items():
        if model.specs:
            choices = {name: ()}
            if model.mesh.get(SLOW, 1) > 1:
                choices |= {f'{name}, slow_axes="{SLOW}"': (SLOW,)}
            for row, slow_axes in choices.items():
                found = sent(model, "tpu", slow_axes)
                table.add(row, found.exchanges, found.bytes / 1e6, found.least / 1e6)
    report.write()


if __name__ == "__main__":
    main()
