"""Functions written to mislead a reading: nothing may be wrong without a word."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from adversaries import CASES
from by_numbers import verdict_of
from helpers import few

import muonclip_jax as mc


# Of every file some that take less than 1.5 seconds to read and judge.
EVERY_DAY = {
    "adapters_alone_on_a_kernel_of_the_arguments",
    "batch_and_heads_in_one_axis",
    "buckets_by_signs",
    "codes_by_one_hot_rows_with_another_gradient",
    "divided_after_the_values",
    "each_gated_by_the_other",
    "experts_with_a_capacity",
    "flax_of_eight_bits",
    "full_matrices_around_diagonal_states",
    "fused_query_with_a_gate_of_its_own",
    "grouped_convolution",
    "input_of_the_query_gated_by_the_keys_kernel",
    "kernel_that_is_a_mean_of_several",
    "kernels_mixed_by_a_softmax",
    "kernels_of_query_and_key_multiplied_first",
    "keys_by_their_distance",
    "largest_of_a_gated_layer",
    "levels_of_a_table",
    "logits_split_by_heads",
    "mask_among_the_arguments",
    "memory_of_a_matrix_with_exponential_gates",
    "nearest_of_learned_points",
    "normalized_with_gains_for_each_head",
    "patches_of_keys_averaged",
    "pooled_by_one_learned_vector",
    "positions_for_heads_between_devices",
    "retention",
    "solve_of_a_parameter",
    "squared_relus",
    "sticks_that_break",
    "stopped_on_one_way_of_two",
    "summand_of_the_query_of_pooled_tokens",
    "three_retrievals_with_a_temperature",
    "tied_query_and_key_with_gains",
    "tokens_that_are_generated",
    "values_of_the_greatest_logit",
    "with_a_sink",
    "without_nans",
}


@pytest.mark.parametrize("name", few(CASES, *EVERY_DAY))
def test_what_is_read_is_right_and_what_is_not_is_said(name):
    verdict = verdict_of(CASES[name])
    assert not verdict.is_fault, f"{verdict.kind}: {verdict.why}"


@pytest.mark.parametrize("rest", ["", "_under_the_largest", "_and_a_logarithm"])
def test_the_query_is_what_meets_several_keys(rest):
    case = CASES[f"keys_by_their_distance{rest}"]
    (layer,) = mc.read_model(case.fun, case.params, *case.args).attention
    query, key = layer.query, layer.key
    assert ([x.path for x in query], [x.path for x in key]) == (["q"], ["k"])


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


def _of_more_heads(read_model):
    def changed(*args):
        reading = read_model(*args)
        layers = (x._replace(shape=(*x.shape[:-1], 9)) for x in reading.layers)
        return dataclasses.replace(reading, layers=tuple(layers))

    return changed


WRONG = [
    ("clip_qk", _unclipped), ("clip_qk", _clipped_too_far), ("clip_qk", _values_too),
    ("record_attention", _more), ("record_attention", _swapped),
    ("record_attention", _other_value), ("record_attention", _other_slope),
    ("param_labels", _relabeled), ("describe", _without_keys),
    ("read_model", _key_stays), ("read_model", _of_more_heads),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), few(WRONG, *WRONG[::4]))
def test_the_judge_sees_what_is_wrong(name, change, monkeypatch):
    monkeypatch.setattr(mc, name, change(getattr(mc, name)))
    assert verdict_of(CASES["plain"]).kind == "wrong"
