"""What an engine's options say must be alike in all processes of its group."""

import shutil
import subprocess
import sys

import pytest
from deployments import LEADER_WORKER_SET
from layouts import write_checkpoint

from dsjax.engine.elastic.joining import _alike, host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hosts import HostOptions

OPTIONS = HostOptions(("127.0.0.1", 1), 2, 1, "127.0.0.1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def alike(checkpoint, mesh="dp=4", devices=4, **options):
    return _alike(EngineArgs(model=str(checkpoint), mesh=mesh, **options), devices, OPTIONS)


def differ(one, other):
    """The names of the values that differ."""
    return {name for name, value in one.items() if value != other[name]}


def test_a_copy_of_the_checkpoint_is_alike_and_other_weights_are_not(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert alike(copy) == alike(checkpoint)
    write_checkpoint(copy, seed=8)
    assert differ(alike(copy), alike(checkpoint)) == {"the checkpoint fingerprint"}


@pytest.mark.parametrize(
    ("name", "value"), [("page_size", 8), ("kernels", "plain"), ("mesh", "dp=2"), ("encrypt_bulk", True), ("seed", 3)]
)
def test_options_that_change_what_is_computed_must_be_alike_and_the_schedulers_need_not(checkpoint, name, value):
    expected = set() if name == "seed" else {f"--{name.replace('_', '-')}"}
    assert differ(alike(checkpoint, **{name: value}), alike(checkpoint)) == expected


def test_a_default_is_alike_though_one_process_was_given_it(checkpoint):
    assert alike(checkpoint) == alike(checkpoint, page_size=16, prefill_chunk=256)


def test_a_mesh_with_fewer_devices_than_processes_is_refused(checkpoint):
    with pytest.raises(UserError, match=r"--mesh dp=1 has 1 devices, fewer than the 2 processes; start 1"):
        alike(checkpoint, mesh="dp=1", devices=1)


def test_the_engines_options_name_the_group():
    place = {"coordinator_address": "127.0.0.1:77", "num_processes": 3, "process_id": 2}
    args = EngineArgs(**place, heartbeat_timeout=4, link_monitor_interval=7)
    assert host_options(args) == HostOptions(("127.0.0.1", 77), 3, 2, "127.0.0.1", 300, 4, 7)


@pytest.mark.slow
def test_an_abort_waits_while_this_process_says_why_it_ends_and_not_when_python_has_ended():
    # When Python has ended, a handler of Python's that is called all the same aborts the process again, and so on for ever.
    script = """
import ctypes, os, threading, time
from dsjax.hosts.coordination import delay_aborts
library = ctypes.CDLL(None)
delay_aborts()
child = os.fork()
if not child:
    threading.Thread(target=library.abort).start()
    time.sleep(0.2)
    os.write(2, b"last words")
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
library.__cxa_atexit(ctypes.cast(library.abort, ctypes.c_void_p), None, None)  # runs behind all of Python's
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (found.stdout, found.stderr, found.returncode) == ("1\n", "last words", 6)


@pytest.fixture
def started(monkeypatch):
    """What has started this process says that it is the second of two."""
    for name, value in LEADER_WORKER_SET.items():
        monkeypatch.setenv(name, value)


SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=2"}
EXPERTS = SIDES | {"afd_role": "expert", "afd_address": "127.0.0.1:7000"}


@pytest.mark.parametrize("of_one", [{"prefill_mesh": "dp=1", "decode_mesh": "dp=1"}, SIDES, EXPERTS], ids=str)
def test_an_engine_of_one_process_joins_no_group_of_what_has_started_it(of_one, started):
    with pytest.raises(UserError, match=r"does not go with --num-processes .*\(--num-processes 1 --process-id 0\)"):
        host_options(EngineArgs(**of_one))
    assert host_options(EngineArgs(num_processes=1, process_id=0, **of_one)) is None


def test_processes_of_an_attention_side_are_the_group_of_what_has_started_them(started):
    options = host_options(EngineArgs(**EXPERTS | {"afd_role": "attention"}))
    assert (options.process_id, options.num_processes) == (1, 2)
