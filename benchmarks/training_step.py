"""What an optimizer adds to a training step of examples/train_lm.py.

    python benchmarks/training_step.py

Whole steps of the example take turns; the overhead is over a step with plain SGD. All
of them record the largest logits, so that cost is not part of it. Beside it stands
Keller Jordan's bound T m / B on the arithmetic of Muon (kellerjordan.github.io/posts/
muon): T steps of Newton-Schulz, m the width of the model, B tokens a batch.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import language_model
import optax
import train_lm
from alternating import alternate, ratio
from tables import parser, Report


STEPS = 5
BATCH_SIZES = (32, 128)
COLUMNS = {
    "tokens a batch": "d",
    "optimizer": "",
    "step, ms": ".1f",
    "overhead": ".1%",
    "T m / B": ".1%",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=language_model.settings().layers)
    options.add_argument("--repeats", type=int, default=40)
    args = options.parse_args()
    report = Report(args)
    example = language_model.settings()
    example.layers = args.layers
    title = f"Training step, {example.layers} layers of width {example.width}"
    table = report.table(title, COLUMNS)
    for batch_size in BATCH_SIZES:
        example.batch_size = batch_size
        for row in measure(example, args.repeats):
            table.add(*row)
    report.write()


def measure(args: argparse.Namespace, repeats: int):
    """Yields the rows of the table for one size of a batch."""
    count = args.batch_size * args.context
    times = alternate(training_steps(args), repeats)
    for name in times:
        milliseconds = 1e3 * statistics.median(times[name])
        overhead = None if name == "sgd" else ratio(times, name, "sgd") - 1
        bound = STEPS * args.width / count if "muon" in name else None
        yield count, name, milliseconds, overhead, bound


def training_steps(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    tokens = language_model.tokens(args, train_lm.Corpus(), step=0)

    def side(tx: optax.GradientTransformation) -> Callable[[], Any]:
        model, optimizer = language_model.trained_by(tx, args)
        # The metrics are of the same program as the weights: ready when these are.
        return lambda: train_lm.train_step(model, optimizer, tokens)

    optimizers = {"sgd": optax.sgd(args.learning_rate)} | {
        name: train_lm.make_optimizer(name, args) for name in train_lm.OPTIMIZERS
    }
    return {name: side(tx) for name, tx in optimizers.items()}


if __name__ == "__main__":
    main()
