"""Where the tests' time goes: CPU seconds are counted by file, children included."""

import subprocess
import sys
from types import SimpleNamespace

import cpu_seconds
import pytest


def test_the_end_of_a_run_names_files_that_changed_and_files_that_take_too_long():
    cpu = {"tests/test_house.py": 1.5, "tests/a/test_pages.py": 4.5, "tests/dsjax/engine/test_llm.py": 74}
    assert cpu_seconds.summary(cpu, {"tests/test_house.py", "dsjax/info.py"}) == [
        "CPU seconds: 80",
        "   74.0 tests/dsjax/engine/test_llm.py (more than 60)",
        "    1.5 tests/test_house.py (changed)",
    ]


def run_one(counter: cpu_seconds.CpuSeconds, file: str, test) -> None:
    """Run a test between the two halves of the plugin's hook, as pytest does."""
    protocol = counter.pytest_runtest_protocol(SimpleNamespace(nodeid=f"{file}::test_it"))
    next(protocol)
    test()
    with pytest.raises(StopIteration):
        protocol.send(None)


def test_a_process_that_a_test_waits_for_counts_and_sleeping_does_not():
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    sleeps = "import time\ntime.sleep(0.3)"
    counter = cpu_seconds.CpuSeconds(SimpleNamespace())
    run_one(counter, "busy.py", lambda: subprocess.run([sys.executable, "-S", "-c", busy], check=True))
    run_one(counter, "sleeps.py", lambda: subprocess.run([sys.executable, "-S", "-c", sleeps], check=True))
    assert counter.cpu["busy.py"] > 0.25 > counter.cpu["sleeps.py"]
    assert counter.tests == {"busy.py": 1, "sleeps.py": 1}


def test_the_counts_of_all_test_processes_are_added():
    total = cpu_seconds.CpuSeconds(SimpleNamespace())
    for seconds in (1.5, 2.0):
        worker = cpu_seconds.CpuSeconds(SimpleNamespace(workeroutput={}))
        worker.cpu["a.py"], worker.tests["a.py"] = seconds, 2
        worker.pytest_sessionfinish()
        total.pytest_testnodedown(SimpleNamespace(workeroutput=worker._config.workeroutput))
    total.pytest_testnodedown(SimpleNamespace())  # a process that was killed has sent nothing
    assert (total.cpu, total.tests) == ({"a.py": 3.5}, {"a.py": 4})
