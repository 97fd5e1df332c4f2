"""The values of `dsjax accept`'s measurements, from records, counters and rows whose answers can be reckoned by hand."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import aiohttp
import pytest

from dsjax.bench.accept.kinds.fault import FaultMeasurement, FaultTimes
from dsjax.bench.accept.kinds.kind import LinkMeasurement, Measured
from dsjax.bench.accept.kinds.load import LoadMeasurement, LoadRun, drift, enter_balance, tokens_between, variation
from dsjax.bench.accept.test_bed import Hooks, NotTestedError, parse_hooks
from dsjax.bench.accept.watch import MemorySample, ServerWatch
from dsjax.bench.serve.load import LoadResult
from dsjax.bench.serve.records import RequestRecord
from dsjax.options import OptionError
from dsjax.top.reading import Exposition

FAULT = FaultMeasurement(name="f", title="F", hook="h", sessions=1, settle=0.0, before=10.0, hold=10.0, watch=20.0)
TIMES = FaultTimes(steady=0.0, begun=10.0, broken=11.0, mending=21.0, mended=22.0, over=42.0)


def record(start, times, *, tokens=None, error=None, prompt=10):
    """A request sent at `start`, with a chunk at each of `times`."""
    end = times[-1] if times else 0.0
    return RequestRecord(start, start, prompt, list(times), end, tokens or len(times), error=error)


def holds(found, near=(), **exact):
    """Hold some values of a measurement to what was reckoned by hand. near: those that rounding may move."""
    assert {name: found.values[name] for name in exact} == exact
    assert {name: found.values[name] for name in near} == pytest.approx(dict(near))


def test_tokens_of_a_time_are_those_of_chunks_that_came_in_it():
    whole = record(0, [1.0, 2.0, 3.0], tokens=6)  # two tokens a chunk
    broken = record(0, [1.5, 2.5], error="it broke off")
    assert tokens_between([whole], 0, 2.5) == 4
    assert tokens_between([whole, broken], 2, 3) == 2 + 1
    assert tokens_between([whole], 3, 3) == 0


def test_drift_is_growth_over_the_run_and_one_bad_part_does_not_make_it():
    times = [0.5 + k for k in range(10)]
    rising = [1.0 + 0.02 * k for k in range(10)]
    assert drift(times, rising, 10, 10) == pytest.approx(0.2 / 1.09)
    assert drift(times, [1.0] * 4 + [50.0] + [1.0] * 5, 10, 10) == 0
    assert drift(times[:2], rising[:2], 10, 10) is None
    assert drift(times, [0.0] * 10, 10, 10) is None


def memory_text(*devices):
    lines = 'dsjax_device_memory_used_bytes{{device="{0}"}} {1}\ndsjax_device_memory_limit_bytes{{device="{0}"}} {2}\n'
    return "".join(lines.format(number, *each) for number, each in enumerate(devices))


def metrics(tokens, *, started=None, used=()):
    lines = ["# TYPE vllm:generation_tokens counter", f"vllm:generation_tokens_total {tokens}"]
    lines += [f"process_start_time_seconds {started}"] if started is not None else []
    return Exposition("\n".join(lines) + "\n" + memory_text(*used))


@pytest.mark.parametrize(
    ("seen", "restarts"),
    [
        ([metrics(1), metrics(5), metrics(9)], 0),
        ([metrics(5), metrics(1), metrics(9)], 1),
        ([metrics(5, started=100), metrics(6, started=200)], 1),
        ([metrics(5)], None),
        ([Exposition(""), Exposition("")], None),
    ],
)
def test_counters_that_begin_anew_are_a_restart(seen, restarts):
    assert ServerWatch(None, "", (), 1.0, counters=seen).restarts == restarts


def test_memory_is_the_fullest_device_s_of_dsjax_and_of_dcgm_exporter():
    watch = ServerWatch(None, "", (), 1.0)
    watch._start = 0.0
    dcgm = [f'DCGM_FI_DEV_FB_{name}{{gpu="0",Hostname="a"}} {mib}' for name, mib in (("USED", 900), ("FREE", 100))]
    watch._record_memory([metrics(1, used=[(10, 100), (40, 100)]), Exposition("\n".join(dcgm) + "\n")])
    ((_, share, used),) = watch.memory
    assert (share, used) == (0.9, 50 + 900 * 2**20)
    watch._record_memory([metrics(1)])
    assert len(watch.memory) == 1


def test_an_outage_is_counted_once_however_long_it_is(start_fake):
    server = start_fake(metrics=lambda answered: memory_text((3, 4)))

    async def poll():
        async with aiohttp.ClientSession() as session:
            async with ServerWatch(session, server.url, [f"{server.url}/metrics"], 60.0) as watch:
                assert watch.outages == 0
                await asyncio.to_thread(server.close)
                for _ in range(3):
                    await watch._poll()
            return watch

    watch = asyncio.run(poll())
    assert watch.outages == 1
    assert [share for _, share, _ in watch.memory] == [0.75], "the address of --device-metrics is asked as well"
    assert len(watch.counters) == 1


def evaluated(records, end, zero=0.0, watch=None, **load):
    bed = SimpleNamespace(why_none=lambda figures: f"none of {figures['failed']}")
    run = LoadRun(LoadResult(records, end, False), zero, watch or ServerWatch(None, "", (), 1.0))
    return LoadMeasurement(name="l", title="L", **load).evaluate(bed, run)


def test_a_load_s_rate_is_of_its_seconds_and_its_share_of_errors_of_what_was_sent():
    good = [record(start, [start + 0.5, start + 1.0, start + 1.5], prompt=7) for start in (0.0, 2.0, 4.0, 6.0, 9.0)]
    bad = record(8.0, [], error="HTTP 500: no")
    memory = [MemorySample(1.0, 0.5, 5), MemorySample(2.0, 0.7, 5)]
    watch = ServerWatch(None, "", (), 1.0, counters=[metrics(1), metrics(2)], memory=memory)
    found = evaluated([*good, bad], 12.0, watch=watch, sessions=2, seconds=10.0, windows=5)
    # Two of the last request's tokens came after the tenth second.
    near = {"total_tokens_per_s": 1.3 + 5 * 7 / 10, "error_share": 1 / 6, "generation_p99": 1.0}
    holds(found, near, output_tokens_per_s=1.3, ttft_p50=0.5, tpot_p50=0.5, restarts=0, memory_share=0.7, ttft_drift=0)
    assert found.absent["memory_drift"][0] == "not tested"
    assert "1 × HTTP 500: no" in found.notes


def test_the_first_wave_is_not_measured_but_its_errors_count():
    wave = [record(0.0, [1.9, 2.1], prompt=5), record(0.0, [], error="HTTP 503: full")]
    after = [record(2.0 + k, [2.5 + k, 2.75 + k], prompt=5) for k in range(4)]
    found = evaluated([*wave, *after], 7.0, 2.0, sessions=2, seconds=4.0, windows=4)
    # The wave's last token came in the measured time.
    holds(found, output_tokens_per_s=9 / 4, ttft_p99=0.5, error_share=1 / 5, ttft_drift=0)
    assert found.samples == 4


def test_a_server_that_answers_nothing_misses_its_latencies():
    found = evaluated([record(0, [], error="refused")], 5.0, sessions=1, seconds=5.0)
    assert found.absent["ttft_p99"] == found.absent["generation_p99"] == ("missed", "none of 1")
    holds(found, output_tokens_per_s=0, error_share=1)
    assert found.absent["memory_share"][0] == found.absent["restarts"][0] == "not tested"


def streaming(begin, end, each):
    return [begin + each * k for k in range(1, round((end - begin) / each) + 1)]


def test_a_fault_s_values_are_before_against_during_and_until_it_is_as_before():
    # A hundred tokens a second before; one in a tenth of a second during; nothing for 4 s after; then as before.
    streams = ((0.0, streaming(0, 9.99, 0.01)), (11.0, streaming(11, 20.9, 0.1)), (21.5, streaming(26, 42, 0.01)))
    found = FAULT.evaluate([*(record(*one) for one in streams), record(12.0, [], error="refused")], TIMES)
    holds(found, {"ttft_growth": 0.1 / 0.01 - 1, "silence": 26.01 - 20.9}, error_share=0.25)
    assert found.values["throughput_loss"] == pytest.approx(0.9, abs=0.01)
    # A window of two seconds holds nine tenths of the tokens when it begins 0.2 s before they are back.
    assert found.values["recovery"] == pytest.approx(3.8, abs=0.25)
    assert "before 99.9 tokens/s" in found.notes[-1]


def test_a_rate_that_does_not_come_back_is_the_time_that_was_watched_and_silence_before_the_fault_misses_all():
    records = [record(0.0, streaming(0, 9.9, 0.01)), record(23.0, streaming(23, 42, 1.0))]
    found = FAULT.evaluate(records, TIMES)
    assert found.values["recovery"] == 20
    assert "did not come back to 90% within the 20 s" in found.notes[0]
    found = FAULT.evaluate([record(0.0, [], error="refused")], TIMES)
    assert found.absent["throughput_loss"] == found.absent["recovery"] == ("missed", "no token came before the fault")
    assert found.values["silence"] == 32


def balance(steps, rebalances=None, tokens=(), window=()):
    lines = ["# TYPE dsjax_step_seconds histogram", f'dsjax_step_seconds_bucket{{le="+Inf"}} {steps}']
    lines += [f"dsjax_step_seconds_count {steps}", f"dsjax_step_seconds_sum {steps}"]
    lines += ["# TYPE dsjax_expert_tokens counter"]
    lines += [f'dsjax_expert_tokens_total{{expert="{k}",ep_rank="{k // 2}"}} {n}' for k, n in enumerate(tokens)]
    lines += [f'dsjax_eplb_rank_tokens{{ep_rank="{k}"}} {n}' for k, n in enumerate(window)]
    if rebalances is not None:
        for name, each in (("rebalances", 1), ("exchange_seconds", 0.05), ("rebalance_seconds", 2)):
            lines += [f"# TYPE dsjax_eplb_{name} counter", f"dsjax_eplb_{name}_total {rebalances * each}"]
    return Exposition("\n".join(lines) + "\n")


def balanced(before, after):
    enter_balance(found := Measured(), before, after)
    return found


def test_balance_is_of_ranks_and_experts_and_rebalances_of_the_load_s_steps():
    found = balanced(balance(1000, 1), balance(3000, 5, tokens=(1, 2, 3, 2)))
    near = {"rank_variation": 0.25, "expert_variation": 0.5**0.5 / 2, "balancedness": 4 / 5, "rebalance_pause": 0.05}
    near |= {"rebalance_seconds": 2}
    exact = {"steps": 2000, "rebalances_per_1000_steps": 2}
    holds(found, near, **exact)
    assert found.values.keys() == near.keys() | exact.keys()
    assert (variation([1.0]), variation([0.0, 0.0])) == (None, None)


def test_balance_without_a_record_is_the_last_window_s_and_what_no_step_tells_is_not_tested():
    found = balanced(balance(0), balance(0, window=(3, 5)))
    assert (found.values["rank_variation"], "expert_variation" in found.absent) == (0.25, True)
    found = balanced(balance(0), balance(500))
    assert {verdict for verdict, _ in found.absent.values()} == {"not tested"}
    assert "--admin-api-key" in found.absent["rank_variation"][1]
    assert "--enable-eplb" in found.absent["rebalance_pause"][1]
    found = balanced(balance(0, 0), balance(50, 0))
    assert "50 steps" in found.absent["rebalances_per_1000_steps"][1]
    assert "no rebalance ended" in found.absent["rebalance_pause"][1]


def row(collective, sent, median, *, between=True, ranks=32, hosts=4, group=("experts",)):
    place = {"group": list(group), "between_hosts": between, "ranks": ranks, "hosts": hosts}
    return {"collective": collective, "sent_bytes": sent, "median_s": median, "samples_s": [median], **place}


def link(rows, **fields):
    exchange = {"group": "experts", "collective": "all_to_all", "between_hosts": True, "bytes": 1 << 20}
    network = {"rows": rows, "date": "2026", "device": {"name": "d"}, "mesh": "dp=32"}
    one = LinkMeasurement(name="l", title="L", **exchange | fields)
    return asyncio.run(one.measure(SimpleNamespace(network=network)))


def test_a_link_s_values_are_those_of_its_row_the_slower_of_two_and_of_a_pair_one_sends_at_a_time():
    rows = [row("all_to_all", 1_048_544, 1e-3), row("all_to_all", 1_048_544, 2e-3, group=("x", "experts"))]
    found = link([*rows, row("all_to_all", 1000, 1e-6)])
    # 24 of the 31 others of each of 32 ranks are on other hosts.
    of_all = {"aggregate_gbit_per_s": 32 * 4.194176 * 24 / 31}
    holds(found, {"latency_us": 2000, "gb_per_s": 0.524272, "gbit_per_s": 4.194176} | of_all)
    message = row("send_receive", 1 << 20, 1e-3, ranks=2, hosts=2, group=("pair",))
    found = link([message], group="pair", collective="send_receive")
    assert found.values["aggregate_gbit_per_s"] == found.values["gbit_per_s"] == pytest.approx(8.388608)
    found = link([row("all_to_all", 1 << 20, 1e-3, between=False, hosts=1)], between_hosts=False)
    assert found.absent["aggregate_gbit_per_s"][1] == "the group is within one host"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "send_receive"}, "no send_receive over a group 'experts' between hosts"),
        ({"between_hosts": False}, "inside a host"),
        ({"bytes": 4096}, "of 1,048,576 bytes, and none of 4,096"),
    ],
)
def test_a_row_that_is_not_there_is_not_tested(fields, message):
    with pytest.raises(NotTestedError, match=message):
        link([row("all_to_all", 1 << 20, 1e-3)], **fields)


def hooks(scale=None, timeout=60.0, **commands):
    async def asked(mesh):
        return scale(mesh) if scale else None

    return Hooks({name.replace("_", "-"): command for name, command in commands.items()}, asked, timeout)


def test_a_hook_gets_its_value_and_one_that_fails_or_hangs_or_cannot_scale_says_so(tmp_path):
    made = hooks(delay=f"echo {{value}} > {tmp_path / 'said'}", delay_end="echo no link eth9 >&2; exit 7")
    assert made.why_not("delay") is None
    asyncio.run(made.run("delay", "20"))
    assert (tmp_path / "said").read_text() == "20\n"
    with pytest.raises(NotTestedError, match=r"--hook delay-end \(.*\) ended with 7: no link eth9"):
        asyncio.run(made.run("delay-end", "20"))
    with pytest.raises(NotTestedError, match="did not end within"):
        asyncio.run(hooks(delay="sleep 60", timeout=0.2).run("delay", ""))
    asked = []
    asyncio.run(hooks(asked.append, lost="scale:dp=2").run("lost", ""))
    assert asked == ["dp=2"]
    with pytest.raises(NotTestedError, match=r"scale:dp=3.*impossible"):
        asyncio.run(hooks(lambda mesh: "impossible", lost="scale:dp=3").run("lost", ""))


def test_hooks_that_are_missing_or_unknown_are_told():
    assert "--hook delay=COMMAND and --hook delay-end=COMMAND are not given" in hooks().why_not("delay")
    assert "--hook delay-end=COMMAND is not given" in hooks(delay="true").why_not("delay")
    assert parse_hooks(["a=x=y", "a-end=z"], ["a"]) == {"a": "x=y", "a-end": "z"}
    wrong = {"a": "expected NAME=COMMAND", "a=": "expected NAME=COMMAND", "b=x": "expected one of a, a-end"}
    for word, message in wrong.items():
        with pytest.raises(OptionError, match=message):
            parse_hooks([word], ["a"])


def test_a_fault_whose_end_is_interrupted_is_ended_again(tmp_path):
    said = tmp_path / "said"
    end = f"if [ -e {said} ]; then echo ended >> {said}; else echo begun > {said}; sleep 60; fi"
    bed = SimpleNamespace(hooks=Hooks({"h": "true", "h-end": end}, None))
    fault = dataclasses.replace(FAULT, before=0.01, hold=0.01)

    async def interrupt() -> None:
        faulty = asyncio.create_task(fault._break_and_mend(bed, [], time.monotonic))
        while not (said.exists() and said.read_text()):
            await asyncio.sleep(0.01)
        faulty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await faulty

    asyncio.run(interrupt())
    assert said.read_text() == "begun\nended\n"


def test_an_interrupt_in_the_moment_in_which_a_hook_ends_is_not_lost(monkeypatch):
    """Python 3.11's `wait_for` returns the command's output then, and forgets that it was cancelled."""

    async def interrupted():
        ended = asyncio.get_running_loop().create_future()
        process = SimpleNamespace(communicate=lambda: ended, returncode=0)
        monkeypatch.setattr(asyncio, "create_subprocess_shell", AsyncMock(return_value=process))
        running = asyncio.create_task(Hooks({"h": "true"}, None).run("h", ""))
        await asyncio.sleep(0.01)
        ended.set_result((b"", None))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupted())
