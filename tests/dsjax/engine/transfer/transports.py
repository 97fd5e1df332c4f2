"""The transports of the table, for tests that hold for each of them: those whose package is missing are skipped."""

import importlib.util

import pytest

from dsjax.engine.transfer.transport import BACKENDS


def _is_missing(name):
    return importlib.util.find_spec(BACKENDS[name].package) is None


NIXL = pytest.mark.skipif(_is_missing("nixl"), reason="NIXL is not installed (pip install 'dsjax[nixl]')")
EACH_BACKEND = [
    pytest.param(name, marks=pytest.mark.skipif(_is_missing(name), reason=f"{BACKENDS[name].package} is not installed"))
    for name in BACKENDS
]
