"""The native kernels of this machine; every test that needs them is skipped where they cannot be built."""

import numpy as np
import pytest

from dsjax.engine.device.process import cache_folder
from dsjax.kernels.table import choose_kernels


@pytest.fixture(scope="session")
def kernels():
    """With two threads a call, whatever the machine has."""
    found = choose_kernels("auto", "cpu", np.dtype(np.float32), devices=1, cache=cache_folder() / "native")
    if found.native is None:
        pytest.skip(found.note)
    return found
