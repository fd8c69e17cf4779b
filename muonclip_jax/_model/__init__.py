"""The attention layers of a model: which leaves carry which heads, and statistics.

In: a tree of params or of statistics. Out: layers, and statistics by their path.
Imports only `_parameters`.
"""
