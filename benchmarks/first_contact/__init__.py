"""What `accelerator.py` checks and times: each module makes rows of its tables."""
