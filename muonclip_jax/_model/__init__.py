"""The knowledge of a model: its matrices, labels and attention layers; and statistics.

In: the user's arguments and a tree of params, or of statistics. Out: the verdict on
each leaf, layers, and statistics by their path. Imports `_parameters`, and what is
below it.
"""
