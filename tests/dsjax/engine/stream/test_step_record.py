"""A step recording can be read however its process ended, and replays every token. Also tests `dsjax replay`."""

import json
import re
import stat
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from fake_executor import FakeExecutor, next_token
from layouts import write_checkpoint
from typer.testing import CliRunner

from dsjax import LLM
from dsjax.checkpoint import fingerprint as fingerprints
from dsjax.cli import app
from dsjax.cli import replay as replaying
from dsjax.cli.replay import build_executor, compare, launch_kind, times_table
from dsjax.engine.contract import commands
from dsjax.engine.contract.commands import Clear, Copy, Flush, RankStep, Score, Step, from_int32s, int32s
from dsjax.engine.contract.executor import ExecutorLimits, RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup import loading
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.stream import step_record
from dsjax.engine.stream.step_record import Launched, RecordError, RecordingExecutor, StepFile, StepRecording
from dsjax.errors import UserError

LIMITS = ExecutorLimits(8, 4, 8, 4, 33, 2, 64, 300)
BUCKETS = Buckets.covering(8, 8, mixed=False)


class ShiftedExecutor(FakeExecutor):
    """The fake executor, whose tokens depend on every command that it was told; so a lost, doubled or late one changes them.

    shift: is added to each token. failing: the values of all requests are not finite.
    """

    def __init__(self, pages_per_rank: int = LIMITS.pages_per_rank, *, shift: int = 0, failing: bool = False):
        model = lambda context, seed, size: (next_token(context, seed, size) + shift) % size  # noqa: E731
        sizes = {"num_ranks": LIMITS.num_ranks, "pages_per_rank": pages_per_rank, "max_model_len": 64}
        super().__init__(**sizes, model=model, max_in_flight=2)
        self.shift = shift
        self.non_finite = set(range(99)) if failing else set()

    def _run(self, command):
        if isinstance(command, Score):
            tokens = list(from_int32s(command.tokens))
            return np.eye(300, dtype=np.float32)[[(token + 1 + self.shift) % 300 for token in tokens]]
        return super()._run(command)


def header(**changes):
    device = SimpleNamespace(platform="none", device_kind="none")
    first = step_record.describe_recording({"model": "demo"}, LIMITS, "f" * 64, device)
    return msgspec.structs.replace(first, **changes)


def record(path, *, max_bytes=1 << 20, requests=12, end=True, **executor):
    """Run requests of different lengths through an engine, one aborted in the middle; give their tokens."""
    recorder = RecordingExecutor(ShiftedExecutor(**executor), StepFile(path, header(), max_bytes))
    core = EngineCore(recorder, SchedulerConfig.from_limits(LIMITS, max_num_batched_tokens=32))
    prompts = [[index, *range(index % 5 + 1), 250] for index in range(requests)]
    made = [Request(f"{i}", p, len(p), SamplingParams(max_tokens=9), 9, seed=i) for i, p in enumerate(prompts)]
    for one in made:
        core.add(one)
    for _ in range(4):
        core.step()
    core.abort("3")
    while core.has_unfinished:
        core.step()
    recorder.collect(recorder.launch(Score(int32s([5, 6]), int32s([1]))))
    if end:
        recorder.shutdown()
    return [one.output_token_ids for one in made]


def replayed(path, **executor):
    return compare(StepRecording(path), ShiftedExecutor(**executor), lambda command: launch_kind(command, BUCKETS))


def test_a_replay_in_another_executor_gives_every_token_with_two_steps_in_flight(tmp_path):
    made, executor = record(tmp_path / "steps"), ShiftedExecutor()
    report = compare(StepRecording(tmp_path / "steps"), executor, lambda command: launch_kind(command, BUCKETS))
    assert (report.num_differing, report.first_difference, report.num_uncompared) == (0, None, 0)
    assert (report.end, executor.max_under_way) == ("shutdown", 2)
    assert report.num_tokens >= sum(map(len, made)) > 90  # the aborted request's last tokens are compared too
    assert sum(len(pairs) for pairs in report.times.values()) == report.num_steps > 9
    assert {"decode 8 rows", "score"} <= report.times.keys()


def test_the_first_row_that_differs_is_named_and_all_are_counted(tmp_path):
    record(tmp_path / "steps")
    report = replayed(tmp_path / "steps", shift=1)
    frames = [frame for frame in StepRecording(tmp_path / "steps") if isinstance(frame, Launched)]
    step = next(frame for frame in frames if isinstance(frame.command, Step) and frame.command.ranks[0].prefills)
    rows = step.command.ranks[0].prefills
    row = next(index for index, row in enumerate(rows) if row.next_token == commands.TOKEN_MADE)
    at = rf"step {step.number}, rank 0, prefill row {row} \(slot {rows[row].slot}\)"
    recorded, replayed_now = re.fullmatch(rf"{at}: recorded (\d+), replayed (\d+)", report.first_difference).groups()
    assert int(replayed_now) == (int(recorded) + 1) % 300
    assert report.num_differing > 50
    assert report.to_json()["first_difference"] == report.first_difference


def test_every_command_is_in_the_stream_and_the_first_empties_the_cache(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        StepRecording(tmp_path / "steps")
    inner = ShiftedExecutor()
    inner._slots[0][0] = "a stranger's"
    recorder = RecordingExecutor(inner, StepFile(tmp_path / "steps", header()))
    assert recorder.inner._slots == [{}, {}]  # nothing of before the recording is left
    nobody = [RankStep([], [], b"", [], [])] * 2
    given = [Copy([int32s([1, 2]), b""]), Step(nobody), Clear([b"", int32s([3])]), Score(int32s([5]), int32s([1]))]
    for command in given:
        pending = recorder.launch(command)
        if isinstance(command, Step | Score):
            recorder.collect(pending)
    recorder.shutdown()
    frames = list(StepRecording(tmp_path / "steps"))
    assert [frame.command for frame in frames if isinstance(frame, step_record.Launched)] == [Flush(), *given]
    assert [frame.number for frame in frames if isinstance(frame, step_record.Collected)] == [0, 2, 4]
    assert frames[-2].greedy == [6]
    assert frames[-1] == step_record.RecordingEnd("shutdown")


def test_failed_rows_and_their_errors_are_kept():
    nobody = RankStep([], [], b"", [], [])
    rows = [RowResult((4,)), RowResult(), RowResult((4, 5)), RowResult((), finite=False), RowResult((), error="none")]
    kept = step_record.collected(7, 0.5, Step([nobody]), [RankResults(rows, [])])
    outcomes = [step_record.Outcome(*given) for given in (([4, 5],), ([], False), ([], True, "none"))]
    assert kept.ranks[0].decodes == [4, None, *outcomes]


def test_a_row_that_was_not_finite_and_now_is_differs(tmp_path):
    record(tmp_path / "steps", failing=True)
    assert replayed(tmp_path / "steps", failing=True).num_differing == 0
    report = replayed(tmp_path / "steps")
    assert "finite=False" in report.first_difference


def test_the_file_is_its_owners_alone_and_no_other_is_overwritten(tmp_path):
    record(tmp_path / "steps")
    assert stat.S_IMODE((tmp_path / "steps").stat().st_mode) == 0o600
    with pytest.raises(RecordError, match="exists; give another name"):
        record(tmp_path / "steps")
    with pytest.raises(RecordError, match="no folder that can be written"):
        record(tmp_path / "none" / "steps")


def test_a_recording_that_ends_in_the_middle_of_a_frame_is_replayed_up_to_there(tmp_path):
    record(tmp_path / "steps", end=False)  # its process was killed
    whole = (tmp_path / "steps").read_bytes()
    count = len(list(StepRecording(tmp_path / "steps")))
    counts = []
    for size in (len(whole), len(whole) - 1, len(whole) * 2 // 3, len(whole) // 2):
        (tmp_path / "cut").write_bytes(whole[:size])
        counts.append(len(list(StepRecording(tmp_path / "cut"))))
        report = replayed(tmp_path / "cut")
        assert (report.num_differing, report.end) == (0, None)
    assert counts[0] == count
    assert counts[1] == count - 1
    assert counts == sorted(counts, reverse=True)
    (tmp_path / "cut").write_bytes(whole[:20])
    with pytest.raises(RecordError, match="ends inside its header"):
        StepRecording(tmp_path / "cut")


def test_a_recording_stops_at_its_bound_and_the_engine_goes_on(tmp_path, caplog):
    made = record(tmp_path / "whole", requests=40)
    bound = (tmp_path / "whole").stat().st_size // 2
    assert record(tmp_path / "steps", max_bytes=bound, requests=40) == made
    assert [entry for entry in caplog.messages if "has reached its bound" in entry] == caplog.messages != []
    assert bound * 0.75 < (tmp_path / "steps").stat().st_size <= bound
    report = replayed(tmp_path / "steps")
    assert (report.num_differing, report.end) == (0, "the bound was reached")
    assert 0 < report.num_steps < replayed(tmp_path / "whole").num_steps


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path, caplog):
    recorder = RecordingExecutor(ShiftedExecutor(), StepFile(tmp_path / "steps", header()))
    recorder.file._file.close()
    recorder.file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    assert recorder.collect(recorder.launch(Score(int32s([5]), int32s([1])))).shape == (1, 300)
    assert not recorder.file.is_open
    assert "No space left" in caplog.text
    recorder.shutdown()


def test_another_version_is_refused_by_its_number_and_another_file(tmp_path):
    for changes, message in (({"commands": 99}, "commands of version 99"), ({"format": 7}, "has format 7")):
        with pytest.raises(RecordError, match=message):
            written(tmp_path / message, **changes)
    (tmp_path / "steps").write_bytes(b"import os\n" * 9)
    with pytest.raises(RecordError, match="is no recording of steps"):
        StepRecording(tmp_path / "steps")


def test_a_replay_with_another_checkpoint_is_refused_before_it_is_loaded(tmp_path):
    options = EngineArgs(model="demo", seed=5, record_steps="x").executor_options
    assert not {"seed", "record_steps"} & options.keys()
    with pytest.raises(RecordError, match="is not the recorded checkpoint"):
        build_executor(written(tmp_path / "steps", options=options), None)


def test_an_executor_of_other_sizes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "fingerprint", lambda directory: "f" * 64)
    loaded = SimpleNamespace(executor=ShiftedExecutor(pages_per_rank=9))
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: loaded)
    with pytest.raises(RecordError, match="pages_per_rank 9, recorded 33"):
        build_executor(written(tmp_path / "steps"), None)


OUTCOMES = [(0, 0, "Every token is equal"), (1, 1, "rows differ. The first: step")]


@pytest.mark.parametrize(("shift", "code", "said"), OUTCOMES)
def test_the_exit_code_says_whether_every_token_was_equal(tmp_path, monkeypatch, shift, code, said):
    record(tmp_path / "steps")
    executor = ShiftedExecutor(shift=shift)
    executor.buckets = BUCKETS
    monkeypatch.setattr(replaying, "build_executor", lambda *args: executor)
    ended = CliRunner().invoke(app, ["replay", str(tmp_path / "steps"), "--json", str(tmp_path / "report")])
    assert ended.exit_code == code, ended.output
    assert said in ended.output
    assert (json.loads((tmp_path / "report").read_text())["num_differing"] > 0) is bool(code)


def written(path, *frames, **changes) -> StepRecording:
    """Write a recording with these frames. changes: fields of its header."""
    file = StepFile(path, header(**changes))
    for frame in frames:
        file.write(frame)
    file.close("shutdown")
    return StepRecording(path)


def test_where_experts_were_is_left_out_of_a_replay(tmp_path):
    command = commands.ConnectExperts("ep=4", "127.0.0.1:1")
    frames = Launched(1, 0.0, command), step_record.collected(1, 0.0, command, None)
    executor = ShiftedExecutor()
    executor.launch = None
    assert compare(written(tmp_path / "steps", *frames), executor, lambda command: "").num_uncompared == 0


def test_times_are_counted_from_the_end_of_the_step_before(tmp_path):
    step, results = Step([RankStep([], [], b"", [], [])] * 2), [RankResults([], [])] * 2
    # Launched at 1 and 2, done at 5 and 6: they took 4 s and 1 s.
    frames = [Launched(number, float(number), step) for number in (1, 2)]
    frames += [step_record.collected(number, done, step, results) for number, done in ((1, 5.0), (2, 6.0))]
    report = compare(written(tmp_path / "steps", *frames), ShiftedExecutor(), lambda command: "idle")
    assert [recorded for recorded, _ in report.times["idle"]] == [4.0, 1.0]
    assert report.to_json()["kinds"]["idle"]["recorded"] == {"mean": 2.5, "median": 2.5, "p99": 4.0}
    assert times_table(report).row_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_a_models_recording_is_replayed_with_a_copy_of_its_checkpoint(tmp_path, mesh):
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint(tmp_path / "model")
    # One row and one chunk, so that there is one program of each kind to compile.
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "prefill_chunk": 8, "page_size": 4, "cache_tokens": 64}
    kinds = (SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=9, temperature=1, seed=3))
    with LLM(str(checkpoint), dtype="float32", mesh=mesh, record_steps=str(tmp_path / "steps"), **sizes) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(range(2, 2 + length))} for length in (5, 19)], kinds)
    copied = checkpoint.rename(tmp_path / "elsewhere")
    record = StepRecording(tmp_path / "steps")
    with pytest.raises(UserError, match="model"):
        build_executor(record, None)  # it is not there any more
    executor = build_executor(record, str(copied))
    report = compare(record, executor, lambda command: launch_kind(command, executor.buckets))
    executor.shutdown()
    assert (report.num_differing, report.end) == (0, "shutdown")
    assert report.num_tokens >= sum(len(output.outputs[0].token_ids) for output in outputs) == 18
