"""Groups whose processes are threads, with an endpoint each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))


@pytest.fixture
def joined():
    """``joined(count)``: the groups of so many processes."""
    from held_processes import KEY, groups

    from dsjax.messaging import Endpoint

    endpoints = []

    def joined(count):
        made = groups(count)
        for group in made:
            group.endpoint = group.endpoint or Endpoint("127.0.0.1", KEY)
            endpoints.append(group.endpoint)
        return made

    yield joined
    for endpoint in endpoints:
        endpoint.close()
