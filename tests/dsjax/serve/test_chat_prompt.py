"""A conversation given in Python (`LLM.chat`) becomes the same prompt as one sent to the server."""

import pytest
from request_bodies import call, tool
from scripted_executor import tool_tokenizer

from dsjax.errors import UserError
from dsjax.serve.chat_prompt import conversation_prompt

TOOL = tool("look_up", parameters={"type": "object"})
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("look_up", '{"a": 1}')]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "call_1"}
ASKED = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("fields", [
    {"messages": [{"role": "developer", "content": "be kind"}, ASKED]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [ASKED], "tools": [TOOL]},
    {"messages": [ASKED, CALLED, RESULT], "tools": [TOOL]},
    {"messages": [ASKED, {"role": "assistant", "content": "I s"}], "continue_final_message": True},
    {"messages": [ASKED], "add_generation_prompt": False, "chat_template_kwargs": {"thinking": True}},
])  # fmt: skip
def test_a_conversation_in_python_is_the_server_s_prompt(start, fields):
    server = start()
    tokens = conversation_prompt(server.engine.tokenizer, **fields).token_ids
    assert tokens == server.post("/tokenize", fields).json()["tokens"]
    plain = conversation_prompt(server.engine.tokenizer, messages=[ASKED]).token_ids
    assert tokens != plain


def test_what_the_server_refuses_is_a_user_error_with_its_words():
    with pytest.raises(UserError, match="two tools have the same name"):
        conversation_prompt(tool_tokenizer(), messages=[ASKED], tools=[TOOL, TOOL])
