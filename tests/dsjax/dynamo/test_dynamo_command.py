"""`dsjax dynamo` without Dynamo: what it says, and what it chooses for the frontend."""

import math
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from with_dynamo import WITH_DYNAMO

from dsjax.dynamo.arguments import DEADLINE, DRAIN, allow_shutdown, choose_parsers, parse, runtime_config
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.errors import UserError
from dsjax.serve.tool_formats import TOOL_FORMATS

DEMO = Path(__file__).parents[3] / "configs" / "models" / "demo"


def test_without_dynamo_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(UserError, match=r"needs NVIDIA Dynamo 1\.6.*pip install 'dsjax\[dynamo\]'") as refusal:
        runtime_config([])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("asked", "chosen"), [((None, None), ("deepseek_v3_1", "deepseek_r1")), (("hermes", "basic"), ("hermes", "basic"))]
)
def test_the_frontends_parsers_are_those_of_the_models_template_unless_asked_for(asked, chosen):
    config = SimpleNamespace(dyn_tool_call_parser=asked[0], dyn_reasoning_parser=asked[1])
    choose_parsers(config, Tokenizer.from_directory(DEMO))
    assert (config.dyn_tool_call_parser, config.dyn_reasoning_parser) == chosen


@WITH_DYNAMO
def test_dynamo_has_a_parser_for_each_of_our_formats():
    from dynamo._core import get_tool_parser_names

    from dsjax.dynamo.arguments import TOOL_CALL_PARSERS

    assert TOOL_CALL_PARSERS.keys() == TOOL_FORMATS.keys()
    assert set(TOOL_CALL_PARSERS.values()) <= set(get_tool_parser_names())


@WITH_DYNAMO
@pytest.mark.parametrize("option", ["--tokenizer=.", "--tokenizer-mode=hf", "--chat-template=a.jinja"])
def test_what_the_frontend_does_is_no_option_of_a_worker(option):
    with pytest.raises(UserError, match=rf"{option.partition('=')[0]} is for dsjax serve"):
        parse(["--model", "demo", option])


def test_dynamo_gives_requests_as_long_to_finish_as_the_option_says():
    """Dynamo by itself ends the process 30 s after its grace period."""
    for variables, seconds, then in (({}, 10, ("30", "10")), ({DRAIN: "40"}, 600, ("620", "40"))):
        allow_shutdown(variables, seconds)
        assert variables == {DEADLINE: then[0], DRAIN: then[1]}
    allow_shutdown({DEADLINE: "900"}, 600)
    for seconds in ("30", "soon"):
        message = f"{DEADLINE} is {seconds}, and --shutdown-timeout 600 needs 620 whole seconds"
        with pytest.raises(UserError, match=message):
            allow_shutdown({DEADLINE: seconds}, 600)
    for endless in (math.inf, math.nan):
        with pytest.raises(UserError, match="Dynamo ends a process after a finite time"):
            allow_shutdown({}, endless)


@pytest.mark.dynamo
@pytest.mark.slow
@WITH_DYNAMO
def test_a_signal_while_it_compiles_ends_all_processes_of_a_worker_cleanly_and_at_once(tmp_path):
    """Dynamo waits for a start, and after its time limit calls C's `exit`, on which XLA's threads crash."""
    from demo_crowd import options
    from deployment import Group, wait_until
    from tiny_deployment import write_worded_checkpoint

    cold = {"JAX_ENABLE_COMPILATION_CACHE": "false", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "240"}
    model = write_worded_checkpoint(tmp_path, max_position_embeddings=256)
    group = Group(tmp_path, "worker", "--model", str(model), *options(), "--mesh", "dp=2", **cold)
    leader, follower = group.processes
    try:
        wait_until(lambda: not group.is_ready and "compiling shapes" in leader.log.read_text(), what="it compiles")
        for one in group.processes:
            one.process.send_signal(signal.SIGTERM)
        assert [one.process.wait(timeout=200) for one in group.processes] == [0, 0]  # Dynamo's own limit is 241 s
    finally:
        group.end(signal.SIGKILL)
    assert "SIGTERM before this worker was ready: it ends now, and has served nothing\n" in leader.log.read_text()
    # By its own signal, or by process 0's word, whichever comes first.
    assert re.search("SIGTERM while warming up: this process ends now|this process ends too", follower.log.read_text())


@pytest.mark.dynamo
@WITH_DYNAMO
@pytest.mark.parametrize(("arguments", "message"), [
    (["--no-such-option", "1"], "unrecognized arguments: --no-such-option 1"),
    (["--discovery-backend", "carrier-pigeon"], "argument --discovery-backend: invalid choice"),
    (["--endpoint", "only-one-part"], "ndpoint"),
    (["--custom-jinja-template", "/nowhere"], "/nowhere is no file"),
])  # fmt: skip
def test_dynamos_own_options_are_refused_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as refusal:
        runtime_config(arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.dynamo
@WITH_DYNAMO
@pytest.mark.parametrize(
    ("words", "found"),
    [("--namespace=here", ("here", "backend", "generate")), ("--endpoint=dyn://a.b.c", ("a", "b", "c"))],
)
def test_an_endpoint_is_taken_apart_and_found_in_the_namespace_by_default(words, found):
    config = runtime_config([words])
    assert (config.namespace, config.component, config.endpoint) == found


@WITH_DYNAMO
def test_a_prefill_worker_on_loopback_says_that_other_hosts_do_not_reach_it():
    from dsjax.dynamo.prefill import _reached_at

    assert _reached_at("10.0.0.1:80").endswith("which reach it at 10.0.0.1:80")
    assert "Workers on other hosts cannot reach it; give --transfer-host" in _reached_at("127.0.0.1:80")
