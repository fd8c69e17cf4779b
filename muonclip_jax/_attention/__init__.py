"""Attention that records its largest logits.

In: queries, keys, values. Out: attention's output and one statistic per head.
Imports `_model` for the name of the statistic and `_parameters` for names and paths;
only `attention_fn` imports Flax.
"""
