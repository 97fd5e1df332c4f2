"""Matrices in four bits: the formats NVFP4 and MXFP4, their sizes, and how they are encoded and decoded. docs/fp4.md has the design."""
