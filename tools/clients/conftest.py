"""Suites and clients that others made, unmodified, against a server whose model does what it is asked: docs/serving.md has the table.

pip install -e '.[test,clients]' && python -m pytest -n 0 -rx tools/clients
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "dsjax/engine", "dsjax/serve")]

MODEL = "deepseek-r1"
"""A name by which suites know that the model reasons."""


def pytest_configure(config: pytest.Config) -> None:
    """Run coroutines of langchain's suite, which takes that for granted."""
    config.option.asyncio_mode = "auto"


@pytest.fixture(scope="session")
def url():
    """Address of the API."""
    from obedient_model import obedient_server

    with obedient_server(MODEL) as server:
        yield f"{server.url}/v1"
