"""Short conversations made from the training files, so that the demo model has seen its own chat template.

Each is a function of the library with a docstring: the user asks for it, the assistant thinks aloud about name,
parameters and docstring, closes `</think>`, and writes the function. One short function in four is used; of those one
in four is answered directly (empty thinking) and one in four has a system prompt. A hash chooses; nothing is random.
"""

import ast
import hashlib
import json
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import jinja2

from tools.demo.corpus import SourceFile

MAX_CHARACTERS = 1000
ONE_IN = 4
SYSTEM_PROMPT = "You are a helpful assistant that writes Python."
REQUESTS = (
    "Write a function `{call}`. {summary}",
    "Please write `{call}` in Python: {summary}",
    "{summary} How would you write `{call}`?",
)


def load_template(folder: Path) -> jinja2.Template:
    """The chat template of the tokenizer in `folder`."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(settings["chat_template"])
    template.globals.update(bos_token=settings["bos_token"], eos_token=settings["eos_token"])
    return template


def make_dialogues(files: list[SourceFile], template: jinja2.Template) -> list[str]:
    """A text for one in four short functions with a docstring in `files`, special tokens and all, in their order."""
    return [
        _render(function, source, summary, template)
        for file in files
        for function, source, summary in _functions(file.content.decode())
        if hashlib.sha256(source.encode()).digest()[3] % ONE_IN == 0
    ]


def _functions(text: str) -> Iterator[tuple[ast.FunctionDef, str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's tests hold strange escapes on purpose
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            source = ast.get_source_segment(text, node, padded=True)
            if source and len(source) <= MAX_CHARACTERS:
                yield node, textwrap.dedent(source).strip(), " ".join(doc.split("\n\n")[0].split())


def _render(function: ast.FunctionDef, source: str, summary: str, template: jinja2.Template) -> str:
    choice = hashlib.sha256(source.encode()).digest()
    parameters = [argument.arg for argument in function.args.args]
    call = f"{function.name}({', '.join(parameters)})"
    messages = [{"role": "user", "content": REQUESTS[choice[0] % 3].format(call=call, summary=summary)}]
    if choice[1] % 4 == 0:
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    thinking = choice[2] % 4 != 0
    prompt = template.render(messages=messages, add_generation_prompt=True, thinking=thinking)
    thought = f"{_thought(function.name, parameters, summary)}\n</think>\n\n" if thinking else ""
    return f"{prompt}{thought}```python\n{source}\n```{template.globals['eos_token']}"


def _thought(name: str, parameters: list[str], summary: str) -> str:
    takes = f"It takes {', '.join(f'`{p}`' for p in parameters)}." if parameters else "It takes no parameters."
    return f"The user wants a function called `{name}`. {takes} What it does: {summary}"
