"""`dsjax serve` on two hosts that were started wrongly: every process says why in one line, and ends within the limit."""

import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from layouts import write_checkpoint
from processes import Group

pytestmark = pytest.mark.slow  # all together


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def errors(command: list[str], options: dict[int, list[str]], *, timeout: int = 120) -> list[str]:
    """The one error of each of two processes, which end with 2."""
    group = Group(["-m", "dsjax.serve", "--port", "0", *command], 2, options=options, timeout=timeout)
    try:
        assert group.codes(240) == [2, 2], group.last_words()
    finally:
        group.end()
    found = []
    for text in group.output:
        assert "Traceback" not in text
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        found.append(line.removeprefix("error: "))
    return found


def test_another_mesh_is_named_by_both(checkpoint):
    found = errors(["--model", str(checkpoint)], {0: ["--mesh", "dp=4"], 1: ["--mesh", "dp=2"]})
    assert found[0] == found[1]
    assert "has --mesh dp=2, process 0 has dp=4; start all processes alike" in found[0]


def test_a_process_that_cannot_find_its_model_tells_the_other(checkpoint):
    found = errors(["--mesh", "dp=4"], {0: ["--model", str(checkpoint)], 1: ["--model", "/no/such/model"]})
    assert found[0].startswith("process 1 (")
    assert found[0].endswith(found[1])
    assert "/no/such/model" in found[1]


def test_a_coordinator_that_cannot_be_there_and_a_port_in_use_end_both(checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        both = ["--coordinator-address", address]
        found = errors(["--model", str(checkpoint), "--mesh", "dp=4"], {0: both, 1: both}, timeout=2)
    assert "cannot listen at 127.0.0.1 port" in found[0]
    assert f"no process 0 at {address} within 2 s" in found[1]
