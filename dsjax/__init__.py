"""Serve, dry-run and plan DeepSeek-V3/R1-family models with JAX on any device mesh.

::

    from dsjax import LLM, SamplingParams
"""

from typing import Any

from dsjax.engine.contract.sampling_params import SamplingParams, StructuredOutputs

__all__ = ["LLM", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    """`LLM` comes with JAX, which the command line must not import before it has arranged the devices."""
    if name == "LLM":
        from dsjax.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
