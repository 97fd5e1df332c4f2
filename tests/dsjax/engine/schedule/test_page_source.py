"""The KV connector of docs/examples: pages leave and come back, and tokens are the same. Also tests `setup/loading.py`."""

import sys
from pathlib import Path

import pytest
from quick_compilation import FEW_SHAPES

from dsjax import LLM, SamplingParams
from dsjax.errors import UserError

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
OPTIONS = FEW_SHAPES | {"dtype": "float32", "mesh": "dp=2", "max_model_len": 96, "cache_tokens": 96}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def module(monkeypatch):
    """The example, as a module that the option can name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield "kept_pages"
    sys.modules.pop("kept_pages", None)


def prompts():
    """Four beginnings that the cache cannot hold together, each asked for twice."""
    return [{"prompt_token_ids": [n + 1] * 4 + list(range(10 * n, 10 * n + 50))} for n in (0, 1, 2, 3, 0, 1, 2, 3)]


def generated(llm):
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts()]


@pytest.mark.slow
def test_the_example_keeps_pages_and_gives_them_back(checkpoint, module):
    with LLM(str(checkpoint), **OPTIONS) as plain, LLM(str(checkpoint), page_source=module, **OPTIONS) as llm:
        expected = generated(plain)
        assert generated(llm) == expected
        assert sum(rank.hits["kept"] for rank in llm.engine.core.scheduler.ranks) >= 100
        llm.engine.flush_prefix_cache()
        assert generated(llm) == expected


def test_a_module_that_cannot_be_imported_is_named(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--page-source no_such_module cannot be imported \(ModuleNotFoundError"):
        LLM(str(checkpoint), page_source="no_such_module", **OPTIONS)
    (tmp_path / "half_a_source.py").write_text("def attachment(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="half_a_source has no device_part; it must define"):
        LLM(str(checkpoint), page_source="half_a_source", **OPTIONS)
