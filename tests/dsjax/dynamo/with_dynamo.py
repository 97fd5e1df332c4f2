"""`WITH_DYNAMO`: tests that need NVIDIA Dynamo, which are skipped where it is not installed.

Whether there is a package `dynamo` does not tell: once a test of `tests/dsjax` was collected, this folder is one.
"""

import importlib.metadata

import pytest

WITH_DYNAMO = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="ai-dynamo-runtime")), reason="NVIDIA Dynamo is not installed"
)
