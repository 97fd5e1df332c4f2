"""Fake devices that say what a test wants, score prompts, and count experts."""

import numpy as np
import tokenizers
from fake_executor import FakeExecutor, next_token
from tiny_tokenizer import CONFIG, tiny_backend

from dsjax.engine.contract.commands import TOKEN_MADE, from_int32s
from dsjax.engine.contract.executor import ExpertCounts, RowResult
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.tool_calls import FORMATS

# As V3.1's: the prompt opens the reasoning or closes it, and it has a place for tools and calls.
THINKING_TEMPLATE = (
    "{{ bos_token }}{% if tools %}TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments }}"
    "<｜tool▁call▁end｜>{% endfor %}{{ eos_token if not loop.last or add_generation_prompt }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking | default(true) else '</think>' }}{% endif %}"
)


def tool_tokenizer(template: str = THINKING_TEMPLATE, special: bool = False) -> Tokenizer:
    """The tiny tokenizer with DeepSeek's tool markers as tokens, special ones or not."""
    backend = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    texts = FORMATS["deepseek_v31"].markers
    markers = [tokenizers.AddedToken(text, special=special, normalized=False) for text in texts]
    backend.add_special_tokens(markers) if special else backend.add_tokens(markers)
    return Tokenizer(backend, {**CONFIG, "chat_template": template})


class ScriptedExecutor(FakeExecutor):
    """Says `script` behind the last opening of an assistant's answer, then ends; scores prompts as exactly -1, -2, …"""

    def __init__(self, tokenizer: Tokenizer, script: str = "", **sizes):
        sizes = {"vocab_size": tokenizer.vocab_size, "max_model_len": 512, "pages_per_rank": 257, **sizes}
        super().__init__(model=self._next, **sizes)
        self._tokenizer = tokenizer
        self.script = script
        self.recording = False

    def _next(self, context: list[int], seed: int, vocab_size: int) -> int:
        if not self.script:
            return next_token(context, seed, vocab_size)
        assistant = self._tokenizer.token_id("<｜Assistant｜>")
        said = context[len(context) - context[::-1].index(assistant) :]
        if said and said[0] in map(self._tokenizer.token_id, ("<think>", "</think>")):
            said = said[1:]
        script = self._tokenizer.encode(self.script, add_special_tokens=False)
        return script[len(said)] if len(said) < len(script) else self._tokenizer.eos_id

    def _scored(self, slot, row, result: RowResult) -> RowResult:
        if not row.scored:
            return result
        tokens = [*from_int32s(row.tokens), row.next_token]
        assert TOKEN_MADE not in tokens[1 : row.scored + 1]
        entries = [self._score(tokens[at], row.start + at, row.top_scores) for at in range(1, row.scored + 1)]
        return result._replace(prompt_scores=entries)

    def _score(self, token_id: int, position: int, count: int):
        """The token is the most probable one at even positions, and the second elsewhere."""
        other = (token_id + 1) % self.limits.vocab_size
        own, rank = (token_id, -float(position)), 1 + position % 2
        top = [own, (other, own[1] - 1)] if rank == 1 else [(other, own[1] + 0.5), own]
        return *own, rank, top[:count]

    def set_recording(self, on: bool) -> None:
        self.recording = on

    def expert_counts(self) -> ExpertCounts | None:
        if not self.recording:
            return None
        tokens = np.arange(8, dtype=np.int64).reshape(2, 4)
        places = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
        logical = np.array([[3, 1, 2], [6, 12, 4]])
        return ExpertCounts(tokens, np.array([3, 4], np.int64), logical, places, 2, 4096, 0.25)


def scripted(tokenizer: Tokenizer | None = None, script: str = "", **sizes) -> dict:
    """Arguments of a `LiveServer` whose model says a script. sizes: of the executor."""
    tokenizer = tokenizer or tool_tokenizer()
    executor = ScriptedExecutor(tokenizer, script, **sizes)
    return {"tokenizer": tokenizer, "executor": executor, "eos": (tokenizer.eos_id,)}
