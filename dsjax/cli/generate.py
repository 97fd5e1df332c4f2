"""`dsjax generate`: continue prompts, streaming tokens to the terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from dsjax.cli.options import engine_options
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.engine.llm_engine import LLMEngine
    from dsjax.engine.text.input_processor import EncodedPrompt
    from dsjax.engine.text.outputs import CompletionOutput


@engine_options
def generate(
    args: EngineArgs,
    prompt: Annotated[list[str], typer.Option(help="Prompt text; - reads standard input. Can be repeated.")],
    chat: Annotated[bool, typer.Option(help="Apply the chat template to each prompt.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0: greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Cumulative probability for nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the top k tokens. 0: from all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string. Can be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ignore the end-of-sequence token.")] = False,
) -> None:
    """Generate text from prompts and stream it to the terminal. Exit status 1: a prompt was not finished."""
    if args.is_side:
        raise UserError(
            f"--disaggregation-mode {args.disaggregation_mode} is one side of two behind an orchestrator (dsjax dynamo); dsjax generate "
            "has both with --prefill-mesh and --decode-mesh"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        ignore_eos=ignore_eos,
        output_kind=OutputKind.DELTA,
    )
    if prompt.count("-") > 1:
        raise UserError("--prompt - is given several times, but standard input can be read only once")
    prompts = [_standard_input() if text == "-" else text for text in prompt]
    from dsjax.llm import LLM

    engine = LLM(**dataclasses.asdict(args)).engine
    try:
        failures = write_continuations(sys.stdout, engine, prompts, params, chat=chat)
    finally:
        engine.shutdown()
    for index, reason in failures.items():
        typer.echo(f"error: prompt {index + 1} of {len(prompts)} was not finished: {reason}", err=True)
    if failures:
        raise typer.Exit(1)


def _standard_input() -> str:
    """Read all text from standard input.

    Raises:
        UserError: standard input is closed or is not UTF-8.
    """
    if sys.stdin is None:
        raise UserError("--prompt - reads standard input, which is closed; give the text as --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt - found invalid UTF-8 at byte {error.start} of standard input; convert the text to UTF-8"
        ) from error


def write_continuations(
    out: TextIO, engine: LLMEngine, prompts: Sequence[str], params: SamplingParams, *, chat: bool = False
) -> dict[int, str]:
    """Write each prompt and stream its continuation. All prompts run concurrently; output is in prompt order.

    Return index → reason for prompts that could not be finished. Their partial text is written, and the other prompts
    continue.

    Raises:
        UserError: a prompt is invalid, or the model has no chat template.
    """
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), _chat_prompt(engine, prompt) if chat else prompt, params)
    current, failures = None, {}
    for index, pieces in _stream_in_order(engine, len(prompts)):
        if index != current:
            separator = "" if current is None else "\n\n"
            out.write(separator + ("" if chat else prompts[index]))
            current = index
        for piece in pieces:
            out.write(piece.text)
            if piece.finish_reason == "error":
                failures[index] = str(piece.stop_reason)
        out.flush()
    out.write("\n")
    return failures


def _stream_in_order(engine: LLMEngine, count: int) -> Iterator[tuple[int, list[CompletionOutput]]]:
    """Stream output in prompt order: prompt 0's pieces as they come, then prompt 1's buffered and further pieces, and so on.

    Yields (prompt index, its new pieces) after each step, also if there are none.
    """
    buffered: list[list[CompletionOutput]] = [[] for _ in range(count)]
    finished = [False] * count
    current = 0
    while current < count:
        for output in engine.step():
            index = int(output.request_id)
            buffered[index] += output.outputs
            finished[index] = output.finished
        while current < count:
            pieces, buffered[current] = buffered[current], []
            yield current, pieces
            if not finished[current]:
                break
            current += 1


def _chat_prompt(engine: LLMEngine, text: str) -> EncodedPrompt:
    from dsjax.serve.chat_prompt import conversation_prompt

    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise UserError("--chat: this model has no chat template; remove the option")
    return conversation_prompt(engine.tokenizer, messages=[{"role": "user", "content": text}])
