"""Benchmarks: load on a server (`dsjax bench serve`)."""
