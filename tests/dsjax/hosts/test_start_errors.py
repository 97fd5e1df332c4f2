"""`dsjax serve` on two hosts of which one was started wrongly: each process says why in one line, and ends with 2.

`test_rendezvous.py` has the other reasons for which a group does not form, in threads, and `test_joining.py` what must be alike.
"""

import pytest
from layouts import write_checkpoint
from processes import Group

pytestmark = pytest.mark.slow


def test_a_process_that_cannot_find_its_model_tells_the_other(tmp_path):
    models = {0: ["--model", str(write_checkpoint(tmp_path))], 1: ["--model", "/no/such/model"]}
    group = Group(["-m", "dsjax.serve", "--port", "0", "--mesh", "dp=4"], 2, options=models)
    try:
        assert group.codes(240) == [2, 2], group.last_words()
    finally:
        group.end()
    assert "Traceback" not in "".join(group.output)
    found = [[line for line in text.splitlines() if line.startswith("error: ")] for text in group.output]
    ((first,), (second,)) = found
    assert first.startswith("error: process 1 (")
    assert first.endswith(second.removeprefix("error: "))
    assert "/no/such/model" in second
