"""What `reproduce.py` measures: experiments, and what they need to train models.

run -> training -> lab -> one module per experiment -> section -> report.
"""
