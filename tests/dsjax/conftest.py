"""What every test below may leave behind, and must not; and what tests of several rooms need."""

import contextlib
import os
import sys

import pytest


@pytest.fixture(autouse=True)
def closed_groups():
    """End the connections of the groups that a test has formed."""
    yield
    module = sys.modules.get("group_in_threads")
    if module is not None:
        module.close_groups()


@pytest.fixture
def endpoints():
    """Makes endpoints on the loopback interface, with the key of one deployment unless another is given; a test's end closes them."""
    from deployments import KEY

    from dsjax.messaging import Endpoint

    with contextlib.ExitStack() as opened:

        def make(credentials=KEY, **options):
            return opened.enter_context(contextlib.closing(Endpoint("127.0.0.1", credentials, **options)))

        yield make


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """The tiny checkpoint with a tokenizer."""
    from worded_checkpoint import write_worded_checkpoint

    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))


@pytest.fixture
def give_away(monkeypatch):
    """A function that makes a path another user's."""

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda user=os.geteuid(): user + 1)

    return give
