"""Stages: a model's layers over groups of devices, each of which has an executor of its own (``docs/pipeline.md``)."""
