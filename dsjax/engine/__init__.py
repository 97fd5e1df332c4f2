"""Requests become tokens: scheduling, pages and text in plain Python; executor, device state and sampler in JAX.

`request`, `pages`, `rank`, `scheduler`, `core`, `engine` and their kin import no JAX, so that the planner can run the
same scheduler on virtual time. `cache`, `device_state`, `mesh_executor`, `sampler` and `llm` are the accelerator's side. Between the two
are `commands`, plain data that say what to compute, and `executor`, the protocol of what computes it.
"""
