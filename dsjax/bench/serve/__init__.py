"""Load on any OpenAI-compatible server, and what it answered: `dsjax bench serve`.

Definitions of all figures are in `docs/benchmarking.md`. Nothing here imports JAX.
"""
