"""The labs of `tools/lab.py`."""
