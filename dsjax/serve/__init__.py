"""An OpenAI-compatible HTTP server over the engine: `python -m dsjax.serve --mesh dp=32`."""
