"""From prompt to output, without threads and without JAX. Also tests `core.py`, `llm_engine.py`, `stats.py` and `text/outputs.py`."""

from dataclasses import replace
from unittest import mock
from unittest.mock import Mock

import pytest
from fake_executor import FakeExecutor, expected_tokens
from tiny_tokenizer import EOS, tiny_tokenizer

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.llm_engine import LLMEngine
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.schedule.scheduler_config import AdmissionError
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.stats import DraftCounts
from dsjax.engine.text.input_processor import PromptError
from dsjax.errors import UserError


def make_engine(eos=(), stream_interval=1, generations=None, **executor_options) -> LLMEngine:
    executor = FakeExecutor(**executor_options)
    args, options = EngineArgs(stream_interval=stream_interval), {"eos_token_ids": eos, "mesh_changer": generations}
    return LLMEngine(executor.parts(args=args, **options))


def finish(engine: LLMEngine) -> dict:
    last = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
    return last


def scripted(text: str):
    """A model that writes this text behind the empty prompt, ending with the end-of-sequence token."""
    tokenizer = tiny_tokenizer()
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id]
    return lambda context, seed, vocab_size: tokens[min(len(context), len(tokens)) - 1]


def generate(engine: LLMEngine, prompt="", **params):
    engine.add_request("r", prompt, SamplingParams(temperature=0, **params))
    return finish(engine)["r"].outputs[0]


def test_greedy_tokens_are_the_model_s_for_many_prompts_at_once():
    engine = make_engine(num_ranks=3)
    prompts = {str(i): [1 + i, 2, 3 * i][: 1 + i % 3] + [5] * i for i in range(20)}
    greedy = SamplingParams(temperature=0, output_kind=OutputKind.FINAL_ONLY)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, replace(greedy, max_tokens=9))
    outputs = finish(engine)
    engine.add_request("text", "def main", greedy)
    text = finish(engine)["text"]
    assert (text.prompt, text.prompt_token_ids[0]) == ("def main", engine.tokenizer.bos_id)
    assert len(text.outputs[0].token_ids) == 16, "vLLM's default of max_tokens"
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == expected_tokens(prompt, 9)
        assert outputs[name].outputs[0].finish_reason == "length"
        assert outputs[name].prompt_token_ids == prompt
        assert outputs[name].metrics.first_token_time >= outputs[name].metrics.arrival_time


@pytest.mark.parametrize(
    ("interval", "max_tokens", "pieces"), [(1, 12, [1] * 12), (4, 12, [1, 4, 4, 3]), (4, 5, [1, 4]), (4, 1, [1])]
)
def test_deltas_add_up_to_the_whole_output_in_pieces_of_the_stream_interval(interval, max_tokens, pieces):
    engine = make_engine(stream_interval=interval)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, output_kind=OutputKind.DELTA)
    engine.add_request("r", "abc", params)
    found = []
    while engine.has_unfinished():
        found += [output.outputs[0] for output in engine.step()]
    assert [len(piece.token_ids) for piece in found] == [len(piece.logprobs) for piece in found] == pieces
    whole = generate(make_engine(), "abc", max_tokens=max_tokens, logprobs=1)
    assert "".join(piece.text for piece in found) == whole.text
    assert [token for piece in found for token in piece.token_ids] == whole.token_ids
    assert [entry for piece in found for entry in piece.logprobs] == whole.logprobs
    assert found[-1].cumulative_logprob == whole.cumulative_logprob == -0.5 * max_tokens
    assert found[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [(["lo wö"], False, "hél"), (["zzz", "lo wö"], True, "héllo wö"), (["🙂"], False, "héllo wörld 你好 ")],
)
def test_stop_strings_end_the_text_across_token_boundaries(stop, include, text):
    engine = make_engine(model=scripted("héllo wörld 你好 🙂!"), eos=[1])
    output = generate(engine, max_tokens=60, stop=stop, include_stop_str_in_output=include)
    assert engine.core.scheduler.ranks[0].pool.num_used == engine.outputs.num_unfinished == 0
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", stop[-1])


def test_end_of_sequence_is_in_the_tokens_and_not_in_the_text():
    output = generate(make_engine(model=scripted("ab"), eos=[1]), max_tokens=9)
    assert (output.text, output.token_ids[-1], output.finish_reason, output.stop_reason) == ("ab", 1, "stop", None)
    ignoring = generate(make_engine(model=scripted("ab"), eos=[1]), max_tokens=9, ignore_eos=True)
    assert ignoring.finish_reason == "length"
    shown = generate(make_engine(model=scripted("ab")), max_tokens=3, skip_special_tokens=False)
    assert shown.text == f"ab{EOS}"


def test_a_stop_token_names_itself_and_its_text_is_kept_only_when_asked():
    (z,) = tiny_tokenizer().encode("z", add_special_tokens=False)
    for include, text in ((False, "ab"), (True, "abz")):
        engine = make_engine(model=scripted("abzz"))
        output = generate(engine, max_tokens=9, stop_token_ids=[z], include_stop_str_in_output=include)
        assert (output.text, output.stop_reason, output.finish_reason) == (text, z, "stop")


def test_abort_gives_a_last_output_and_frees_pages_when_the_step_under_way_is_done():
    engine = make_engine()
    engine.add_request("r", [1, 2, 3], SamplingParams(n=2, max_tokens=50))
    engine.step()
    engine.abort("r")
    (output,) = engine.step()
    assert engine.core.scheduler.ranks[0].pool.num_used == 0
    assert output.finished
    assert [o.finish_reason for o in output.outputs] == ["abort", "abort"]
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, PromptError, "empty"),
        ([1, 300], {}, PromptError, "token 1 is 300, expected an integer from 0 to 299"),
        ({"text": "a"}, {}, PromptError, "expected prompt or prompt_token_ids"),
        ([1] * 120, {"max_tokens": 30}, AdmissionError, "maximum context length of this model is 128"),
    ],
)
def test_wrong_requests_are_refused_and_leave_nothing_behind(prompt, params, error, message):
    engine = make_engine()
    with pytest.raises(error, match=message):
        engine.add_request("r", prompt, SamplingParams(**params))
    assert not engine.has_unfinished()
    assert engine.outputs.num_unfinished == 0


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        ({"address": "nowhere", "transfer": "a"}, "the address of a prefill engine is 'nowhere', expected HOST:PORT"),
        ({"address": 5, "transfer": "a"}, "expected address and transfer as text"),
        ({"address": "[::1]:90"}, "expected address and transfer as text"),
    ],
)
def test_a_prefill_engine_that_cannot_be_is_refused_before_the_engine_connects_to_it(prefill, message):
    engine = make_engine()
    with pytest.raises(UserError, match=message):
        engine.add_request("r", [1], SamplingParams(), RequestOptions(prefill=prefill))
    options = RequestOptions(prefill={"address": "[::1]:90", "transfer": "a"})
    engine.add_request("r", [1], SamplingParams(n=2), options)


def test_a_request_id_in_use_is_refused():
    engine = make_engine()
    engine.add_request("r", [1], SamplingParams())
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("r", [1], SamplingParams())


def test_an_interrupt_before_the_mesh_changes_leaves_it_and_another_change_may_be_asked_for():
    generations = Mock(poll_change=bool)
    engine = make_engine(generations=generations)
    engine.add_request("r", [1, 2], SamplingParams(temperature=0, max_tokens=3))
    engine.step()
    with (
        mock.patch.object(engine.core.executor, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.scale("dp=2")
    assert [call for call, *_ in generations.method_calls if call.startswith(("begin", "end"))] == [
        "begin_change",
        "end_change",
    ]
    assert finish(engine)["r"].outputs[0].token_ids == expected_tokens([1, 2], 3)


def test_prompts_and_rows_without_drafts_count_no_draft():
    result = RankResults([RowResult((5,))], [RowResult((5, 6), num_drafts=2)])
    assert DraftCounts.of([result]) == DraftCounts(0, 0, 0, ())
