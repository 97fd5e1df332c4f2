"""Output tokens a second through HTTP, and of `LLM.generate` on the same work: what serving costs.

    python tools/bench_http_vs_offline.py --mesh dp=32
    python tools/bench_http_vs_offline.py --mesh dp=2 --prompts 32 --rounds 2 --option max_model_len=512

The server, and `LLM` in a process of its own, are loaded once; then they take turns, one round each, so that a slow minute of
the machine hits both. Round 0 warms up and is not counted. In a round, all prompts are given at once (for HTTP: as that many
streams at the same time, of the server's own client in a third process), greedy, to full length. The figure is the median over
rounds of (prompts × new tokens) ÷ seconds, prefill included. HTTP's time has its client's work in it, on the same cores: beside
the rates stand the processor's microseconds a token of each process. And beside those the steps of a round: requests that come over
HTTP are not all there when the first step is planned, and each step more is time in which the others' rows are empty.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from dsjax.bench.serve.client import Client, Target, open_session, run
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.records import BenchRequest
from dsjax.bench.serve.server_facts import ask_server
from tools.serve_process import ROOT, ServeProcess, processor_seconds, serve_process


def main() -> None:
    args = _arguments()
    if args.worker:
        offline_worker(args)
        return
    worker = _start_worker()
    options = ["--model", args.model, "--mesh", args.mesh]
    options += [word for name, value in _options(args).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    seconds: dict[str, list[float]] = {"offline": [], "http": []}
    processor: dict[str, list[float]] = {"LLM": [], "server": [], "client": []}
    steps: dict[str, list[int]] = {"offline": [], "http": []}
    same = []
    try:
        with serve_process(options) as server:
            for number in range(args.rounds + 1):
                offline, online = _ask(worker), run(_http_round(args, server, number))
                same.append(statistics.fmean(a == b for a, b in zip(offline["texts"], online["texts"], strict=True)))
                if number:
                    steps["offline"].append(offline["steps"])
                    steps["http"].append(online["steps"])
                    seconds["offline"].append(offline["seconds"])
                    seconds["http"].append(online["seconds"])
                    processor["LLM"].append(offline["processor"])
                    processor["server"].append(online["server"])
                    processor["client"].append(online["client"])
                print(
                    f"round {number} of {args.rounds}: {offline['seconds']:.2f} s, {online['seconds']:.2f} s",
                    file=sys.stderr,
                )
    finally:
        worker.kill()
    _report(args, seconds, processor, steps, same)


def _report(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    processor: dict[str, list[float]],
    steps: dict[str, list[int]],
    same: list[float],
) -> None:
    total = args.prompts * args.new_tokens
    rates = {system: total / statistics.median(times) for system, times in seconds.items()}
    ratio = rates["http"] / rates["offline"]
    by_round = [a / b for a, b in zip(seconds["offline"], seconds["http"], strict=True)]
    for system, rate in rates.items():
        print(f"{system:8} {rate:10.1f} output tokens/s (best {total / min(seconds[system]):.1f})")
    print(
        f"HTTP ÷ offline: {ratio:.3f} (rounds: {', '.join(f'{r:.3f}' for r in by_round)}); expected at least {args.least}"
    )
    each = {name: 1e6 * statistics.median(times) / total for name, times in processor.items()}
    print("processor µs a token: " + ", ".join(f"{name} {micros:.0f}" for name, micros in each.items()))
    print("steps a round: " + ", ".join(f"{name} {statistics.median(each):g}" for name, each in steps.items()))
    print(f"the same text for {min(same):.0%} of prompts")
    if args.json:
        found = {"seconds": seconds, "tokens_per_second": rates, "ratio": ratio, "same_text": same}
        found |= {"processor_seconds": processor, "steps": steps}
        Path(args.json).write_text(json.dumps({"arguments": vars(args), **found}, indent=1) + "\n")
    if ratio < args.least:
        sys.exit(1)


async def _http_round(args: argparse.Namespace, server: ServeProcess, number: int) -> dict[str, Any]:
    async with open_session(None) as session:
        facts = await ask_server(session, server.url, None)
        client = Client(session, Target(server.url, "completions", facts.model, ignore_eos=True))
        requests = [BenchRequest(prompt, len(prompt), args.new_tokens) for prompt in _prompts(args, number)]
        steps = await _steps(session, server.url)
        began = processor_seconds(server.pid), time.process_time()
        result = await run_load(client, requests, [0.0] * len(requests), args.concurrency)
        used = processor_seconds(server.pid) - began[0], time.process_time() - began[1]
        steps = await _steps(session, server.url) - steps
    errors = [record.error for record in result.records if record.error is not None]
    if errors:
        sys.exit(f"{len(errors)} requests failed: {errors[0]}")
    if any(record.output_tokens != args.new_tokens for record in result.records):
        sys.exit("an answer through HTTP has not the length that was asked for")
    texts = [record.text for record in result.records]
    return {"seconds": result.duration, "server": used[0], "client": used[1], "steps": steps, "texts": texts}


async def _steps(session: aiohttp.ClientSession, url: str) -> int:
    """Steps that the server has computed since its start."""
    async with session.get(f"{url}/metrics", params={"name[]": "dsjax_step_seconds_count"}) as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line and not line.startswith("#"))


def _start_worker() -> subprocess.Popen:
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(worker: subprocess.Popen) -> dict[str, Any]:
    worker.stdin.write("go\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        sys.exit(f"LLM's process ended with code {worker.wait()}; its message is above")
    return json.loads(line)


def offline_worker(args: argparse.Namespace) -> None:
    """Load `LLM`, then generate once for each line that comes."""
    # Libraries print; only the answers may go to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from dsjax import LLM, SamplingParams
    from dsjax.engine.contract.commands import Command, Step

    llm = LLM(args.model, mesh=args.mesh, **_options(args))
    launch, steps = llm.executor.launch, 0

    def counting(command: Command) -> Any:
        nonlocal steps
        steps += isinstance(command, Step)
        return launch(command)

    llm.executor.launch = counting
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    for number, _ in enumerate(sys.stdin):
        prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(args, number)]
        begin, used, before = time.perf_counter(), time.process_time(), steps
        outputs = llm.generate(prompts, params)
        found = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - used}
        found["steps"] = steps - before
        found["texts"] = [output.outputs[0].text for output in outputs]
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _prompts(args: argparse.Namespace, number: int) -> list[list[int]]:
    """A round's prompts, the same for both; each round has others, so that no prefix cache helps."""
    return np.random.default_rng(number).integers(16, args.vocab_size, (args.prompts, args.prompt_tokens)).tolist()


def _options(args: argparse.Namespace) -> dict[str, Any]:
    pairs = (option.partition("=") for option in args.option)
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--mesh", default="dp=32")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option of both")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=4096, help="token ids are drawn below this, from 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.85, help="exit with 1 below this ratio")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
