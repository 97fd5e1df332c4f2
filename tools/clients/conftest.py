"""Suites and clients that others made, unmodified, against a server whose model does what it is asked: docs/serving.md has the table.

pip install -e '.[test,clients]' && python -m pytest -n 0 -rx tools/clients
"""

import pytest

MODELS = ("deepseek-r1", "claude-3-5")
"""Names by which suites know that the model reasons."""


def pytest_configure(config: pytest.Config) -> None:
    """Run coroutines of langchain's suite, which takes that for granted."""
    config.option.asyncio_mode = "auto"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect what langchain itself gets wrong: its suite lets no test be overridden."""
    reason = "langchain-core merges a stream's reasoning and its first tool call, as both have the index 0"
    for item in items:
        if item.nodeid.endswith("TestReasoner::test_tool_calling[model1]"):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture(scope="session")
def url():
    """Address of the API."""
    from obedient_model import obedient_server

    with obedient_server(MODELS) as server:
        yield f"{server.url}/v1"
