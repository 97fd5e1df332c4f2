"""Times of the model's parts at true widths, one part at a time: `dsjax bench modules`.

What is timed is the engine's own code (`dsjax/model`, `sharding/dispatch`). Definitions are in `docs/benchmarking.md`.
"""
