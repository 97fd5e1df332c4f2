"""Ahead-of-time compilation of the serving step at full size, for machines that are not there, and what its program says."""
