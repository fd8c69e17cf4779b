"""Reinforcement learning in small: PPO on environments of gymnax, GRPO on brackets.

`play` takes a `Run` whose `task` is one of `TASKS`; its steps are updates. Its
losses are rewards with the sign turned, so that rates are tuned as elsewhere.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .layers import linear
from .model import Block, Transformer
from .optimizers import hyperparameters, make_optimizer
from .run import Run


ENVIRONMENTS = ("CartPole-v1", "Acrobot-v1")  # of gymnax
MEMORY = 4  # observations that the network sees
COPIES, STEPS, EPOCHS, PARTS = 16, 64, 4, 4  # of one update
DISCOUNT, TRACE, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


class Policy(nnx.Module):
    """Logits of the actions and a value, from the last observations.

    Two hidden matrices, or with `model="attention"` the lab's block over them.
    """

    def __init__(self, run: Run, size: int, actions: int, rngs: nnx.Rngs):
        width, self.attends = run.width, run.model == "attention"
        inputs = size * (1 if self.attends else MEMORY)
        self.first = linear(inputs, width, rngs)
        if self.attends:
            self.block = Block(run, rngs)
        else:
            self.up, self.down = (linear(width, width, rngs) for _ in range(2))
        self.head = linear(width, actions + 1, rngs)

    def __call__(self, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(..., memory, size)` to `(..., actions)` and `(...)`."""
        if self.attends:
            flat = seen.reshape(-1, *seen.shape[-2:])
            x = self.block(self.first(flat))[:, -1].reshape(*seen.shape[:-2], -1)
        else:
            x = jnp.tanh(self.first(seen.reshape(*seen.shape[:-2], -1)))
            x = jnp.tanh(self.down(jnp.tanh(self.up(x))))
        out = self.head(x)
        return 0.1 * out[..., :-1], out[..., -1]


class Played(NamedTuple):
    """What the copies of an environment saw and did, `(steps, copies, ...)`."""

    memory: jax.Array
    actions: jax.Array
    logs: jax.Array
    values: jax.Array
    rewards: jax.Array
    ends: jax.Array


class Algorithm(NamedTuple):
    """The compiled functions that runs of one program share."""

    update: Callable[..., tuple[Any, jax.Array]]  # carry, at, key: and the mean reward
    begin: Callable[[jax.Array], Any]  # key


def play(run: Run) -> dict[str, Any]:
    """Ten looks at the mean reward: that of an episode, or of a completed sequence."""
    started = time.perf_counter()
    update, begin = TASKS[run.task](run.program)
    key, rewards = jax.random.key(run.seed), []
    carry = begin(key)
    for i, at in enumerate(hyperparameters(run)):
        carry, reward = update(carry, at, jax.random.fold_in(key, i))
        rewards.append(reward)
    of = np.asarray(jax.device_get(rewards), np.float64)
    # Before an episode has ended, the first that does.
    known = of[np.isfinite(of)]
    of = np.where(np.isfinite(of), of, known[0] if len(known) else 0.0)
    parts = np.array_split(of, 10)
    ends = np.cumsum([len(part) for part in parts])
    curve = [
        [int(end), -part.mean(), -part.mean()]
        for end, part in zip(ends, parts, strict=True)
    ]
    return {
        "curve": [[end, *(float(f"{x:.5g}") for x in of)] for end, *of in curve],
        "seconds": round(time.perf_counter() - started, 1),
    }


@functools.lru_cache(maxsize=16)
def ppo(run: Run) -> Algorithm:
    """PPO (arXiv:1707.06347), for all runs of one program."""
    # Here, since its releases want a JAX below 0.12, and the rest does not.
    import gymnax  # pyright: ignore[reportMissingImports]

    return ppo_in(run, *gymnax.make(run.task))


def ppo_in(run: Run, environment: Any, constants: Any) -> Algorithm:
    """`environment` has gymnax's `reset`, and its `step`, which begins anew itself."""
    reset = jax.vmap(lambda key: environment.reset(key, constants))
    move = jax.vmap(lambda *at: environment.step(*at, constants))
    size = jax.eval_shape(reset, jax.random.split(jax.random.key(0), 1))[0].size
    actions = environment.num_actions
    policy = functools.partial(Policy, run, size, actions)
    graph = nnx.split(nnx.eval_shape(lambda: policy(nnx.Rngs(0))))[0]

    def keys(key: jax.Array) -> jax.Array:
        return jax.random.split(key, COPIES)

    @jax.jit
    def begin(key: jax.Array):
        params = nnx.split(policy(nnx.Rngs(key)))[1]
        seen, states = reset(keys(key))
        memory = jnp.repeat(seen.reshape(COPIES, 1, -1), MEMORY, axis=1)
        world = memory, states, jnp.zeros(COPIES)
        start = make_optimizer(run, hyperparameters(run)[0]).init(params)
        # At last the mean return of the episodes that ended.
        return params, start, world, jnp.float32(jnp.nan)

    def of_policy(params: Any, memory: jax.Array):
        return nnx.merge(graph, params)(memory)

    def one_step(params: Any, carry: Any, key: jax.Array):
        memory, states, returns = carry
        choose, go = jax.random.split(key)
        logits, values = of_policy(params, memory)
        actions = jax.random.categorical(choose, logits)
        new, states, rewards, *ends, _ = move(keys(go), states, actions)
        # Fell or was cut off: what comes after is counted as nothing, in both.
        ended, returns = ends[0] | ends[1], returns + rewards
        new = new.reshape(COPIES, 1, -1)
        moved = jnp.concatenate([memory[:, 1:], new], axis=1)
        again = jnp.repeat(new, MEMORY, axis=1)
        logs = _log(logits, actions)
        played = Played(memory, actions, logs, values, rewards, ended)
        memory = jnp.where(ended[:, None, None], again, moved)
        return (memory, states, jnp.where(ended, 0, returns)), (played, returns)

    def loss_fn(params: Any, seen: Played, gains: jax.Array):
        logits, values = of_policy(params, seen.memory)
        ratio = jnp.exp(_log(logits, seen.actions) - seen.logs)
        scaled = (gains - gains.mean()) / (gains.std() + 1e-8)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        policy = -jnp.minimum(ratio * scaled, clipped * scaled).mean()
        value = jnp.square(values - seen.values - gains).mean()
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return policy + 0.5 * value - ENTROPY * entropy

    @jax.jit
    def update(carry: Any, at: Any, key: jax.Array):
        params, state, world, last = carry
        keys = jax.random.split(key, STEPS + EPOCHS)
        step = functools.partial(one_step, params)
        world, (seen, returns) = jax.lax.scan(step, world, keys[:STEPS])
        gains = advantages(seen, of_policy(params, world[0])[1])
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, gains))
        tx = make_optimizer(run, at)

        def one_part(carry: Any, places: jax.Array):
            params, state = carry
            part = jax.tree.map(lambda x: x[places], flat)
            grads = jax.grad(loss_fn)(params, *part)
            grads, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        orders = [jax.random.permutation(k, STEPS * COPIES) for k in keys[STEPS:]]
        places = jnp.stack(orders).reshape(EPOCHS * PARTS, -1)
        (params, state), _ = jax.lax.scan(one_part, (params, state), places)
        count = seen.ends.sum()
        mean = (returns * seen.ends).sum() / jnp.maximum(count, 1)
        last = jnp.where(count > 0, mean, last)
        return (params, state, world, last), last

    return Algorithm(update, begin)


def advantages(seen: Played, value: jax.Array) -> jax.Array:
    """Generalized advantage estimates; `value` is that of where the steps ended."""

    def back(carry: Any, at: Any):
        gain, later = carry
        value, reward, end = at
        goes_on = 1.0 - end
        error = reward + DISCOUNT * later * goes_on - value
        gain = error + DISCOUNT * TRACE * goes_on * gain
        return (gain, value), gain

    steps = (seen.values, seen.rewards, seen.ends.astype(jnp.float32))
    start = (jnp.zeros_like(value), value)
    return jax.lax.scan(back, start, steps, reverse=True)[1]


BRACKETS = np.frombuffer(b"()[]", np.uint8).astype(np.int32)  # opening ones are even
GIVEN, WRITTEN, PROMPTS, GROUP = 4, 8, 16, 16


@functools.lru_cache(maxsize=16)
def grpo(run: Run) -> Algorithm:
    """GRPO (arXiv:2402.03300), for all runs of one program.

    The task checks itself: beginnings of two kinds of brackets, to be completed so that
    all are closed in order. The reward is 1 or 0. No model of reference holds it.
    """
    abstract = nnx.eval_shape(lambda: Transformer(run, nnx.Rngs(0)))
    graph = nnx.split(abstract, nnx.Param)[0]

    @jax.jit
    def begin(key: jax.Array):
        params = nnx.split(Transformer(run, nnx.Rngs(key)), nnx.Param)[1]
        return params, make_optimizer(run, hyperparameters(run)[0]).init(params)

    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(tokens)[..., BRACKETS]

    def write(params: Any, prompts: jax.Array, key: jax.Array):
        """One token after the other; `tokens` are brackets by number."""
        tokens = jnp.pad(prompts, ((0, 0), (0, WRITTEN)))

        def one(tokens: jax.Array, at: Any):
            i, key = at
            logits = logits_of(params, jnp.asarray(BRACKETS)[tokens])[:, GIVEN + i - 1]
            return tokens.at[:, GIVEN + i].set(
                jax.random.categorical(key, logits)
            ), None

        steps = jnp.arange(WRITTEN), jax.random.split(key, WRITTEN)
        return jax.lax.scan(one, tokens, steps)[0]

    def logs_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = logits_of(params, jnp.asarray(BRACKETS)[tokens])
        return _log(logits[:, GIVEN - 1 : -1], tokens[:, GIVEN:])

    def loss_fn(params: Any, tokens: jax.Array, logs: jax.Array, gains: jax.Array):
        ratio = jnp.exp(logs_of(params, tokens) - logs)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.minimum(ratio * gains, clipped * gains).mean()

    @jax.jit
    def update(carry: Any, at: Any, key: jax.Array):
        params, state = carry
        ask, answer = jax.random.split(key)
        prompts = jnp.repeat(beginnings(ask, PROMPTS), GROUP, axis=0)
        tokens = write(params, prompts, answer)
        rewards = jax.vmap(is_closed)(tokens).astype(jnp.float32)
        groups = rewards.reshape(PROMPTS, GROUP)
        mean, spread = (f(groups, axis=1, keepdims=True) for f in (jnp.mean, jnp.std))
        gains = ((groups - mean) / (spread + 1e-4)).reshape(-1, 1)
        logs, tx = logs_of(params, tokens), make_optimizer(run, at)
        for _ in range(2):
            grads = jax.grad(loss_fn)(params, tokens, logs, gains)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return (params, state), rewards.mean()

    return Algorithm(update, begin)


def beginnings(key: jax.Array, count: int) -> jax.Array:
    """`(count, given)`: opening brackets of both kinds."""
    return 2 * jax.random.bernoulli(key, 0.5, (count, GIVEN)).astype(jnp.int32)


def is_closed(tokens: jax.Array) -> jax.Array:
    """Whether every bracket closes the last one that is open, and none stays so."""

    def one(carry: Any, token: jax.Array):
        stack, depth, good = carry
        opens, kind = token % 2 == 0, token // 2
        fits = (depth > 0) & (stack[depth - 1] == kind)
        good = good & (opens | fits)
        stack = jnp.where(opens, stack.at[depth].set(kind), stack)
        return (stack, jnp.maximum(depth + jnp.where(opens, 1, -1), 0), good), None

    start = jnp.zeros(len(tokens) + 1, jnp.int32), jnp.int32(0), jnp.bool_(True)
    (_, depth, good), _ = jax.lax.scan(one, start, tokens)
    return good & (depth == 0)


def _log(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logs, chosen[..., None], axis=-1)[..., 0]


TASKS = dict.fromkeys(ENVIRONMENTS, ppo) | {"brackets": grpo}
