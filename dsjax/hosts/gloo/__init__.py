"""Workarounds for gloo, which carries JAX's collectives between processes on CPUs; accelerators' collectives have other carriers.

Groups that broke are never formed again, and connections on which nothing will ever come are closed.
"""
