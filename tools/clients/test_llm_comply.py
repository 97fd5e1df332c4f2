"""llm-comply's cases of the chat API, the Responses API and the Messages API."""

from importlib.resources import files

import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests

MODEL = "deepseek-r1"
SPECS = {"openai-chat": "openai_chat.json", "open-responses": "openresponses.json"}
TEXT_ONLY = "this server reads text only"
FAILING = {
    "chat-image-input": TEXT_ONLY,
    "image-input": TEXT_ONLY,
    "chat-reasoning-summary": "OpenAI's chat API has no field reasoning; unknown fields are refused",
    "chat-error-handling": "model may be left out, as with vLLM and SGLang",
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
    result = TestRunner(ComplianceConfig(url, "none", MODEL), [case], spec).run_one(case)
    assert result.errors == []
