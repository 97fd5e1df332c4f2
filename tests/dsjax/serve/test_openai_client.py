"""The `openai` client, unmodified, gets what the engine gives."""

import asyncio

import pytest
from fake_executor import FakeExecutor, expected_tokens
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.llm_engine import LLMEngine

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def client(server):
    return server.openai_client()


def engine_text(prompt, **params) -> str:
    engine = LLMEngine(FakeExecutor(max_chunk=3, page_size=2, pages_per_rank=200).parts())
    engine.add_request("r", prompt, SamplingParams(**params))
    while engine.has_unfinished():
        for output in engine.step():
            text = output.outputs[0].text
    return text


def test_64_clients_at_once_streamed_and_not_get_the_engine_s_own_text(server):
    import openai

    prompts = [f"def f{i}(): return {'wörld ' * (i % 5)}" for i in range(64)]

    async def ask(client, prompt, stream):
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        answer = await client.completions.create(**asked, stream=stream)
        return "".join([chunk.choices[0].text async for chunk in answer]) if stream else answer.choices[0].text

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 2 == 1) for i, prompt in enumerate(prompts)))

    texts = asyncio.run(asyncio.wait_for(main(), 240))
    assert texts == [engine_text(prompt, max_tokens=20, temperature=0) for prompt in prompts]
    assert len(set(texts)) > 50
    assert server.pages_in_use == 0


@pytest.mark.parametrize(("prompt", "count"), [("ab", 1), (["ab", "cd"], 2), ([5, 6], 1), ([[5, 6], [7, 8], [9]], 3)])
def test_prompts_come_in_four_forms(client, prompt, count):
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 4 * 2 * count
    several = prompt if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else [prompt]
    for index, each in enumerate(several):
        ids = each if isinstance(each, list) else TOKENIZER.encode(each)
        assert answer.choices[2 * index].text == TOKENIZER.decode(expected_tokens(ids, 4))


def test_a_stream_of_several_prompts_and_choices_is_the_whole_answer_in_pieces(client):
    options = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 6, "seed": 3, "n": 2, "logprobs": 2}
    whole = client.completions.create(**options)
    texts, tokens, usage = {}, {}, None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens[choice.index] = tokens.get(choice.index, []) + list(choice.logprobs.tokens)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert tokens == {choice.index: list(choice.logprobs.tokens) for choice in whole.choices}
    assert usage.total_tokens == whole.usage.total_tokens


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def chat_tokens(count: int) -> list[int]:
    text = TOKENIZER.chat_template.render(MESSAGES)
    return expected_tokens(TOKENIZER.encode(text, add_special_tokens=False), count)


def test_chat_renders_the_template_and_streams_what_it_answers_whole(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    (choice,) = whole.choices
    assert (choice.message.content, choice.message.role) == (TOKENIZER.decode(chat_tokens(12)), "assistant")
    assert choice.finish_reason == "length"
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens_details.cached_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12


def test_chat_logprobs_have_exact_bytes_and_as_many_alternatives_as_asked(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(top_logprobs=3, **options)
    content = answer.choices[0].logprobs.content
    ids = chat_tokens(5)
    assert [bytes(entry.bytes) for entry in content] == [TOKENIZER.token_bytes(i) for i in ids]
    assert all([one.logprob for one in entry.top_logprobs] == [-0.5, -1.5, -2.5] for entry in content)
    assert client.chat.completions.create(**options).choices[0].logprobs.content[0].top_logprobs == []


def test_chat_without_a_limit_runs_to_the_end_of_the_context(client, server):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.usage.total_tokens == server.executor.limits.max_model_len


def test_stop_strings_end_the_text(client):
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 12, "temperature": 0}
    full = client.completions.create(**asked).choices[0].text
    stop = full[4:6]
    choice = client.completions.create(**asked, stop=stop).choices[0]
    assert choice.text == full[: full.index(stop)]
    assert choice.finish_reason == "stop"


def test_models_are_listed_under_every_name(client):
    import openai

    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").max_model_len == 128
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_client_s_own_exceptions(client):
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length of this model is 128") as long:
        client.completions.create(model="tiny", prompt="a", max_tokens=500)
    assert (long.value.type, long.value.code) == ("invalid_request_error", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match=r"and at least 1 more must fit, together \d+") as full:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 300}])
    assert full.value.body["message"].endswith("; shorten the prompt")
