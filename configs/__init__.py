"""Data only: model, hardware and cluster descriptions, found by name through `importlib.resources`."""
