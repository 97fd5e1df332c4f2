"""Faster forms of the parts that cost most, by platform, beside the plain JAX forms that define them; see ``table.py``."""
