"""A model whose prompts are computed on one mesh and decoded on another gives to the bit what one device gives each request alone. These
are the tests of `setup/side_options.py` and `transfer/page_chunks.py` too."""

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from layouts import MODELS, decide_at_once
from waits import until

from dsjax import LLM, SamplingParams
from dsjax.checkpoint.load import load
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.setup import loading
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.side_options import decode_args, prefill_args
from dsjax.engine.tiers.page_folder import PageFolder
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.errors import UserError
from sharding import MeshError

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 128}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPTIONS = {
    "prefill_mesh": "tp=2",
    "decode_mesh": "dp=2",
    "prefill_config": {"max_num_seqs": 2, "max_num_batched_tokens": 32, "prefill_chunk": 24},
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "local_prefill_tokens": 1,
    "transfer_timeout": 600,  # programs compile at first use
}
"""Meshes and sizes that differ, experts that move, drafts, and a model that has index keys. More meshes: `transfer/test_wide_sides.py`."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("separated"), **MODELS["v3.2"])


def requests():
    """(prompt, parameters): everything that makes tokens depend on more than the prompt's values."""
    text = "a page of the cache holds four tokens of a prompt, and this one has a good many of them"
    usual, ends = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}, {"ignore_eos": False}
    given = [
        ("ab", {}),
        (text, {}),
        (text, {"temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 3}),
        (text[:40], {"temperature": 1.0, "seed": 11, "logprobs": 3}),
        (text[:31] + text[:50], {"presence_penalty": 1.5, "repetition_penalty": 1.3}),
        (text[5:], {"max_tokens": 24, "structured_outputs": StructuredOutputs(json=SCHEMA), **ends}),
        (text[9:49], {"prompt_logprobs": 1}),
        (text, {"logit_bias": {70: 4.0}, "min_tokens": 3, **ends}),
        (text[2:60], {"temperature": 0.7, "seed": 3, "stop": ["e"], **ends}),
    ]
    return [(prompt, SamplingParams(**usual | params)) for prompt, params in given]


def made(outputs):
    """Tokens, text and log-probabilities of each answer, and those of its prompt where they were asked for."""
    values = lambda logprobs: [one and {t: found.logprob for t, found in one.items()} for one in logprobs or ()]  # noqa: E731
    return [
        (list(c.token_ids), c.text, c.finish_reason, values(c.logprobs), values(output.prompt_logprobs))
        for output in outputs
        for c in output.outputs
    ]


def generated(llm):
    prompts, params = zip(*requests(), strict=True)
    return made(llm.generate(list(prompts), list(params)))


def loaded(checkpoint, **options) -> LLM:
    """One program for decodes, however many there are, instead of two."""
    llm = LLM(str(checkpoint), dtype="float32", **SIZES, **options)
    llm.executor.buckets = replace(llm.executor.buckets, decode=(SIZES["max_num_seqs"],))
    return llm


@pytest.fixture(scope="module")
def expected(checkpoint, kernels):
    with loaded(checkpoint) as llm:
        assert llm.executor.model.is_exact
        return made(llm.generate([prompt], [params])[0] for prompt, params in requests())


@pytest.mark.slow
def test_tokens_and_log_probabilities_are_those_of_one_device_alone(checkpoint, expected, monkeypatch):
    reads, before = [], set(threading.enumerate())
    monkeypatch.setattr(loading, "load", lambda *args, **rest: reads.append(args) or load(*args, **rest))
    with loaded(checkpoint, **OPTIONS) as llm:
        core = llm.engine.core
        assert len(reads) == 2, "each engine reads the weights"
        [engine] = llm.parts.prefill_engines
        decide_at_once(SimpleNamespace(engine=engine))
        for sizes in (llm.facts.prefill_sizes, engine.core.scheduler.config):
            assert (sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.prefill_chunk) == (2, 32, 24)
        assert (llm.facts.max_num_seqs, llm.facts.max_num_batched_tokens, llm.facts.prefill_chunk) == (4, 16, 16)
        assert generated(llm) == expected
        counts = core.part(PrefillLinks).source.transfer_counts
        assert counts.completed >= 3
        assert counts.given_up == 0
        assert counts.pages > 40
        assert [load.rank for load in core.loads()] == list(range(llm.facts.dp_ranks))
        assert generated(llm) == expected
        llm.engine.flush_prefix_cache()
        for turns in range(0, 12, 2):
            llm.engine.add_request("gone", requests()[4][0][turns:], requests()[1][1])
            for _ in range(turns):
                llm.engine.step()
            llm.engine.abort("gone")
        assert generated(llm) == expected
        with pytest.raises(UserError, match="cannot change while it runs"):
            llm.scale("dp=2")
    assert engine.error is None
    assert engine.core.part(ExpertBalancer).statistics().rebalances > 0
    assert engine.num_jobs == engine.buffers.num_kept == 0
    assert all(rank.pool.num_used == 0 for side in (core, engine.core) for rank in side.scheduler.ranks)
    until(lambda: not any(thread.name == "dsjax-prefill" for thread in {*threading.enumerate()} - before))


def test_each_side_has_its_own_mesh_and_sizes_and_decode_alone_the_tiers():
    sizes = {"max_num_seqs": 256, "cache_tokens": 4096, "redundant_experts": 8, "host_cache_bytes": 1000}
    both = EngineArgs(prefill_mesh="tp=2", decode_mesh="dp=4", **sizes)
    own = {"max_num_seqs": 8, "max_num_batched_tokens": 16_384, "prefill_chunk": 8192, "cache_tokens": 65_536}
    own |= {"redundant_experts": 0}
    args = replace(both, prefill_config=own)
    assert args.num_devices == 6
    assert (decode_args(args).mesh, decode_args(args).host_cache_bytes) == ("dp=4", 1000)
    assert (prefill_args(args).mesh, prefill_args(args).host_cache_bytes) == ("tp=2", 0)
    assert not decode_args(args).separated
    of_whom = [{name: getattr(side(args), name) for name in own} for side in (prefill_args, decode_args)]
    assert of_whom == [own, {name: getattr(both, name) for name in own}]
    assert {name: getattr(prefill_args(both), name) for name in own} == of_whom[1], "as the others' by default"
    small = replace(both, max_num_seqs=8, prefill_config={"max_num_batched_tokens": 128})
    assert (prefill_args(small).chunk_tokens, decode_args(small).chunk_tokens) == (128, 256), "no longer than a step"
    balanced = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 8, "payback": 2}}
    moving = replace(args, redundant_experts=0, **balanced)
    assert (prefill_args(moving).num_redundant, decode_args(moving).num_redundant) == (0, 8)
    assert prefill_args(moving).eplb.payback == decode_args(moving).eplb.payback == 2
    whole = replace(moving, prefill_mesh="tp=2,ep=1")
    assert prefill_args(whole).eplb is None, "each device has all experts there"
    assert decode_args(whole).eplb.num_redundant_experts == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decode_mesh": "dp=x"}, "dp=x"),
        (
            {"max_num_seqs": 256, "prefill_config": {"max_num_batched_tokens": 128}},
            "^of --prefill-mesh .*--prefill-config .*128, less than --max-num-seqs 256",
        ),
        ({"prefill_config": {"cache_tokens": 1000}}, "^of --prefill-mesh .*--cache-tokens is 1000, .* give 1008"),
        ({"prefill_config": {"prefill_chunk": 0}}, "--prefill-config has prefill_chunk 0; expected an integer of"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises((UserError, MeshError), match=says):
        EngineArgs(**{"prefill_mesh": "dp=2", "decode_mesh": "dp=2"} | options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decode_mesh": "dp=3000"}, "^--decode-mesh dp=3000 and --prefill-mesh dp=1 want 3001 devices, found "),
        ({"prefill_config": {"cache_tokens": 64}}, "^of --prefill-mesh dp=1, .* is 128, but the cache of a DP rank"),
        ({"disk_cache": "taken", "disk_cache_bytes": 1 << 20}, "is in use by another engine"),
    ],
)
def test_what_does_not_fit_is_refused_of_its_side_and_leaves_another_server_s_folder_as_it_is(
    checkpoint, tmp_path, monkeypatch, options, says
):
    jax.devices()  # from here on no more can be emulated
    if "prefill_config" not in options:  # the cache is what is left beside the weights
        monkeypatch.setattr(loading, "load", lambda *args, **rest: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    (taken := tmp_path / "taken").mkdir()
    with contextlib.closing(PageFolder(taken).lock()), pytest.raises(UserError, match=says):
        LLM(str(checkpoint), **{"prefill_mesh": "dp=1", "decode_mesh": "dp=1"} | options, **SIZES)
    assert {path.name for path in taken.iterdir()} == {"dsjax-pages", "lock"}
