"""Where the tests of hosts find what they share with those of the engine; and the tiny checkpoint with a tokenizer."""

import contextlib

import pytest


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    from worded_checkpoint import write_worded_checkpoint

    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))


@pytest.fixture
def endpoints():
    from deployments import KEY

    from dsjax.messaging import Endpoint

    with contextlib.ExitStack() as opened:

        def make(credentials=KEY):
            made = Endpoint("127.0.0.1", credentials)
            opened.callback(made.close)
            return made

        yield make
