"""Serve, dry-run and plan DeepSeek-V3/R1-family models with JAX on any device mesh."""
