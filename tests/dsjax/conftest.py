"""What every test below may leave behind, and must not."""

import sys

import pytest


@pytest.fixture(autouse=True)
def closed_groups():
    """End the connections of the groups that a test has formed."""
    yield
    module = sys.modules.get("group_in_threads")
    if module is not None:
        module.close_groups()
