"""Trains the transformer of train_lm.py on many devices with sharded MuonClip.

    python examples/train_sharded.py --distributed         # on every host of a cluster
    python examples/train_sharded.py --fsdp 4 --tensor 2   # on the 8 devices of a host
    python examples/train_sharded.py --simulate-devices 8  # on a CPU
    python examples/train_sharded.py --num-processes 2     # two processes on a CPU
    python examples/train_sharded.py --resume              # continue a killed run

Parameters and momenta are sharded over both axes of the mesh, the batch over "fsdp".
`--out`, a folder that all hosts share, holds the checkpoints and `losses.jsonl`, which
has one line for each step.

A killed run can continue on any number of devices, in any mesh. Batches depend on the
seed and the step alone, so the losses are those of an uninterrupted run: bit for bit on
the same mesh, up to the rounding of float32 sums on another.

If a process dies, all others exit within 60 seconds with a message and exit code 1.
Nothing restarts them: run the same command with `--resume`.
"""

import argparse
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from checkpoints import Checkpoints
from corpus import Corpus
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_log import LossLog
from processes import launch, launch_on_host
from sharding import BATCH, check_divides, make_mesh, mesh_shape, shardings_of
from tqdm import tqdm
from train_lm_loop import loss_fn, make_model, make_optimizer, Metrics
from train_lm_options import add_training_arguments, positive

import muonclip_jax as mc


# What a resumed run need not have in common with the one it continues.
FREE = {"fsdp", "tensor", "log_every", "checkpoint_every", "keep", "out"}
FREE |= {"simulate_devices", "num_processes", "distributed", "resume"}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training_arguments(parser)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--fsdp", type=positive, help="devices on this axis; default: the rest")
    add("--tensor", type=positive, default=1)
    add("--log-every", type=positive, default=10)
    add("--checkpoint-every", type=positive, default=50)
    add("--keep", type=positive, default=1, help="checkpoints; default: %(default)s")
    add("--out", type=Path, default=Path("runs/train_sharded"))
    add("--simulate-devices", type=positive, help="on the CPU of this host")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--num-processes", type=positive, default=1, help="to start here, on CPU"
    )
    hosts.add_argument(
        "--distributed", action="store_true", help="this is one of several hosts"
    )
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    if args.num_processes > 1:
        count = args.simulate_devices = args.simulate_devices or args.num_processes
        check_divides("simulate-devices", count, "num-processes", args.num_processes)
        mesh_shape(args, count)  # complains once, not in every process
        return launch(functools.partial(train, args), args.num_processes)
    if args.distributed:
        return launch_on_host(functools.partial(train, args))
    train(args)


def train(args: argparse.Namespace) -> None:
    if args.simulate_devices:
        jax.config.update("jax_platforms", "cpu")
        here = args.simulate_devices // args.num_processes
        jax.config.update("jax_num_cpu_devices", here)
    mesh = make_mesh(mesh_shape(args, jax.device_count()))
    saving: dict[str, Any] = dict(resume=args.resume, keep=args.keep)
    with (
        jax.set_mesh(mesh),
        Checkpoints(args.out, settings(args), **saving) as checkpoints,
    ):
        take_steps(args, mesh, checkpoints)


def settings(args: argparse.Namespace) -> dict[str, str]:
    return {k: str(v) for k, v in vars(args).items() if k not in FREE}


def take_steps(args: argparse.Namespace, mesh: Mesh, checkpoints: Checkpoints) -> None:
    corpus = Corpus(args.data)
    create, step_function = compile_for(mesh, args)
    saved = checkpoints.restore(create.eval_shape())
    first, state = (saved.step, saved.state) if saved else (0, create())
    log, pending = LossLog(args.out / "losses.jsonl", first), []
    for step in (bar := progress_bar(first, args.steps)):
        tokens = load_batch(corpus, args, step, mesh)
        state, metrics = step_function(state, tokens)
        pending.append(metrics)
        last = step + 1 == args.steps
        save = last or (step + 1) % args.checkpoint_every == 0
        if save or (step + 1) % args.log_every == 0:
            seen = records(step + 1, pending)
            log.append(seen)
            bar.set_postfix_str("loss {loss:.3f}".format(**seen[-1]), refresh=False)
            pending = []
        if save:
            checkpoints.save(step + 1, state)


def progress_bar(first: int, steps: int) -> tqdm:
    only_here = jax.process_index() == 0
    tqdm.set_lock(threading.RLock())  # a killed process would leave a semaphore
    return tqdm(range(first, steps), initial=first, total=steps, disable=not only_here)


class State(NamedTuple):
    params: Any
    opt_state: Any


def compile_for(mesh: Mesh, args: argparse.Namespace) -> tuple[Any, Any]:
    """The functions that make a state and take a step, with all arrays in place."""
    make = functools.partial(make_model, args, activations=BATCH)
    model = nnx.eval_shape(make)
    tx = make_optimizer("muonclip", args, shardings=shardings_of(pure(model), mesh))
    create = functools.partial(create_state, make, tx)
    shardings = shardings_of(jax.eval_shape(create), mesh)
    everywhere = NamedSharding(mesh, P())
    step = functools.partial(train_step, nnx.graphdef(model), tx)
    return jax.jit(create, out_shardings=shardings), jax.jit(
        step, donate_argnums=0, out_shardings=(shardings, everywhere)
    )


def create_state(
    make: Callable[[], nnx.Module], tx: optax.GradientTransformation
) -> State:
    params = pure(make())
    return State(params, tx.init(params))


def pure(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model))


def train_step(
    graphdef: Any,
    tx: optax.GradientTransformationExtraArgs,
    state: State,
    tokens: jax.Array,
) -> tuple[State, Metrics]:
    def loss_of(params):
        return loss_fn(nnx.merge(graphdef, params), tokens)

    gradient = jax.value_and_grad(mc.record_attention(loss_of), has_aux=True)
    (loss, stats), grads = gradient(state.params)
    updates, opt_state = tx.update(
        grads, state.opt_state, state.params, attention_stats=stats
    )
    params = optax.apply_updates(state.params, updates)
    seen = functools.partial(optax.tree.get, opt_state)
    metrics = Metrics(loss, seen("max_logit"), seen("num_clipped"))
    return State(params, opt_state), metrics


def load_batch(
    corpus: Corpus, args: argparse.Namespace, step: int, mesh: Mesh
) -> jax.Array:
    """Every process reads the rows of its own devices."""

    def rows(index: Any) -> np.ndarray:
        size = args.batch_size, args.context
        return corpus.batch(*size, seed=args.seed, step=step, rows=index[0])

    shape = args.batch_size, args.context + 1
    return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), rows)


def records(last_step: int, pending: list[Metrics]) -> list[dict[str, Any]]:
    """Waits for the steps and returns their metrics, the last one's at the end."""
    first = last_step - len(pending) + 1
    return [
        {"step": step} | {k: v.item() for k, v in metrics._asdict().items()}
        for step, metrics in enumerate(jax.device_get(pending), first)
    ]


if __name__ == "__main__":
    main()
