"""What the tests of DeepSeek-V4's attention share."""

import pytest

from dsjax.kernels.table import PLAIN


@pytest.fixture(params=["plain", "native"])
def backend(request):
    """The kernels that attend."""
    return PLAIN if request.param == "plain" else request.getfixturevalue("kernels")
