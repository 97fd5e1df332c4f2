"""Checkpoints: Hugging Face safetensors in, Orbax in and out, onto any mesh.

    checkpoint = open_checkpoint(resolve("demo"))                         # source.py, hub.py
    params = load(checkpoint.config, checkpoint, mesh, rules)             # load.py

Nothing is imported here, so that the command line can name a command of this package before JAX is imported.
"""
