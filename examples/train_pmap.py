"""Trains the transformer of train_lm.py under `jax.pmap`.

    python examples/train_pmap.py                              # on all devices here
    python examples/train_pmap.py --simulate-devices 4    # on any CPU

Every device has all parameters and a part of the batch. By `axis_name` MuonClip
averages the gradients over the devices, lets each orthogonalize its share of the
matrices, and takes the maximum of the statistics. New code does better with `jax.jit`
and train_sharded.py.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from corpus import Corpus
from flax import nnx
from tqdm import trange
from train_lm_loop import loss_fn, make_model, make_optimizer
from train_lm_options import add_training_arguments

import muonclip_jax as mc


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training_arguments(parser)
    parser.add_argument("--simulate-devices", type=int, help="on CPU")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    if args.simulate_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.simulate_devices)
    losses = train(args, jax.local_devices())
    print(f"final loss {losses[-1]:.3f} on {jax.local_device_count()} devices")


def train(args: argparse.Namespace, devices: Sequence[Any]) -> list[float]:
    """Returns the loss of every step."""
    count = len(devices)
    if args.batch_size % count:
        raise SystemExit(
            f"--batch-size {args.batch_size} is not divisible by {count} devices"
        )
    corpus = Corpus(args.data)
    tx = make_optimizer("muonclip", args, axis_name="devices")
    graphdef = nnx.graphdef(nnx.eval_shape(functools.partial(make_model, args)))
    pmap = functools.partial(jax.pmap, axis_name="devices", devices=devices)
    create = pmap(lambda _: create_state(args, tx))
    step_function = pmap(
        functools.partial(train_step, graphdef, tx), donate_argnums=(0, 1)
    )
    params, opt_state = create(np.arange(count))  # the same on every device
    losses = []
    for step in trange(args.steps):
        tokens = corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
        parts = tokens.reshape(count, -1, args.context + 1)
        params, opt_state, loss = step_function(params, opt_state, parts)
        losses.append(loss)
    return [loss[0].item() for loss in losses]


def create_state(
    args: argparse.Namespace, tx: optax.GradientTransformation
) -> tuple[Any, optax.OptState]:
    params = nnx.to_pure_dict(nnx.state(make_model(args)))
    return params, tx.init(params)


def train_step(graphdef, tx, params, opt_state, tokens):
    def loss_of(params):
        return loss_fn(nnx.merge(graphdef, params), tokens)

    gradient = jax.value_and_grad(mc.record_attention(loss_of), has_aux=True)
    (loss, stats), grads = gradient(params)
    loss = jax.lax.pmean(loss, "devices")
    updates, opt_state = tx.update(grads, opt_state, params, attention_stats=stats)
    return optax.apply_updates(params, updates), opt_state, loss


if __name__ == "__main__":
    main()
