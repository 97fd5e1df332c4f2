"""What the engine's rooms tell each other: commands, the executor's protocol, value types. No JAX."""
