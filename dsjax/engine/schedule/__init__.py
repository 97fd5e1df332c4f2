"""Requests, pages and ranks: what every step computes, and the step written down. No JAX."""
