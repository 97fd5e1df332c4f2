"""Requests become tokens: scheduling, pages and text in plain Python; executor, device state and sampler in JAX.

`schedule`, `text` and `contract` import no JAX, so that the planner can run the same scheduler on virtual time. Between them and the
devices' rooms are `commands`, plain data that say what to compute, and `executor`, the protocol of what computes it.
"""
