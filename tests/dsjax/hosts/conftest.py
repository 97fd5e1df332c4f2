"""The tiny checkpoint with a tokenizer."""

import pytest


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    from worded_checkpoint import write_worded_checkpoint

    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))
