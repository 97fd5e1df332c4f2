"""``dsjax.LLM`` on a tiny checkpoint: errors, interruption, and text that depends on nothing but the request. These are the tests of
`device/mesh_executor.py`, `device/lowered_programs.py`, `device/step_programs.py` and `device/slots.py` too."""

import dataclasses
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from layouts import TINY

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.commands import Step
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.elastic.follower import Follower
from dsjax.engine.program_cache.folder import ProgramFolder
from dsjax.engine.setup import loading, sizes
from dsjax.engine.text.tokenizer import ChatTemplate
from dsjax.errors import UserError
from dsjax.kernels import build
from sharding import MeshError

VOCABULARY = TINY["vocab_size"]
PAGE = 4


def load(checkpoint, mesh="dp=1", **options) -> LLM:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": PAGE}
    return LLM(str(checkpoint), mesh=mesh, dtype="float32", **(sizes | options))


@pytest.fixture(scope="module")
def engine(checkpoint):
    """One device; a single program for each phase."""
    with load(checkpoint) as made:
        made.executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(2, 16),), mixed=False)
        yield made


@pytest.fixture
def llm(engine):
    """After each test, whatever happened in it, there is no request and no page in use."""
    yield engine
    assert not engine.engine.has_unfinished()
    assert [rank.pool.num_used for rank in engine.engine.core.scheduler.ranks] == [0]


def prompt(length: int, seed: int = 0) -> dict:
    return {"prompt_token_ids": np.random.default_rng([seed, length]).integers(2, VOCABULARY, size=length).tolist()}


def greedy(tokens: int = 6, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


SIX = [prompt(length) for length in (30, 1, 17, 5, 16, 2)]


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *args, **kwargs: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_token_ids": [3] * 126}, "maximum context length of this model is 128 tokens"),
        ("text", "no tokenizer; give prompt_token_ids"),
        ({"prompt_token_ids": {3: 4}}, "the prompt is {3: 4}, expected text, token ids"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids is 'text', expected token ids"),
    ],
)
def test_one_wrong_prompt_is_named_and_nothing_runs(llm, wrong, message, monkeypatch):
    monkeypatch.setattr(llm.executor, "launch", lambda command: pytest.fail("a step was run"))
    with pytest.raises(UserError, match=message):
        llm.generate([prompt(4), wrong, prompt(2)], greedy())


def test_64_bit_jax_is_refused(checkpoint):
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX_ENABLE_X64 is on"):
        load(checkpoint)


def test_weights_that_the_host_cannot_hold_are_refused_before_they_are_read(checkpoint, monkeypatch, no_weights):
    monkeypatch.setattr(sizes, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"GB on 2 emulated devices, and this host has .* GB of memory"):
        load(checkpoint, "dp=2")


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"mesh": "tp=3"}, MeshError, ["8 attention heads", "32 physical experts", "redundant experts that fits is 1"]),
        ({"mesh": "dp=64,ep=32"}, MeshError, ["wants 64 devices, found 32"]),
        ({"mla_prefill": "CD"}, UserError, ["--mla-prefill CD reads", "A_CC_ME"]),
        ({"dispatch": "teleport"}, UserError, ["--dispatch is 'teleport'", "gather"]),
    ],
)
def test_what_cannot_be_is_told_before_weights_are_read(checkpoint, options, error, parts, no_weights):
    jax.devices()  # the session's 32; before JAX has started, 64 could still be emulated
    with pytest.raises(error) as found:
        load(checkpoint, **options)
    for part in parts:
        assert part in str(found.value)


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_process_whose_engine_cannot_be_started_leaves_the_others_though_it_lives_on(monkeypatch, is_leader):
    group, fail = Mock(is_leader=is_leader), Mock(side_effect=ValueError("there is no room for its cache"))
    monkeypatch.setattr(loading, "load_model", fail)
    monkeypatch.setattr(Follower, "run_with", fail)
    with pytest.raises(ValueError, match="no room for its cache"):
        LLM(mesh="pp=2", group=group)
    group.leave.assert_called_once_with("its engine could not be started")


@pytest.fixture(scope="module")
def undisturbed(engine):
    return tokens_of(engine.generate(SIX, greedy()))


def test_logits_wait_for_no_running_request(llm):
    llm.engine.add_request("mine", prompt(4), greedy())
    with pytest.raises(UserError, match="requests are running"):
        llm.logits([[2, 3]])
    llm.engine.abort("mine")
    llm.engine.step()
    assert len(llm.logits([[2, 3]])) == 1


@pytest.mark.parametrize(("where", "steps"), [("launch", 0), ("launch", 4), ("wait", 0), ("wait", 3)])
def test_an_interrupt_leaves_nothing_running_and_the_next_call_works(llm, undisturbed, where, steps, monkeypatch):
    undisturbed_call, calls = getattr(llm.executor, where), []

    def interrupted(given):
        if where == "wait" or isinstance(given, Step):
            calls.append(given)
            if len(calls) == steps + 1:
                raise KeyboardInterrupt
        return undisturbed_call(given)

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(SIX, greedy())
    assert len(calls) > steps
    assert llm.engine.core.scheduler.num_unfinished == 0
    assert len(llm.logits([[2, 3]])) == 1
    assert tokens_of(llm.generate(SIX, greedy())) == undisturbed


@pytest.mark.usefixtures("interrupts_are_raised")
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_in_the_middle_of_a_step_waits_for_its_end(llm, undisturbed, interrupts, monkeypatch):
    handler, update, calls = signal.getsignal(signal.SIGINT), llm.engine.core.scheduler.update, []

    def interrupted(*given):
        calls.append(given)
        # The results of this step are not entered yet; the second interrupt comes while the first is handled.
        if len(calls) in (3, 4)[:interrupts]:
            signal.raise_signal(signal.SIGINT)
        return update(*given)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.scheduler, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(SIX, greedy())
    assert len(calls) >= 4, "what was under way is waited for"
    assert signal.getsignal(signal.SIGINT) is handler
    assert tokens_of(llm.generate(SIX, greedy())) == undisturbed


def test_calls_of_several_threads_take_turns(llm, undisturbed):
    (logits,) = llm.logits([[2, 3]])
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(llm.generate, SIX, greedy()) for _ in range(3)]
        scored = threads.submit(llm.logits, [[2, 3]])
    assert [tokens_of(each.result()) for each in found] == [undisturbed] * 3
    assert (scored.result()[0] == logits).all()


def test_prompts_come_as_they_do_to_vllm_and_progress_is_shown_where_it_is_asked_for(llm, capsys):
    ids = prompt(5)["prompt_token_ids"]
    expected = tokens_of(llm.generate({"prompt_token_ids": ids}, greedy(np.int64(3))))
    for given in (ids, np.array(ids), [ids], np.array([ids])):
        assert tokens_of(llm.generate(given, greedy(3), priority=[np.int64(1)])) == expected
    assert capsys.readouterr().err == ""
    llm.generate([ids, ids], greedy(3), use_tqdm=True)
    assert "prompts: 2 of 2 (100%)" in capsys.readouterr().err
    assert llm.get_tokenizer() is llm.tokenizer


def test_nothing_is_computed_after_a_shutdown(checkpoint):
    with load(checkpoint) as made:
        made.close()
    made.shutdown()
    made.shutdown()
    calls = (made.generate, prompt(2), greedy()), (made.logits, [[2]]), (made.scale, "dp=1"), (made.warm_up,)
    for call, *given in calls:
        with pytest.raises(UserError, match="this LLM was shut down; create another one"):
            call(*given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([prompt(2)] * 3, [greedy(), greedy()]), "found 2 sampling parameters for 3 prompts"),
        (lambda llm: llm.generate(b"text", greedy()), "prompts is b'text', expected text"),
        (lambda llm: llm.generate(prompt(2), {"temperature": 0}), "sampling_params is {'temperature': 0}, expected"),
        (lambda llm: llm.generate(prompt(2), greedy(), priority=5), "priority is 5, expected a list"),
        (lambda llm: llm.generate([prompt(2)] * 2, greedy(), priority=[1]), "found 1 priorities for 2 prompts"),
        (lambda llm: llm.generate(prompt(2), greedy(), priority=["a"]), "priority: found 'a', expected an integer"),
        (lambda llm: llm.generate(prompt(2), greedy(), cache_salt=5), "cache_salt: found 5, expected text"),
        (lambda llm: llm.logits([[2, 3], []]), "found a sequence of 0 tokens, expected 1 to 128"),
        (lambda llm: llm.logits([[2, VOCABULARY, -1]]), r"\[96, -1\] are outside the vocabulary, 0 to 95"),
        (lambda llm: llm.logits(None), "token_ids is None, expected a list of lists"),
        (lambda llm: llm.logits([2, 3]), "found the sequence 2, expected a list of token ids"),
    ],
)
def test_what_is_no_prompt_parameter_or_sequence_is_told(llm, call, message):
    with pytest.raises(UserError, match=message):
        call(llm)


TOOL = {"type": "function", "function": {"name": "look_up"}}
HI = {"role": "user", "content": "hi"}
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hi", {}, "messages is 'hi', expected a list of messages such as"),
        (["hi"], {}, "a conversation is 'hi', expected a list of messages"),
        ([[]], {}, "messages: List should have at least 1 item"),
        ([{"role": "critic", "content": "hi"}], {}, "messages.0.role: Input should be 'system', 'developer', 'user'"),
        ([IMAGE], {}, "a part of type image_url, but this model reads text"),
        ([HI | {"colour": 1}], {}, "messages.0.colour: unknown field"),
        ([{"role": "user", "tool_calls": []}], {}, "found no content, expected text"),
        ([HI], {"chat_template_kwargs": 5}, "chat_template_kwargs: Input should be a valid"),
        ([HI], {"tools": [TOOL, TOOL]}, "two tools have the same name"),
    ],
)
def test_what_is_no_message_is_told(llm, monkeypatch, messages, options, message):
    template = ChatTemplate("no message looks like this")
    monkeypatch.setattr(llm, "tokenizer", SimpleNamespace(chat_template=template, token_id=lambda text: None))
    with pytest.raises(UserError, match=message):
        llm.chat(messages, greedy(), **options)


def test_a_logits_call_that_is_not_finite_leaves_nothing_in_its_pages(llm, monkeypatch):
    poisoned = llm.executor.params["embed.weight"].at[95].set(np.nan)
    monkeypatch.setitem(llm.executor.params, "embed.weight", poisoned)
    expected = tokens_of(llm.generate(prompt(13), greedy(4), cache_salt="before"))
    (logits,) = llm.logits([[95] * 40])
    assert not np.isfinite(logits).any()
    llm.engine.flush_prefix_cache()
    assert tokens_of(llm.generate(prompt(13), greedy(4))) == expected


def test_priorities_order_what_waits(llm, monkeypatch):
    scheduler, pool = llm.engine.core.scheduler, llm.engine.core.scheduler.ranks[0].pool
    monkeypatch.setattr(scheduler, "config", dataclasses.replace(scheduler.config, policy="priority"))
    held = pool.allocate(pool.num_usable - 3)  # room for one request at a time
    outputs = llm.generate([prompt(n) for n in (9, 5, 7)], greedy(2), priority=[2, 1, 0])
    pool.release(held)
    ended = [output.metrics.finish_time for output in outputs]
    assert sorted(ended) == ended[::-1]


@pytest.mark.slow
def test_after_warming_up_nothing_more_is_compiled(checkpoint, monkeypatch):
    monkeypatch.setattr(ProgramFolder, "inside", lambda cache: None)  # another test may have compiled the same
    with load(checkpoint) as warm:
        # Each kind of launch: decodes, prompts, and both at once.
        warm.executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(2, 16),), mixed=True)
        seen = []
        warm.warm_up(lambda done, total, label: seen.append((done, total, label)))
        programs = warm.executor.programs.compiled
        told = [done for done, _, _ in seen]
        assert told == sorted(told), "first all is traced, then it is compiled"
        assert sorted(set(told)) == list(range(len(programs) + 1))
        assert {total for _, total, _ in seen} == {len(programs)}
        warm.generate(SIX[:5], [greedy(3), SamplingParams(max_tokens=5, logprobs=2), greedy(9), greedy(2), greedy(4)])
        warm.warm_up()
        assert warm.executor.programs.compiled == programs
        warm.executor.programs.drop()
        told = []
        warm.warm_up(lambda done, total, label: told.append(done))
        assert told == [0, len(programs)], "the process has kept them"
        warm.executor.programs.drop()
        warm.executor.programs.store.shelf._about = None  # as on one device, where nothing is kept
        traced = []

        def stop_at_the_third(done, total, label):
            traced.append(label)
            if len(traced) == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            warm.warm_up(stop_at_the_third)
        assert len(traced) == 3, "what progress raises ends the warm-up, between two programs"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def test_steps_count_their_experts_tokens_only_while_that_is_recorded(llm):
    llm.generate(prompt(5), greedy(4))
    executor, plain = llm.executor, llm.executor.programs.compiled
    executor.set_recording(True)
    text = llm.generate(prompt(5, seed=7), greedy(4))[0].outputs[0].token_ids
    counts = executor.expert_counts()
    executor.set_recording(False)
    config = executor.model.config
    assert counts.tokens_per_expert.sum() == (5 + 3) * config.num_experts_per_tok * config.num_moe_layers
    counting = executor.programs.compiled
    assert {key[0] for key in counting - plain} == {"step"}
    assert llm.generate(prompt(5, seed=7), greedy(4))[0].outputs[0].token_ids == text
    assert executor.programs.compiled == counting
    assert executor.expert_counts() is None


def test_a_lazy_warm_up_compiles_what_one_request_needs_and_the_rest_while_commands_run(checkpoint, monkeypatch):
    with load(checkpoint) as lazy:
        executor = lazy.executor
        executor.buckets = Buckets((1, 4), (Rectangle(1, 16), Rectangle(2, 8)), False, (Rectangle(1, 8),))
        rest, wanted = lazy.parts.warm_up(lazily=True), set(executor.programs.labels(executor.buckets))
        first = executor.programs.compiled
        assert first < wanted
        assert ("step", True) not in [(key[0], key[2]) for key in first if key[0] == "step"], (
            "prompt scores are seldom asked for"
        )
        lazy.generate(prompt(5), greedy(3))
        lazy.generate(prompt(20), SamplingParams(max_tokens=3, logprobs=2))
        assert executor.programs.compiled == first
        several = lazy.generate(SIX[1:4], greedy(4))  # on each rank more than one
        assert first < executor.programs.compiled < wanted
        waited = executor.counts().compilations_after_warm_up
        assert waited == len(executor.programs.compiled - first) > 0
        before = executor.programs.compiled
        with pytest.raises(ZeroDivisionError):
            rest(lambda: 1 / 0)
        assert executor.programs.compiled == before, "who is asked before each program may end it"
        rest(lambda: None)
        assert executor.counts().compilations_after_warm_up == waited, "for the rest no request has waited"
        assert executor.programs.compiled == wanted
        assert tokens_of(lazy.generate(SIX[1:4], greedy(4))) == tokens_of(several)
        executor.set_recording(True)
        lazy.generate(prompt(5), greedy(3))
        assert executor.programs.compiled > wanted
        assert executor.counts().compilations_after_warm_up == waited, "steps that count are known to be compiled late"
        executor.programs.drop()
        rest(lambda: None)
        assert not executor.programs.compiled, "of a mesh that was left nothing more is compiled"
        for name, value in (("shared", True), ("experts", object())):
            with monkeypatch.context() as patch:
                patch.setattr(executor.programs, name, value)
                first = executor.programs.wanted_first(executor.buckets)
                assert first == executor.programs.labels(executor.buckets), "other processes would wait for the rest"


def test_one_request_needs_the_programs_of_a_single_draft(llm):
    speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    buckets = Buckets(decode=(4,), prefill=(Rectangle(2, 16),), mixed=False, speculation=speculation)
    first = llm.executor.programs.wanted_first(buckets)
    assert {(key[0], key[2]) for key in first if "draft" in key[0]} == {("drafts", 1), ("drafting step", 1)}


def test_chat_continues_the_rendered_conversation(llm, monkeypatch):
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ '!' if add_generation_prompt else thinking }}"

    def encode(text, add_special_tokens=False):
        assert not add_special_tokens, "the template writes them"
        return [2 + ord(character) % 90 for character in text]

    tokenizer = SimpleNamespace(chat_template=ChatTemplate(template), encode=encode, token_id=lambda text: None)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    one = llm.chat([HI], greedy())
    assert one[0].prompt_token_ids == encode("uhi!")
    assert tokens_of(one) == tokens_of(llm.generate({"prompt_token_ids": encode("uhi!")}, greedy()))
    two = llm.chat([[HI], [HI]], greedy(), add_generation_prompt=False, chat_template_kwargs={"thinking": 1})
    assert [output.prompt_token_ids for output in two] == [encode("uhi1")] * 2


def test_a_model_without_a_chat_template_says_so(llm):
    with pytest.raises(UserError, match="no chat template"):
        llm.chat([HI])


def test_why_plain_kernels_are_used_is_one_line_of_the_log(checkpoint, monkeypatch, caplog):
    """Where nobody chose them; `dsjax generate` shows the line on standard error."""
    monkeypatch.setattr(build, "find_or_build", lambda folder: build.BuiltLibrary(None, "there is no compiler"))
    for kernels, lines in (("plain", []), ("auto", ["Plain kernels are used: there is no compiler."])):
        caplog.clear()
        load(checkpoint, kernels=kernels).shutdown()
        assert [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()] == lines
