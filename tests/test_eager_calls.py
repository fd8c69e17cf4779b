"""Calls outside of `jit`: nothing compiles twice for the same shapes, nothing leaks."""

import functools
import gc
import pathlib
import resource

import jax
import numpy as np
import optax
import pytest
from helpers import few, normal, ones
from test_strict_promotion import CALLS, MATRICES, PARAMS, STATS

import muonclip_jax as mc


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
#: Flax compiles for itself, and so does Pallas where it interprets a kernel; numbers of
#: `CALLS` begin with an optimizer of their own, and those of attention are many.
ELSEWHERE = {"attention_fn", "splash_attention", "scalars"}
ELSEWHERE |= {"max_logits", "blockwise_attention"}
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


def calls():
    for name in MADE_ONCE:
        yield name, functools.partial(updates, name)
    yield "scalars", numbers
    for name, of_name in CALLS.items():
        if name not in MADE_ONCE and name not in ELSEWHERE:
            for i, call in enumerate(of_name):
                yield f"{name}, {i}", lambda call=call: call
    for kind, options in ATTENTION.items():
        logits = functools.partial(mc.max_logits, *QKV[:2], **options)
        yield f"max_logits, {kind}", lambda call=logits: call
        attend = functools.partial(blockwise, **options)
        yield f"blockwise, {kind}", lambda call=attend: call


ALL = dict(calls())


#: `muon`'s update is a part of `muonclip`'s; others take up to 12 seconds.
@pytest.mark.parametrize("name", few(ALL, "muonclip", "scalars", "clip_qk, 0"))
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
    x = normal(0, 1, 9, 2, 4)
    made = [ALL[name]() for name in (*MADE_ONCE, "scalars")]
    made += [
        lambda: mc.clip_qk(PARAMS, STATS),
        lambda: mc.newton_schulz(MATRICES["c"]),
        lambda: mc.max_logits(x, x),
        lambda: mc.blockwise_attention(*[x] * 3, block_size=4),
    ]
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
