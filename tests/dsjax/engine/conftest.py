"""Where the tests of each of the engine's rooms find what all rooms share: the fake executor, tiny models, processes of a group."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hosts")]
