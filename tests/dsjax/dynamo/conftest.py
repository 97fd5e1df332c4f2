"""The engine that answers alone, for tests that compare a deployment with it."""

import pytest


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    from tiny_deployment import Alone

    return Alone(tmp_path_factory.mktemp("tiny"))
