"""A model that does what it is asked, so that the suites of clients judge formats and not wit.

The prompt holds the conversation, the tools and the schema of the answer as JSON. The answer calls the tool that the last message names,
or gives the JSON that it asks for, or greets. Where a grammar forbids all of that, the model takes the shortest way to the end.
"""

import argparse
import contextlib
import functools
import json
import re
import sys
import threading
import unittest.mock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "dsjax/engine", "dsjax/serve")]
from live_server import LiveServer
from scripted_executor import ScriptedExecutor, tool_tokenizer

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.tool_calls import FORMATS

TEMPLATE = (
    "{{ {'messages': messages, 'tools': tools or [], 'form': form} | tojson }}"
    "{# messages have a place for tool_calls #}<｜Assistant｜>{{ '<think>' if thinking | default(true) else '</think>' }}"
)
THOUGHT = "Let me see.\n</think>"
MAX_DEPTH, FAR_INSIDE = 40, 8
"""Depths of a schema: where nothing more is made, and where nothing optional is."""
_SHORTEST = ['"', "}", "]", ",", ":", "1", "t"]
"""Texts of tokens, those first that soon end a JSON value."""


class ObedientExecutor(ScriptedExecutor):
    """Fake devices with this model."""

    def __init__(self, tokenizer: Tokenizer, **sizes: Any):
        sizes = {"max_model_len": 16_384, "pages_per_rank": 8_193, "page_size": 16, "max_chunk": 2_048, **sizes}
        super().__init__(tokenizer, **sizes)
        self._answers = functools.lru_cache(self._answers)
        self._shortest = [token for text in _SHORTEST if (token := tokenizer.token_id(text)) is not None]

    def _sample(self, rank: int, slot: Any, count: int, position: int = 0) -> int:
        context = self._context(rank, slot, count)
        assistant = self._tokenizer.token_id("<｜Assistant｜>")
        if assistant not in context:  # a text to go on with
            return self._tokenizer.token_id("a")
        begin = count - context[::-1].index(assistant)
        opening, said = context[begin], context[begin + 1 :]
        allowed = functools.partial(self._allows, slot, position)
        for answer in self._answers(tuple(context[:begin]), opening):
            if said == answer[: len(said)] and allowed(token := [*answer, self._tokenizer.eos_id][len(said)]):
                return token
        if allowed(self._tokenizer.eos_id):
            return self._tokenizer.eos_id
        return next(token for token in (*self._shortest, *range(self.limits.vocab_size)) if allowed(token))

    @staticmethod
    def _allows(slot: Any, position: int, token: int) -> bool:
        if slot.masks is None or not slot.masks[position].any():
            return True
        return bool(slot.masks[position][token // 32] >> np.uint32(token % 32) & 1)

    def _answers(self, prompt: tuple[int, ...], opening: int) -> list[list[int]]:
        """Token ids of what could be said, the best first."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=True)
        thought = THOUGHT if opening == self._tokenizer.token_id("<think>") else ""
        asked = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
        answers = answers_to(asked["messages"], [tool["function"] for tool in asked["tools"]], asked["form"])
        return [self._tokenizer.encode(thought + answer, add_special_tokens=False) for answer in answers]


@contextlib.contextmanager
def obedient_server(names: Sequence[str]) -> Iterator[LiveServer]:
    """Serve this model under these names."""
    read = ChatRequest.template_variables

    def with_form(request: ChatRequest, *given: Any) -> dict[str, Any]:
        form = request.response_format and request.response_format.json_schema
        return {**read(request, *given), "form": form and form.schema_}

    tokenizer = tool_tokenizer(TEMPLATE, special=True)
    with (
        unittest.mock.patch.object(ChatRequest, "template_variables", with_form),
        LiveServer(tokenizer=tokenizer, executor=ObedientExecutor(tokenizer), eos=(tokenizer.eos_id,)) as live,
    ):
        live.serving.model_names = names
        yield live


def answers_to(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], form: dict[str, Any] | None = None
) -> list[str]:
    """Return what can be answered to a conversation, the best first: later ones are for grammars that forbid those before.

    form: the JSON schema of `response_format`.
    """
    last = messages[-1]
    text = str(last.get("content") or "")
    named = [] if last["role"] == "tool" else sorted(tools, key=lambda tool: tool["name"] not in text)
    calls = [
        FORMATS["deepseek_v31"].calls([(tool["name"], _instance(tool.get("parameters") or {}, text))]) for tool in named
    ]
    shown = [schema for message in messages for schema in _schemas(str(message.get("content") or ""))]
    for schema in [form] if form else shown:
        answer = _instance(schema, text)
        return [*calls, f"```json\n{answer}\n```" if "codeblock" in str(messages) else answer]
    if last["role"] == "tool":
        return [f"The tool says: {text}"]
    return [*calls, "Hello there, Alice.", json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", text), "so"))]


def _instance(schema: dict[str, Any], text: str) -> str:
    return json.dumps(instance(schema, text, schema), ensure_ascii=False)


def _schemas(text: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of objects that a text shows."""
    decoder, found = json.JSONDecoder(strict=False), []
    for match in re.finditer(r"\{\s*\"", text):
        try:
            value, _ = decoder.raw_decode(text[match.start() :])
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("properties"), dict):
            found.append(value)
    return found


def instance(schema: Any, text: str, root: dict[str, Any], depth: int = 0) -> Any:
    """Make a value of a JSON schema, of numbers and quoted words in the text where it has some.

    root: the schema that references are resolved in. depth: of schemas around this one; far inside only what must be there is made.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    make = functools.partial(instance, text=text, root=root, depth=depth + 1)
    if "$ref" in schema:
        target: Any = root
        for name in filter(None, schema["$ref"].removeprefix("#").split("/")):
            target = target[name]
        return make(target)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            parts = schema[name]
            return make({"type": "null"} if depth > FAR_INSIDE and {"type": "null"} in parts else parts[0])
    for name, values in (("const", [schema.get("const")]), ("enum", schema.get("enum"))):
        if name in schema:
            return values[0]
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "string":
            return next(iter(re.findall(r"'([^']+)'", text)), "so").ljust(schema.get("minLength", 0), "o")
        case "integer" | "number":
            number = [int(number) for number in re.findall(r"\d+", text)] or [1]
            return min(max(number[0], schema.get("minimum", number[0])), schema.get("maximum", number[0]))
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            count = schema.get("minItems", 0) if depth > FAR_INSIDE else max(1, schema.get("minItems", 0))
            return [make(schema.get("items") or {"type": "string"})] * count
        case _:
            needed = schema.get("required", ())
            fields = schema.get("properties") or {}
            return {name: make(value) for name, value in fields.items() if depth <= FAR_INSIDE or name in needed}


def main() -> None:
    """Serve the model until interrupted, for suites that want an address."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with obedient_server(("demo", "kimi-k2")) as server:
        print(f"serving at {server.url}/v1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
