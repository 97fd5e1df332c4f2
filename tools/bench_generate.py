"""Output tokens a second of dsjax, of transformers' ``generate`` and of llama.cpp, side by side in one run.

    python tools/bench_generate.py transformers:grouped_mm transformers:eager dsjax:dp=1
    python tools/bench_generate.py --prompts 256 --prompt-tokens 32 dsjax:dp=1 dsjax:dp=32
    python tools/bench_generate.py dsjax:dp=1 dsjax+synchronous:dp=1 dsjax+speculative:dp=1 dsjax+speculative+synchronous:dp=1
    python tools/bench_generate.py --prompts 128 dsjax:dp=32 dsjax+http:dp=32            # what serving costs
    taskset -c 1 python tools/bench_generate.py dsjax:dp=1@../before dsjax:dp=1          # two checkouts on one core

A system is ``dsjax:MESH`` or ``transformers:EXPERTS``. ``dsjax:MESH/NAME=VALUE/…`` gives this one engine options of its own, for example
``dsjax:dp=1/kernels=plain/batch_invariant=true``; ``dsjax+speculative`` drafts ``--drafts`` tokens a row with the model's MTP module;
``dsjax+synchronous`` turns asynchronous scheduling off; ``dsjax+http`` streams the answers from ``dsjax serve``, and its processor time is
the server's and the client's, which a second line gives apart, behind that of the server's start. What a server compiles beside its
first requests counts too: the least of the rounds is without it. ``dsjax:MESH@DIRECTORY`` runs another checkout's code, so that two
commits stand in one run.
``llama.cpp:FILE.gguf`` decodes all prompts together, at most 256 at a time, which is its limit (``tools/make_gguf.py`` makes the file).

Each system runs in a process of its own; they take turns, one round each, so that a slow minute of the machine hits all of them. Round 0
warms up and is not counted; ``start s`` is the time from a system's start to the end of its round 0, with the compiled programs that
``JAX_COMPILATION_CACHE_DIR`` keeps. The figure is the median over rounds of (prompts × new tokens) ÷ seconds, prefill included; the ratio
is to the first system. The second ratio is of processor time, the least of the rounds: on a machine shared with others it says more, with
one thread (``taskset -c 0 … --threads 1``).

All use the same prompts, greedy; dsjax without its prefix cache, which would spare it every prompt after the first round. ``--held-out``
takes prompts from the files that the demo model was not trained on, instead of random tokens: drafts are then accepted as on real
text, and how many is printed by position.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS, VARIANTS = ("dsjax", "transformers", "llama.cpp"), {"speculative", "synchronous", "http"}
UNSAID = dict.fromkeys(("processor", "server_processor", "since_start"), float("nan")) | {"drafts": []}
"""Values of what an older checkout does not report."""


def main() -> None:
    """Run the systems in turns, or be the worker of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "systems",
        nargs="+",
        help="dsjax[+speculative][+synchronous][+http]:MESH, transformers:EXPERTS (eager, batched_mm, grouped_mm) or llama.cpp:FILE",
    )
    parser.add_argument("--model", default=str(ROOT / "configs" / "models" / "demo"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=1, help="of dsjax+speculative, tokens a row")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and transformers")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--held-out", action="store_true", help="prompts are pieces of the demo's held-out files")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option of dsjax")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    for system in args.systems:
        first, _, _ = system.partition(":")
        kind, *variants = first.split("+")
        if kind not in KINDS or set(variants) - (VARIANTS if kind == "dsjax" else set()):
            parser.error(
                f"no such system: {system}; expected dsjax[+speculative][+synchronous][+http]:MESH, transformers:EXPERTS "
                "or llama.cpp:FILE"
            )
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Start a worker for each system, let them take turns, and print the table."""
    workers: dict[str, subprocess.Popen] = {}
    answers: dict[str, list[dict]] = {system: [] for system in args.systems}
    try:
        for round_number in range(args.rounds + 1):
            for system in args.systems:
                began = time.perf_counter()
                worker = workers[system] = workers.get(system) or _start(args, system)
                worker.stdin.write("go\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    sys.exit(f"{system} ended with code {worker.wait()}; its message is above")
                answers[system].append(UNSAID | json.loads(line) | {"waited": time.perf_counter() - began})
            print(f"round {round_number} of {args.rounds}{'' if round_number else ' (warm-up)'}", file=sys.stderr)
    finally:
        for worker in workers.values():
            _end(worker)
    total, rows = args.prompts * args.new_tokens, []
    print(
        f"{'system':32} {'tokens/s':>10} {'best':>10} {'ratio':>7} {'processor s':>12} {'ratio':>7} {'start s':>8}  same tokens"
    )
    for system, (warm_up, *rounds) in answers.items():
        names = "seconds", "processor", "server_processor"
        seconds, processor, served = ([one[name] for one in rounds] for name in names)
        median, least = statistics.median(seconds), min(processor)
        if not rows:
            first, first_least, first_tokens = median, least, rounds[-1]["tokens"]
        pair = rounds[-1]["tokens"], first_tokens
        same = f"{statistics.fmean(a == b for a, b in zip(*pair, strict=True)):.0%}" if None not in pair else "–"
        found = {"seconds": seconds, "processor_seconds": processor, "tokens_per_second": total / median}
        found |= {"server_processor_seconds": served, "start_seconds": warm_up["waited"]}
        found["start_processor_seconds"] = warm_up["since_start"]
        rows.append({"system": system, **found, "ratio": first / median, "processor_ratio": first_least / least})
        print(
            f"{system:32} {total / median:10.0f} {total / min(seconds):10.0f} {first / median:7.2f} {least:12.2f} "
            f"{first_least / least:7.2f} {warm_up['waited']:8.1f}  {same}"
        )
        if min(served) > 0:
            of_client = min(both - server for both, server in zip(processor, served, strict=True))
            each = f"server {min(served) / total * 1e6:.0f} µs a token, client {of_client / total * 1e6:.0f}"
            print(f"{'':32} processor time: start {warm_up['since_start']:.1f} s, {each}")
        if drafts := rounds[-1]["drafts"]:
            rows_with, *accepted = drafts
            shares = ", ".join(f"{count / rows_with:.1%}" for count in accepted)
            print(f"{'':32} accepted by position: {shares}; {1 + sum(accepted) / rows_with:.2f} tokens a row and step")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "systems": rows}, indent=1))


def _start(args: argparse.Namespace, system: str) -> subprocess.Popen:
    interpreters = {"transformers": args.torch_python, "llama.cpp": args.llama_python}
    python = interpreters.get(system.partition(":")[0], sys.executable)
    system, _, checkout = system.partition("@") if system.startswith("dsjax") else (system, "", "")
    script = Path(checkout) / "tools" / Path(__file__).name if checkout else __file__
    # Each reads its own code, wherever dsjax is installed from.
    command = [python, str(script), *sys.argv[1:], "--worker", system, "--model", args.model]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(worker: subprocess.Popen) -> None:
    """End a worker by the end of its input, so that it ends a server of its own."""
    worker.stdin.close()
    try:
        worker.wait(60)
    except subprocess.TimeoutExpired:
        worker.kill()


def work(args: argparse.Namespace) -> None:
    """Load one system, then run a round for each line that comes."""
    # Libraries print; only the answers may go to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system, _, how = args.worker.partition(":")
    kind, *variants = system.split("+")
    with contextlib.ExitStack() as stack:
        if "http" in variants:
            run = _served(args, how, variants, stack)
        elif kind == "dsjax":
            run = _dsjax(args, how, variants)
        else:
            run = (_transformers if kind == "transformers" else _llama_cpp)(args, how)
        server_seconds = getattr(run, "server_seconds", float)
        for _ in sys.stdin:
            start, client, server = time.perf_counter(), time.process_time(), server_seconds()
            tokens = run()
            found = {"seconds": time.perf_counter() - start, "tokens": tokens}
            found["server_processor"], found["since_start"] = server_seconds() - server, server_seconds()
            found["processor"] = time.process_time() - client + found["server_processor"]
            found["drafts"] = list(getattr(run, "drafts", []))
            json.dump(found, answers)
            answers.write("\n")
            answers.flush()


def _prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """The same prompts for every system: pseudo-random ones, without a library that might differ, or pieces of held-out files."""
    if args.held_out:
        return _held_out(args)
    state, prompts = 12345, []
    for _ in range(args.prompts):
        prompt = []
        for _ in range(args.prompt_tokens):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            prompt.append(16 + (state >> 33) % (vocabulary - 16))
        prompts.append(prompt)
    return prompts


def _held_out(args: argparse.Namespace) -> list[list[int]]:
    sys.path.insert(0, str(ROOT))
    from dsjax.engine.text.tokenizer import Tokenizer
    from tools.demo.corpus import read_corpus

    tokenizer, prompts = Tokenizer.from_directory(args.model), []
    files = [file.content.decode() for file in read_corpus()[1]]
    files = [text for text in files if len(text) > 40 * args.prompt_tokens]
    for index in range(args.prompts):
        text = files[index % len(files)]
        first = (index // len(files) + 1) * 997 % (len(text) // 2)
        prompts.append(tokenizer.encode(text[first : first + 20 * args.prompt_tokens])[: args.prompt_tokens])
    return prompts


def _engine_options(args: argparse.Namespace, how: str, variants: list[str]) -> dict[str, Any]:
    """The engine's options of ``MESH/NAME=VALUE/…``, values as JSON where they are JSON."""
    mesh, *own = how.split("/")
    options = {"mesh": mesh, "dtype": "float32", "enable_prefix_caching": False}
    options["async_scheduling"] = "synchronous" not in variants
    if "speculative" in variants:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.drafts}
    for option in args.option + own:
        name, _, value = option.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _flags(options: dict[str, Any]) -> list[str]:
    """Return the options as command-line arguments."""
    flags = []
    for name, value in options.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        else:
            flags += [f"--{word}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def _served(args: argparse.Namespace, how: str, variants: list[str], stack: contextlib.ExitStack):
    sys.path.insert(0, str(ROOT))
    import psutil

    from dsjax.bench.serve.client import Client, open_session
    from dsjax.bench.serve.client import run as run_on_uvloop
    from dsjax.bench.serve.load import run_load
    from dsjax.bench.serve.options import ServerOptions
    from dsjax.bench.serve.records import BenchRequest
    from dsjax.config import load_config

    flags = ["--model", args.model, "--served-model-name", "bench", *_flags(_engine_options(args, how, variants))]
    command = [sys.executable, "-m", "dsjax.serve", "--port", "0", *flags]
    server = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    stack.callback(server.terminate)
    found = (re.search(r"serving bench at (http://[\d.:]+)", line) for line in server.stdout)
    url = next((match[1] for match in found if match), None)
    if url is None:
        sys.exit(f"the server ended with code {server.wait()} before it was ready")
    threading.Thread(target=sys.stderr.writelines, args=(server.stdout,), daemon=True).start()
    prompts = _prompts(args, load_config(args.model).vocab_size)
    requests = [BenchRequest(prompt, len(prompt), args.new_tokens) for prompt in prompts]

    async def send() -> None:
        async with open_session(None) as session:
            client = Client(session, url, "bench", ServerOptions(ignore_eos=True))
            result = await run_load(client, requests, [0.0] * len(requests), None)
        if failed := [record.error for record in result.records if record.error is not None]:
            sys.exit(f"{len(failed)} requests failed: {failed[0]}")

    def run() -> None:
        run_on_uvloop(send())

    run.server_seconds = lambda: sum(psutil.Process(server.pid).cpu_times()[:4])  # user, system, and the compiler's
    return run


def _dsjax(args: argparse.Namespace, how: str, variants: list[str]):
    sys.path.insert(0, str(ROOT))
    from dsjax import LLM, SamplingParams

    llm = LLM(args.model, **_engine_options(args, how, variants))
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(args, llm.config.vocab_size)]

    step, counted = llm.engine.core.step, []

    def counting(*arguments, **keywords):
        updates = step(*arguments, **keywords)
        stats = llm.engine.core.stats()
        if stats is not None and getattr(stats, "drafts", None) is not None:
            counted.append(stats.drafts)
        return updates

    llm.engine.core.step = counting

    def run():
        counted.clear()
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        most = max((len(one.accepted_per_position) for one in counted), default=0)
        by_position = [
            sum((*one.accepted_per_position, *[0] * most)[place] for one in counted) for place in range(most)
        ]
        run.drafts = [sum(one.num_drafts for one in counted), *by_position] if most else []
        return found

    return run


def _transformers(args: argparse.Namespace, experts: str):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, experts_implementation=experts
    )
    prompts = torch.tensor(_prompts(args, model.config.vocab_size))
    model.generation_config.eos_token_id = None  # go on past it, as `ignore_eos` does; a least length would ban it
    settings = {"max_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": 2}

    def run():
        with torch.inference_mode():
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        return out[:, prompts.shape[1] :].tolist()

    return run


def _llama_cpp(args: argparse.Namespace, file: str):
    """llama.cpp through the C interface of llama-cpp-python, as its own ``llama-batched-bench`` drives it, but with greedy tokens."""
    import numpy as np
    from llama_cpp import llama_cpp

    most_sequences, most_tokens = 256, 2048  # LLAMA_MAX_SEQ, and its default for a batch
    length = args.prompt_tokens + args.new_tokens
    together = min(args.prompts, most_sequences)
    llama_cpp.llama_log_set(_SILENT := llama_cpp.llama_log_callback(lambda *_: None), None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {file}")
    settings = llama_cpp.llama_context_default_params()
    # Each sequence has its own part of the cache, which is padded to 256 positions.
    settings.n_ctx, settings.n_seq_max = together * -(-length // 256) * 256, together
    settings.n_batch, settings.n_threads, settings.n_threads_batch = most_tokens, args.threads, args.threads
    settings.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(most_tokens, 0, 1)
    prompts = _prompts(args, vocabulary)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Entries of (token, position, sequence, whether the next token is wanted); the wanted ones, in their order."""
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        if code := llama_cpp.llama_decode(context, batch):
            sys.exit(f"llama_decode gave {code}")
        places = [place for place, entry in enumerate(entries) if entry[3]]
        rows = (llama_cpp.llama_get_logits_ith(context, place) for place in places)
        return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in rows]

    def wave(some: list[list[int]]) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(some)
            for position, token in enumerate(prompt)
        ]
        last: list[int] = []
        for first in range(0, len(entries), most_tokens):
            last += decode(entries[first : first + most_tokens])
        found = [[token] for token in last]
        for _ in range(args.new_tokens - 1):
            last = decode(
                [
                    (token, len(some[sequence]) + len(found[sequence]) - 1, sequence, True)
                    for sequence, token in enumerate(last)
                ]
            )
            for tokens, token in zip(found, last, strict=True):
                tokens.append(token)
        return found

    def run():
        return [
            tokens for first in range(0, len(prompts), together) for tokens in wave(prompts[first : first + together])
        ]

    run.keep = (_SILENT, model)  # what C holds must outlive this function
    return run


if __name__ == "__main__":
    main()
