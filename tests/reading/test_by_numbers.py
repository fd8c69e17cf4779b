"""Functions written to mislead a reading: nothing may be wrong without a word."""

import re

import jax
import jax.numpy as jnp
import pytest
from adversaries import CASES
from by_numbers import verdict_of
from helpers import few

import muonclip_jax as mc


# A reading and its judgment take half a second, those of these names more than 1.5.
LONG = re.compile("device|associative_scan")
LONGER = [
    "a_temperature_for_each_layer_backwards",
    "bank_for_all_examples_after_own_keys",
    "cache_in_a_tile_of_its_own",
    "channels_with_a_temperature",
    "edges_by_multiply_and_sum",
    "edges_of_each_example",
    "fused_with_the_mlp",
    "heads_backwards_and_keys_in_turn",
    "heads_in_a_fori_loop",
    "keys_and_their_means_with_a_sink_between",
    "keys_chosen_by_places_of_an_indexer",
    "keys_picked_one_by_one",
    "latent_with_rotary_parts",
    "latents_are_the_queries",
    "learned_prefix_of_keys_and_values",
    "logarithms_of_running_sums",
    "nearest_of_a_bank_alone",
    "neighbours_by_multiply_and_sum",
    "ordinary_differential_equation",
    "pool_over_one_token",
    "queries_and_keys_one_by_one",
    "values_of_experts_that_are_mixed_after_attention",
    "values_of_the_largest_keys",
    "windows_that_overlap",
]
EVERY_DAY = [
    name for name in list(CASES)[::2] if not (LONG.search(name) or name in LONGER)
]


@pytest.mark.parametrize("name", few(CASES, *EVERY_DAY))
def test_what_is_read_is_right_and_what_is_not_is_said(name):
    verdict = verdict_of(CASES[name])
    assert not verdict.is_fault, f"{verdict.kind}: {verdict.why}"


def _unclipped(clip):
    return lambda params, *args, **options: params


def _clipped_too_far(clip):
    def wrong(params, stats, threshold, **options):
        return clip(params, stats, 0.99 * threshold, **options)

    return wrong


def _values_too(clip):
    def wrong(params, *args, **options):
        return {**clip(params, *args, **options), "v": 0.9 * params["v"]}

    return wrong


def _recorded(change):
    def of(record):
        return lambda fun: lambda *args: change(*record(fun)(*args))

    return of


_more = _recorded(lambda out, stats: (out, jax.tree.map(lambda x: 1.01 * x, stats)))
_swapped = _recorded(lambda out, stats: (out, jax.tree.map(jnp.flip, stats)))
_other_value = _recorded(lambda out, stats: (out + 1, stats))
_other_slope = _recorded(
    lambda out, stats: (jax.lax.stop_gradient(out) + 0 * out, stats)
)


def _relabeled(labels):
    return lambda *args, **options: {**labels(*args, **options), "v": "vector"}


def _without_keys(describe):
    return lambda *args, **options: describe(*args, **options).replace(
        "key, 3 heads", "-"
    )


def _key_stays(read_model):
    class Changed:
        def __init__(self, *args):
            self.reading = read_model(*args)

        def __getattr__(self, name):
            return getattr(self.reading, name)

        def table(self, **options):
            table = str(self.reading.table(**options))
            return table.replace("; key", "; the key stays:")

    return Changed


WRONG = [
    ("clip_qk", _unclipped), ("clip_qk", _clipped_too_far), ("clip_qk", _values_too),
    ("record_attention", _more), ("record_attention", _swapped),
    ("record_attention", _other_value), ("record_attention", _other_slope),
    ("param_labels", _relabeled), ("describe", _without_keys),
    ("read_model", _key_stays),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), few(WRONG, *WRONG[::4]))
def test_the_judge_sees_what_is_wrong(name, change, monkeypatch):
    monkeypatch.setattr(mc, name, change(getattr(mc, name)))
    assert verdict_of(CASES["plain"]).kind == "wrong"
