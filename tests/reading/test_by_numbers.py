"""Functions written to mislead a reading: nothing may be wrong without a word."""

import jax
import jax.numpy as jnp
import pytest
from adversaries import CASES
from by_numbers import verdict_of
from helpers import few

import muonclip_jax as mc


# Every fourth, but for what takes more than 1.5 seconds to read and judge.
LONG = {
    "a_temperature_for_each_head_of_counted_layers",
    "cache_before_own_keys",
    "channels_with_one_temperature",
    "delta_rule_by_a_solve_before_attention",
    "first_and_last_entries_of_a_head_are_its_query",
    "fused_by_a_convolution_of_one_by_one",
    "gated_by_keys_in_a_scan",
    "heads_by_their_place_in_a_group",
    "kernels_that_are_means_of_layers",
    "keys_and_their_means_in_one_softmax",
    "keys_and_values_of_two_layers",
    "keys_chosen_by_one_hot_rows_of_an_indexer",
    "learned_query_of_running_sums",
    "neighbours_by_multiply_and_sum",
    "one_token_with_a_key_for_all_heads",
    "queries_pooled_in_windows_that_overlap",
    "query_by_weight_norm",
    "random_features",
    "relative_keys_by_a_skew",
    "softmaxes_of_tiles_joined_by_logarithms",
    "sums_over_all_keys_before",
}
EVERY_DAY = [name for name in list(CASES)[::4] if name not in LONG]


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
