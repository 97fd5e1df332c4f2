"""The acceptance checklist of a deployment plan, run against a server: `dsjax accept`.

Definitions are in `docs/accept.md`. Nothing here imports JAX.
"""
