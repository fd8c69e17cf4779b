"""AdamW at three rates and MuonClip side by side on a card, for 20 bytes a parameter.

    python benchmarks/trained_on_a_card.py --gather text.xz  # where packages are
    python benchmarks/trained_on_a_card.py --text text.xz --out curves.jsonl --minutes 9

A transformer on bytes with 10 million parameters in matrices and activations in
bfloat16. One program takes many steps of all four runs, from the same weights and on
the same text. MuonClip's rate is that of the report's rule for the AdamW in the middle;
AdamW has b1 0.9, b2 0.95 and weight decay 0.1. A run of a few steps says how many fit
into `--minutes`, and the schedules are as long as that, or as three times the text.

A cosine schedule ends at the last step. Where MuonClip's curve crosses AdamW's last
loss, its rate is still high, and a shorter run with a schedule of its own would be
lower there: the share of tokens at the crossing is an upper bound. There is one seed.
"""

import argparse
import functools
import hashlib
import json
import lzma
import math
import site
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from environment import environment
from evidence.experiments.rate_rule import rule
from evidence.model import largest_logits, Transformer
from evidence.optimizers import schedule
from evidence.run import Run
from evidence.texts import Text
from evidence.tokens import reached
from flax import nnx
from tables import Table

import muonclip_jax as mc


PER_PARAMETER, EPOCHS, EVALUATIONS = 20, 3, 50
LARGEST = 200_000  # bytes of a file that is gathered: longer ones are tables
RESERVE = 1.1  # for steps that take longer than the first ones


class Size(NamedTuple):
    run: Run
    rates: Sequence[float]  # of AdamW
    together: int  # steps in one call
    held_out: int  # windows


#: The report's best rate for 3 million parameters is 0.002.
FULL = Size(
    Run(layers=8, width=320, heads=5, batch=128, context=128),
    rates=(1e-3, 2e-3, 4e-3),
    together=16,
    held_out=2048,
)
TINY = Size(
    Run(layers=1, width=16, heads=2, batch=16, context=32),
    rates=(8e-3, 1.6e-2, 3.2e-2),
    together=4,
    held_out=128,
)


class Program(NamedTuple):
    """All runs in one call each; a carry has their params and states."""

    init: Callable[[], Any]
    train: Callable[..., Any]  # carry, first step, factors -> carry, largest logits
    evaluate: Callable[..., Any]  # carry -> held-out losses


def main(arguments: Sequence[str] | None = None) -> None:
    end = time.perf_counter()
    args = parse_args(arguments)
    end += 60 * args.minutes
    if args.gather:
        content = gathered(args.megabytes * 10**6)
        args.gather.write_bytes(lzma.compress(content, preset=1))
        print(f"{len(content):,} bytes, packed in {args.gather}")
        return
    size = TINY if args.tiny else FULL
    size = size._replace(rates=args.rates or size.rates)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        for line in trained(size, Text(args.text, report=15), end):
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(*(f"{name}: {value}" for name, value in line.items()), sep="; ")
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    print(f"\n{outcome(lines)}")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--text", default="code", help="a file, .xz too, or one of the report's texts")
    add("--out", type=Path, default=Path("runs/trained_on_a_card.jsonl"))
    add("--minutes", type=float, default=8, help="from the start to the end")
    add("--rates", type=float, nargs="+", help="of AdamW")
    add("--tiny", action="store_true", help="a small model, on any machine")
    add("--gather", type=Path, help="only write the code of installed packages there")
    add("--megabytes", type=int, default=72, help="of the code, before it is packed")
    return options.parse_args(arguments)


def gathered(most: int) -> bytes:
    """Python files of installed packages, each content once, in the order of hashes."""
    found: dict[str, bytes] = {}
    for folder in site.getsitepackages():
        for file in Path(folder).rglob("*.py"):
            content = file.read_bytes()
            if len(content) <= LARGEST:
                found[hashlib.sha256(content).hexdigest()] = content
    return b"".join(found[digest] for digest in sorted(found))[:most]


def trained(size: Size, text: Text, end: float) -> Iterator[dict[str, Any]]:
    """First what is trained, then the held-out losses every 2 % of the steps."""
    run, made = size.run, program(size, text)
    carry, warm = made.init(), np.zeros(size.together, np.float32)
    of_step = second_time(lambda: made.train(carry, 0, warm)) / size.together
    of_loss = second_time(lambda: made.evaluate(carry))
    left = (end - time.perf_counter()) / RESERVE - EVALUATIONS * of_loss
    each, parameters = run.batch * run.context, run.matrix_parameters
    limits = {  # in steps
        f"{PER_PARAMETER} bytes a parameter": PER_PARAMETER * parameters / each,
        f"{EPOCHS} epochs of the text": EPOCHS * len(text.train) / each,
        "the time": left / of_step,
    }
    limit = min(limits, key=limits.__getitem__)
    calls = max(1, int(limits[limit] / size.together))
    steps = calls * size.together
    names = [f"AdamW, {rate:g}" for rate in size.rates]
    yield {
        "environment": environment(),
        "parameters in matrices": parameters,
        "text": text.digest,
        "bytes of text": len(text.train),
        "steps": steps,
        "bytes a step": each,
        "bytes a parameter": steps * each / parameters,
        "limit": limit,
        "ms a step of all runs": 1e3 * of_step,
        "runs": [*names, f"mc.muonclip, {muonclip_rate(size.rates):g}"],
    }

    factors = schedule(Run(steps=steps)).astype(np.float32)
    carry, start, largest = made.init(), time.perf_counter(), []
    for call in range(calls):
        done = (call + 1) * size.together
        now = slice(done - size.together, done)
        carry, logits = made.train(carry, now.start, factors[now])
        largest.append(logits)
        if (call + 1) * EVALUATIONS % calls < EVALUATIONS:
            losses = [round(float(x), 5) for x in made.evaluate(carry)]
            yield {
                "step": done,
                "seconds": round(time.perf_counter() - start, 1),
                "losses": losses,
                "largest logit": float(np.max(jax.device_get(largest))),
            }
            largest = []
            if time.perf_counter() > end:
                return


def second_time(run: Callable[[], Any]) -> float:
    """In seconds; the first time compiles."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def muonclip_rate(rates: Sequence[float]) -> float:
    return rule(sorted(rates)[len(rates) // 2])


def program(size: Size, text: Text) -> Program:
    run, rates = size.run, jnp.array(size.rates)
    batches = text.held_out("report", size.held_out, run.context)
    batches = jnp.asarray(batches.reshape(-1, run.batch, run.context + 1))
    content, key = jnp.asarray(text.train), jax.random.key(run.seed)

    def adamw(rate: Any) -> optax.GradientTransformationExtraArgs:
        tx = optax.adamw(rate, 0.9, 0.95, weight_decay=0.1)
        return optax.with_extra_args_support(tx)

    plain, recorded = (loss_of(run.but(statistics=x)) for x in (False, True))
    of_adamw, of_muonclip = step_of(plain, adamw), step_of(recorded, mc.muonclip)

    @jax.jit
    def init() -> Any:
        model = Transformer(run, nnx.Rngs(run.seed))
        params = nnx.state(model, nnx.Param)
        carries = jax.vmap(lambda rate: (params, adamw(rate).init(params)))(rates)
        return carries, (params, mc.muonclip(muonclip_rate(size.rates)).init(params))

    @jax.jit
    def train(content: jax.Array, carry: Any, first: Any, factors: Any) -> Any:
        def steps(carry: Any, at: Any) -> Any:
            of_rates, of_rule = carry
            i, factor = at
            starts = jax.random.randint(
                jax.random.fold_in(key, i), (run.batch,), 0, len(content) - run.context
            )
            places = starts[:, None] + jnp.arange(run.context + 1)
            tokens = content[places].astype(jnp.int32)
            each = jax.vmap(of_adamw, in_axes=(0, None, 0))
            of_rates, _ = each(of_rates, tokens, factor * rates)
            rate = factor * muonclip_rate(size.rates)
            of_rule, stats = of_muonclip(of_rule, tokens, rate)
            return (of_rates, of_rule), largest_logits(stats).max()

        carry, logits = jax.lax.scan(
            steps, carry, (first + jnp.arange(len(factors)), factors)
        )
        return carry, logits.max()

    @jax.jit
    def evaluate(carry: Any) -> jax.Array:
        def losses(tokens: jax.Array) -> jax.Array:
            (params, _), (of_rule, _) = carry
            each = jax.vmap(lambda params: plain(params, tokens)[0])(params)
            return jnp.append(each, plain(of_rule, tokens)[0])

        return jax.lax.map(losses, batches).mean(0)

    return Program(init, functools.partial(train, content), evaluate)


def loss_of(run: Run) -> Callable[..., Any]:
    """The mean loss and the largest logits, with activations in bfloat16."""
    model = nnx.eval_shape(lambda: Transformer(run, nnx.Rngs(0)))
    graph, _, others = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(others)

    def loss(params: Any, tokens: jax.Array) -> Any:
        short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        model = nnx.merge(graph, short, others)
        logits, stats = nnx.capture(model, nnx.Intermediate)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return losses.mean(), stats

    return loss


def step_of(
    loss: Callable[..., Any], make: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """One step by the optimizer of a rate, which also returns the largest logits."""

    def step(carry: Any, tokens: jax.Array, rate: Any) -> tuple[Any, Any]:
        params, state = carry
        (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        update = make(rate).update
        updates, state = update(grads, state, params, attention_stats=stats)
        return (optax.apply_updates(params, updates), state), stats

    return step


def outcome(lines: Sequence[dict[str, Any]]) -> str:
    """The last losses, and the share of tokens where the curves cross."""
    about, *curve = lines
    steps, last = about["steps"], curve[-1]
    *of_adamw, _ = last["losses"]
    best = int(np.nanargmin(of_adamw))
    table = Table({"run": "", "held-out loss, nats per byte": ".4f"})
    for row in zip(about["runs"], last["losses"], strict=True):
        table.add(*row)
    path = [(line["step"] / steps, line["losses"][-1]) for line in curve]
    share = reached(path, of_adamw[best])
    *names, muonclip = about["runs"]
    said = [f"{about['bytes a parameter']:.1f} bytes a parameter, one seed"]
    said += [f"as long as {about['limit']} allows"]
    if last["step"] < steps:
        said += [f"ended at {last['step'] / steps:.0%}, before the rates had fallen"]
    if len(names) > 2 and best in (0, len(names) - 1):
        said += ["AdamW's best rate is at the edge: the best may be beyond it"]
    reaches = f"{muonclip} does not reach the last loss of {names[best]}"
    if not math.isnan(share):
        reaches = f"{muonclip} needs at most {share:.0%} of the tokens of {names[best]}"
        reaches += " (where the curves cross: an upper bound)"
    return "\n".join([table.markdown(), "", f"{reaches}. {'; '.join(said)}."])


if __name__ == "__main__":
    main()
