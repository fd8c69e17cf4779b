"""What `reproduce.py` measures: experiments, and what they need to train models.

run -> training -> lab -> one module per experiment -> section -> report.

The miniature of Kimi K2 and the source code as a text stand in the examples too. These
are the evidence's own, since results are kept by settings and text alone: an edit to an
example must not change what they mean.
"""
