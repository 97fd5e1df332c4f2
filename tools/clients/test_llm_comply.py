"""llm-comply's cases of the chat API, the Responses API and the Messages API."""

from importlib.resources import files

import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests

MODELS = {"anthropic": "claude-3-5"}  # names by which the suite knows models that reason
SPECS = {"openai-chat": "openai_chat.json", "open-responses": "openresponses.json", "anthropic": "anthropic.json"}
TEXT_ONLY = "this server reads text only"
FAILING = {
    "chat-image-input": TEXT_ONLY,
    "image-input": TEXT_ONLY,
    "chat-reasoning-summary": "OpenAI's chat API has no field reasoning; unknown fields are refused",
    "chat-error-handling": "model may be left out, as with vLLM and SGLang",
    "anth-image-input": TEXT_ONLY,
    "reasoning-summary": "the reasoning itself is in the answer; the server writes no summaries",
}
CASES = [
    pytest.param(form, case, id=case.id, marks=[pytest.mark.xfail(reason=reason, strict=True)] if reason else [])
    for form in SPECS
    for case in get_tests(form)
    for reason in [FAILING.get(case.id)]
]


@pytest.mark.parametrize(("form", "case"), CASES)
def test_a_case(url, form, case):
    spec = SpecLoader(str(files("llm_comply") / "specs" / SPECS[form]))
    # OpenAI's name of the event, which the Open Responses specification calls response.reasoning.delta.
    config = ComplianceConfig(
        url, "none", MODELS.get(form, "deepseek-r1"), ignore_errors=["SSE event type: response.reasoning_text"]
    )
    result = Runner(config, [case], spec).run_one(case)
    assert result.errors == []
