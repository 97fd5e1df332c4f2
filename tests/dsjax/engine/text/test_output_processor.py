"""A caller sees the same completion, whether it is told what is new or all so far."""

from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.executor import RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.output_processor import OutputProcessor

(Z,) = tiny_tokenizer().encode("z", add_special_tokens=False)


def completed(tokenizer, tokens, min_tokens, stop):
    """The tokens and the text of a completion, from `decode` alone: it ends where the tokens after `min_tokens` first make a stop string.

    Stop strings here are ASCII, so that a character cut in two by `min_tokens` does not change what comes after it.
    """
    for count in range(min_tokens + 1, len(tokens) + 1):
        counted = tokenizer.decode(tokens[min_tokens:count])
        for text in stop:
            if text in counted:
                whole = tokenizer.decode(tokens[:count])
                return tokens[:count], whole[: len(whole) - len(counted) + counted.index(text)]
    return tokens, tokenizer.decode(tokens)


@given(
    runs=st.lists(st.lists(st.integers(0, 310) | st.just(Z), min_size=1, max_size=3), min_size=1, max_size=9),
    min_tokens=st.integers(0, 3),
    stop=st.sampled_from([(), ("zz",)]),
    logprobs=st.sampled_from([None, 0]),
)
@example(runs=[[Z], [Z], [5]], min_tokens=1, stop=("zz",), logprobs=None)  # its first z does not count
def test_deltas_put_together_are_what_a_caller_of_all_so_far_sees(runs, min_tokens, stop, logprobs):
    """runs: what each step makes, which is several tokens where drafts are accepted."""
    tokenizer = tiny_tokenizer()
    tokens, seen = [token for run in runs for token in run], {}
    for kind in (OutputKind.DELTA, OutputKind.CUMULATIVE):
        params = SamplingParams(max_tokens=40, min_tokens=min_tokens, stop=stop, logprobs=logprobs, output_kind=kind)
        request = Request("r", [1], 1, params, 40, 0)
        processor = OutputProcessor(tokenizer)
        processor.add(PreparedRequest("r", None, [1], params, [request]))
        seen[kind] = []
        for place, run in enumerate(runs, start=1):
            reason = FinishReason.LENGTH if place == len(runs) else None
            scores = [(token, -0.5, 1, ()) for token in run] if logprobs is not None else None
            outputs, _ = processor.process([Update(request, RowResult(run, scores=scores), reason)])
            seen[kind] += [output.outputs[0] for output in outputs]
    deltas, all_so_far = seen.values()
    taken, text = completed(tokenizer, tokens, min_tokens, stop)
    assert len(deltas) == len(all_so_far)
    for count, whole in enumerate(all_so_far, start=1):
        assert whole.token_ids == [token for delta in deltas[:count] for token in delta.token_ids]
        assert whole.text == "".join(delta.text for delta in deltas[:count])
        if logprobs is not None:
            assert whole.logprobs == [entry for delta in deltas[:count] for entry in delta.logprobs]
            assert len(whole.logprobs) == len(whole.token_ids)
    assert (all_so_far[-1].text, list(all_so_far[-1].token_ids)) == (text, taken)
