"""Requests become tokens: scheduling, pages and text in plain Python; cache, runner and sampler in JAX.

`request`, `pages`, `rank`, `scheduler`, `core`, `engine` and their kin import no JAX, so that the planner can run the
same scheduler on virtual time. `cache`, `runner`, `sampler` and `llm` are the accelerator's side of the contract in
`plan`.
"""
