"""Trains Kimi K2's architecture in miniature and draws QK-Clip at work, head by head.

    python examples/kimi_k2_mini.py                       # with the clip, and without
    python examples/kimi_k2_mini.py --data book.txt --threshold 50 --alone
    python examples/kimi_k2_mini.py --defaults            # muonclip's, not Kimi K2's

Both runs see the same initial weights and the same batches. `--out` gets the picture,
`kimi_k2_mini.png`: the largest logit of every head in every step.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, VOCABULARY
from flax import nnx
from kimi_k2_model import KimiK2, Sizes
from kimi_k2_report import draw, History, summary
from tqdm import trange
from train_lm_options import existing_file

import muonclip_jax as mc


CLIPPED, WATCHED = "MuonClip", "Muon without the clip"
# Algorithm 1 of its report. By default every head is a matrix of its own, which keeps
# logits lower, and the momentum is Nesterov's.
KIMI_K2: dict[str, Any] = dict(nesterov=False, per_head=False, beta=0.95)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--data", type=existing_file, help="a text file; default: the standard library")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=16)
    add("--context", type=int, default=64)
    add(
        "--layers", type=int, default=4, help="the first is dense; default: %(default)s"
    )
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--experts", type=int, default=8)
    add("--learning-rate", type=float, default=3e-2)
    add("--weight-decay", type=float, default=0.1)
    add("--threshold", type=positive, default=30.0)
    add(
        "--balance-rate",
        type=float,
        default=1e-2,
        help="step of the router's bias; default: %(default)s",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/kimi_k2_mini"))
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="muonclip's momentum and heads, not Kimi K2's",
    )
    parser.add_argument(
        "--alone", action="store_true", help="skip the run without the clip"
    )
    return parser.parse_args()


def positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return float(text)


def main() -> None:
    args = parse_args()
    corpus = Corpus(args.data)
    tokens = jnp.asarray(
        corpus.batch(args.batch_size, args.context, seed=args.seed, step=0)
    )
    model = nnx.eval_shape(functools.partial(make_model, args))
    reading = mc.read_model(loss_fn, model, tokens)
    per_head = None if args.defaults else KIMI_K2["per_head"]
    params = nnx.state(model, nnx.Param)
    print(mc.describe(params, model=reading, per_head=per_head))
    thresholds = {CLIPPED: args.threshold}
    if not args.alone:
        thresholds[WATCHED] = float("inf")
    results = {
        name: train(name, reading, threshold, args, corpus)
        for name, threshold in thresholds.items()
    }
    for name, history in results.items():
        print(summary(name, history, args.threshold))
    file = args.out / "kimi_k2_mini.png"
    step_bytes = args.batch_size * args.context
    draw(results, file, threshold=args.threshold, step_bytes=step_bytes)
    print(f"picture: {file}")


def make_model(args: argparse.Namespace) -> KimiK2:
    sizes = Sizes(VOCABULARY, args.layers, args.width, args.heads, experts=args.experts)
    return KimiK2(sizes, nnx.Rngs(args.seed))


def make_optimizer(
    reading: mc.ModelReading,
    threshold: float,
    args: argparse.Namespace,
    **options: Any,
) -> optax.GradientTransformation:
    """`options` are further arguments of `mc.muonclip`."""
    return mc.muonclip(
        make_schedule(args.learning_rate, args.steps),
        threshold=threshold,
        model=reading,
        weight_decay=args.weight_decay,
        **options,
    )


def make_schedule(peak: float, steps: int) -> optax.Schedule:
    """Warm up, hold, and decay over the last fifth."""
    warmup, decay = min(20, steps // 2), max(1, steps // 5)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / warmup if warmup else peak, peak, warmup),
            optax.linear_schedule(peak, 0.0, decay, max(0, steps - decay - warmup)),
        ],
        [warmup],
    )


def loss_fn(model: KimiK2, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make_train_step() -> Callable[..., tuple[jax.Array, ...]]:
    """The step, which returns what QK-Clip saw and did to every head, too."""
    gradient = nnx.value_and_grad(mc.record_attention(loss_fn), has_aux=True)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(
        model: KimiK2, optimizer: nnx.Optimizer, tokens: jax.Array, balance_rate: float
    ) -> tuple[jax.Array, ...]:
        (loss, stats), grads = gradient(model, tokens)
        optimizer.update(model, grads, attention_stats=stats)
        for router in model.routers():
            router.balance(balance_rate)
        # QK-Clip's state has the heads of all layers in one row, in their order.
        rows = [optax.tree.get(optimizer.opt_state, x) for x in ("max_logits", "gamma")]
        of_heads = [row[...].reshape(len(model.blocks), -1) for row in rows]
        return loss, busiest(model), *of_heads

    return train_step


def busiest(model: KimiK2) -> jax.Array:
    """The load of the busiest expert of any layer, in fair shares."""
    loads = [router.load[...] for router in model.routers()]
    shares = [load.max() / load.mean() for load in loads]
    return jnp.max(jnp.array(shares), initial=1.0)


@nnx.jit
def evaluate(model: KimiK2, tokens: jax.Array) -> jax.Array:
    return loss_fn(model, tokens)


def train(
    name: str,
    reading: mc.ModelReading,
    threshold: float,
    args: argparse.Namespace,
    corpus: Corpus,
) -> History:
    """Trains with the logits capped at `threshold`, or just watched if infinite."""
    model = make_model(args)
    tx = make_optimizer(reading, threshold, args, **({} if args.defaults else KIMI_K2))
    train_step = make_train_step()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    shape = args.batch_size, args.context
    steps = []
    for step in (bar := trange(args.steps, desc=name)):
        tokens = jnp.asarray(corpus.batch(*shape, seed=args.seed, step=step))
        steps.append(train_step(model, optimizer, tokens, args.balance_rate))
        if step % 10 == 9:
            bar.set_postfix_str(progress(*steps[-1]), refresh=False)
    columns = zip(*jax.device_get(steps), strict=True)
    loss, load, max_logits, gamma = map(np.stack, columns)
    return History(loss, load, max_logits, gamma, validate(model, corpus, shape))


def progress(loss, _, max_logits, gamma) -> str:
    clipped = int((gamma < 1).sum())
    return f"loss {loss:.3f}, max logit {max_logits.max():.1f}, clipped {clipped}"


def validate(model: KimiK2, corpus: Corpus, shape: tuple[int, int]) -> float:
    batches = corpus.validation_batches(16, *shape)
    return float(np.mean([evaluate(model, jnp.asarray(batch)) for batch in batches]))


if __name__ == "__main__":
    main()
