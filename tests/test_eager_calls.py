"""Calls outside of `jit`: nothing compiles twice for the same shapes, nothing leaks."""

import functools
import gc
import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import few, normal, ones

import muonclip_jax as mc


def attention(*stack):
    def projection(seed):
        kernel, bias = normal(seed, *stack, 8, 2, 4), normal(seed + 1, *stack, 2, 4)
        return {"kernel": kernel, "bias": bias}

    return {"query": projection(20), "key": projection(22), "value": projection(24)}


#: Two matrices of one shape, tall and wide ones, stacks, heads and vectors.
PARAMS = {
    "attn": attention(),
    "layers": {"attn": attention(3)},
    "up": {"kernel": normal(2, 8, 16), "bias": normal(3, 16)},
    "down": {"kernel": normal(4, 16, 8), "bias": normal(5, 8)},
    "embed": {"embedding": normal(6, 11, 8)},
    "large": {"kernel": normal(7, 90, 80)},
    "back": {"kernel": normal(8, 80, 90)},
    "output": {"kernel": normal(8, 8, 11)},
}
STATS = {
    "attn": {"max_logits": jnp.asarray([90.0, 400.0])},
    "layers": {"attn": {"max_logits": jnp.asarray([[90.0, 400.0]] * 3)}},
}
MATRICES = {"a": normal(9, 6, 10), "b": normal(10, 10, 6), "c": normal(11, 4, 6, 10)}
#: Updates of transformations that are made once, as a training loop makes them.
MADE_ONCE = {
    "muon": (mc.muon(1e-2), PARAMS, {}),
    "muon, all options": (
        mc.muon(1e-2, mu_dtype="int8", neuron_b2=0.9, cautious_weight_decay=True),
        PARAMS,
        {},
    ),
    "scale_by_muon": (mc.scale_by_muon(), MATRICES | {"c": None}, {}),
    "normalize_neurons": (mc.normalize_neurons(), {"a": MATRICES["a"]}, {}),
    "add_cautious_decayed_weights": (
        mc.add_cautious_decayed_weights(0.1),
        MATRICES,
        {},
    ),
    "muonclip": (mc.muonclip(1e-2), PARAMS, {"attention_stats": STATS}),
    "qk_clip": (
        optax.chain(optax.sgd(0.1), mc.qk_clip()),
        PARAMS,
        {"attention_stats": STATS},
    ),
    "multi_steps": (
        mc.multi_steps(mc.muonclip(1e-2), 2),
        PARAMS,
        {"attention_stats": STATS},
    ),
}
compilations = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if "backend_compile" in event:
        compilations.append(event)


def updates(name):
    tx, params, extra = MADE_ONCE[name]
    state = tx.init(params)
    return lambda: tx.update(params, state, params, **extra)


def numbers():
    tx = mc.muonclip(1e-2)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, attention_stats=STATS)
    return functools.partial(mc.scalars, state, PARAMS, heads=True)


QKV = [normal(i, 2, 9, heads, 3) for i, heads in enumerate((4, 2, 2))]
IDS = np.arange(9, dtype=np.int32) // 4
ATTENTION = {
    "plain": {},
    "window": dict(is_causal=True, local_window_size=(3, 1)),
    "segments": dict(query_segment_ids=IDS, key_segment_ids=IDS),
    "mask": dict(mask=ones(2, 1, 1, 9, dtype=bool), bias=ones(4, 9, 9)),
}


def blockwise(**options):
    def loss(*qkv):
        out, stats = mc.blockwise_attention(*qkv, block_size=4, **options)
        return out.sum(), stats

    return jax.grad(loss, (0, 1, 2), has_aux=True)(*QKV)


#: What has no state, and what has one, made once.
ALL = {
    "clip_qk": lambda: lambda: mc.clip_qk(PARAMS, STATS),
    "scalars": numbers,
    **{name: functools.partial(updates, name) for name in MADE_ONCE},
    **{
        f"newton_schulz, {method}": lambda method=method: functools.partial(
            mc.newton_schulz, MATRICES["c"], method=method
        )
        for method in ("auto", "standard", "gram")
    },
}
for kind, options in ATTENTION.items():
    ALL[f"max_logits, {kind}"] = functools.partial(
        functools.partial, mc.max_logits, *QKV[:2], **options
    )
    ALL[f"blockwise, {kind}"] = functools.partial(
        functools.partial, blockwise, **options
    )


#: `muon`'s update is a part of `muonclip`'s; others take longer.
@pytest.mark.parametrize("name", few(ALL, "muonclip", "scalars", "clip_qk"))
def test_a_second_call_compiles_nothing(name):
    call = ALL[name]()
    jax.block_until_ready(jax.tree.leaves(call()))
    before = len(compilations)
    for _ in range(2):
        jax.block_until_ready(jax.tree.leaves(call()))
    assert len(compilations) == before
    assert before  # so that the listener is known to hear


@pytest.mark.more
def test_memory_stays_over_100_calls():
    """A program that each call compiled took 2 MB and more of each."""
    made = [make() for make in ALL.values()]
    for calls in (3, 100):
        before = resident()
        for call in made:
            for _ in range(calls):
                jax.block_until_ready(jax.tree.leaves(call()))
        gc.collect()
    assert resident() - before < 50 * 2**20


def resident() -> int:
    """Bytes of memory in use, where Linux says it, or else the most so far."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
