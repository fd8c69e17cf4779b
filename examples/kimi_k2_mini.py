"""Trains Kimi K2's architecture in miniature and draws QK-Clip at work, head by head.

    python examples/kimi_k2_mini.py                       # with the clip, and without
    python examples/kimi_k2_mini.py --data book.txt --threshold 50 --alone

Both runs see the same initial weights and the same batches. `--out` gets the picture,
`kimi_k2_mini.png`: the largest logit of every head in every step.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from corpus import Corpus, VOCABULARY
from flax import nnx
from kimi_k2_model import KimiK2, Sizes
from matplotlib import colors, ticker
from matplotlib.axes import Axes
from tqdm import trange

import muonclip_jax as mc


matplotlib.use("Agg")
import matplotlib.pyplot as plt


CLIPPED, WATCHED = "MuonClip", "Muon without the clip"
COLORS = ("#1b7fbd", "#d95f02")


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
    add(
        "--learning-rate", type=float, default=3e-2, help="Muon's; default: %(default)s"
    )
    add("--adam-learning-rate", type=float, default=6e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--threshold", type=float, default=30.0)
    add(
        "--balance-rate",
        type=float,
        default=1e-2,
        help="step of the router's bias; default: %(default)s",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/kimi_k2_mini"))
    parser.add_argument(
        "--alone", action="store_true", help="skip the run without the clip"
    )
    return parser.parse_args()


def existing_file(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {name}")
    return Path(name)


class History(NamedTuple):
    """A run, step by step."""

    loss: np.ndarray  # shape=(steps,)
    busiest: np.ndarray  # shape=(steps,); see `busiest`
    max_logits: np.ndarray  # shape=(steps, layers, heads)
    gamma: np.ndarray  # shape=(steps, layers, heads); 1 where the clip let be
    validation_loss: float


def main() -> None:
    args = parse_args()
    corpus = Corpus(args.data)
    model = nnx.eval_shape(functools.partial(make_model, args))
    print(mc.describe(nnx.state(model, nnx.Param), attention=attention(model.sizes)))
    thresholds = {CLIPPED: args.threshold}
    if not args.alone:
        thresholds[WATCHED] = float("inf")
    results = {
        name: train(name, threshold, args, corpus)
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


def attention(sizes: Sizes) -> Any:
    return mc.latent_attention(sizes.nope_head_dim)


def make_optimizer(
    sizes: Sizes, threshold: float, args: argparse.Namespace
) -> optax.GradientTransformation:
    return mc.muonclip(
        make_schedule(args.learning_rate, args.steps),
        threshold=threshold,
        attention=attention(sizes),
        adam_learning_rate=make_schedule(args.adam_learning_rate, args.steps),
        weight_decay=args.weight_decay,
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


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(
    model: KimiK2, optimizer: nnx.Optimizer, tokens: jax.Array, balance_rate: float
) -> tuple[jax.Array, ...]:
    recorded_loss = nnx.capture(loss_fn, nnx.Intermediate)
    gradient = nnx.value_and_grad(recorded_loss, has_aux=True)
    (loss, stats), grads = gradient(model, tokens)
    optimizer.update(model, grads, attention_stats=stats)
    for router in model.routers():
        router.balance(balance_rate)
    return loss, busiest(model), *head_metrics(model, optimizer)


def busiest(model: KimiK2) -> jax.Array:
    """The load of the busiest expert of any layer, in fair shares."""
    loads = [router.load[...] for router in model.routers()]
    shares = [load.max() / load.mean() for load in loads]
    return jnp.max(jnp.array(shares), initial=1.0)


def head_metrics(
    model: KimiK2, optimizer: nnx.Optimizer
) -> tuple[jax.Array, jax.Array]:
    """What QK-Clip saw and did to every head, `(layers, heads)`."""
    params = nnx.state(model, nnx.Param)
    metrics = mc.qk_clip_metrics(
        optimizer.opt_state, params, attention=attention(model.sizes)
    )
    layers = [
        metrics["layers"][f"blocks/{i}/attention"] for i in range(len(model.blocks))
    ]
    return (
        jnp.stack([layer["max_logits"] for layer in layers]),
        jnp.stack([layer["gamma"] for layer in layers]),
    )


@nnx.jit
def evaluate(model: KimiK2, tokens: jax.Array) -> jax.Array:
    loss, _ = nnx.capture(loss_fn, nnx.Intermediate)(model, tokens)
    return loss


def train(
    name: str, threshold: float, args: argparse.Namespace, corpus: Corpus
) -> History:
    """Trains with the logits capped at `threshold`, or just watched if infinite."""
    model = make_model(args)
    tx = make_optimizer(model.sizes, threshold, args)
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


def summary(name: str, history: History, threshold: float) -> str:
    """The figures of a run; the last quarter is of its steps."""
    largest = history.max_logits.max(axis=(1, 2))
    last = largest[-max(1, len(largest) // 4) :]
    fired = (history.gamma < 1).any(axis=0)
    return f"""{name}
  validation loss          {history.validation_loss:.4f} nats per byte
  largest logit            {largest.max():.1f}
  ... of the last quarter  {last.max():.1f}
  ... its 95th percentile  {np.quantile(last, 0.95) / threshold:.2f} thresholds
  heads ever clipped       {fired.sum()} of {fired.size} ({fired.mean():.0%})
  busiest expert           {history.busiest[-len(last) :].mean():.2f} fair shares"""


def draw(
    results: dict[str, History], file: Path, *, threshold: float, step_bytes: int
) -> None:
    """Draws the largest logit of the model, and below it that of every head."""
    heights = [2.4] + [3.0] * len(results)
    figure, (top, *maps) = plt.subplots(
        len(heights),
        figsize=(10, sum(heights)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    draw_largest(top, results, threshold)
    norm = logit_colors(results, threshold)
    for axes, (name, history) in zip(maps, results.items(), strict=True):
        draw_heads(axes, name, history, norm)
    maps[-1].set(xlabel=f"training step ({step_bytes:,} bytes each)")
    bar = figure.colorbar(
        maps[0].images[0],
        ax=maps,
        label="largest logit of a head in a step",
        extend="min",
        pad=0.01,
    )
    bar.ax.axhline(threshold, color="black", linestyle=":")
    label_logits(bar.ax.yaxis)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_largest(axes: Axes, results: dict[str, History], threshold: float) -> None:
    for (name, history), color in zip(results.items(), COLORS, strict=False):
        largest = history.max_logits.max(axis=(1, 2))
        axes.plot(np.arange(1, len(largest) + 1), largest, color, label=name)
    label = f"threshold {threshold:g}"
    axes.axhline(threshold, color="black", linestyle=":", label=label)
    axes.set(ylabel="largest logit, all heads", yscale="log")
    label_logits(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def logit_colors(results: dict[str, History], threshold: float) -> colors.Normalize:
    """White at the threshold, and equal factors above and below it alike."""
    peak = max(history.max_logits.max() for history in results.values())
    reach = max(2.0, peak / threshold)
    return colors.LogNorm(threshold / reach, threshold * reach)


def draw_heads(axes: Axes, name: str, history: History, norm: colors.Normalize) -> None:
    """A row per head, coloured by its logits and dotted where it was clipped."""
    steps, layers, heads = history.max_logits.shape
    axes.imshow(
        history.max_logits.reshape(steps, -1).T,
        norm=norm,
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, steps + 0.5, layers * heads, 0),
    )
    step, row = np.nonzero(history.gamma.reshape(steps, -1) < 1)
    axes.plot(step + 1, row + 0.75, "k.", markersize=1.2)
    axes.hlines(heads * np.arange(1, layers), 0.5, steps + 0.5, "white", linewidth=3)
    ticks = np.arange(layers * heads) + 0.5
    axes.set_yticks(ticks, row_labels(layers, heads), fontsize=9.5)
    dots = " (a dot where the clip scaled a head down)" if len(step) else ""
    axes.set_title(name + dots, loc="left", fontsize=11)


def row_labels(layers: int, heads: int) -> list[str]:
    """The first head of a layer names it too."""
    return [
        f"head {head}" if head else f"layer {layer} · head 0"
        for layer in range(layers)
        for head in range(heads)
    ]


def label_logits(axis: Any) -> None:
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


if __name__ == "__main__":
    main()
