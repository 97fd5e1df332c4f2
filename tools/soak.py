"""Many sessions for minutes, with disconnects and aborts; then: did the server keep all it promised?

    python tools/soak.py                                        # starts: dsjax serve --mesh dp=32
    python tools/soak.py --url http://127.0.0.1:8000 --pid 4711 --admin-api-key KEY
    python tools/soak.py --separated                            # a decode engine, whose prefill process is killed again and again

Holds, or exits with 1: no error but those asked for; pages in use return to 0; resident memory is flat; nothing is compiled
after warm-up; the 99th percentile of the inter-token latency is below the bound of the chunk budget (`soaks/bound.py`).
Prompts and answers have 16 to 2,048 and 1 to 512 tokens, log-uniform, cut to the model's length; one request in ten is
disconnected, one in twenty aborted, at random moments. What `--separated` holds stands in `soaks/separated.py`.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from dsjax.bench.serve.client import Client, open_session, run
from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.server_facts import ask_server
from dsjax.top.reading import Exposition
from tools.serve_process import ServeProcess, serve_process
from tools.soaks.bound import ChunkBudget, measure_budget
from tools.soaks.sessions import Admin, Mix, Outcome, run_sessions

_SAMPLE_SECONDS = 2.0


_ALONE = {"mesh": "dp=32", "sessions": 200, "abort_share": 0.05}
_SEPARATED = {"mesh": "dp=2", "sessions": 12, "abort_share": 0.15}
"""Defaults of options that both kinds have."""


def main() -> None:
    args = _arguments()
    found = _soak_separated(args) if args.separated else _soak_server(args)
    for name, claim in found["claims"].items():
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {name}: found {claim['found']}, expected {claim['expected']}")
    if not args.separated:
        _show_unchecked(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if not all(claim["holds"] for claim in found["claims"].values()):
        sys.exit(1)


def _soak_separated(args: argparse.Namespace) -> dict[str, Any]:
    from tools.soaks.separated import soak_separated

    found = soak_separated(args)
    for name in ("counts", "transfers", "hits", "prefill starts", "wrong by request", "wrong"):
        print(f"{name}: {found[name]}")
    return found


def _soak_server(args: argparse.Namespace) -> dict[str, Any]:
    own = contextlib.nullcontext(ServeProcess(args.url or "", args.pid))
    if args.url is None:
        args.admin_api_key = secrets.token_hex(16)
        options = ["--mesh", args.mesh, "--max-num-batched-tokens", str(args.max_num_batched_tokens)]
        options += ["--prefill-chunk", str(args.prefill_chunk)]
        options += ["--admin-api-key", args.admin_api_key, *(word for o in args.serve_option for word in o.split())]
        own = serve_process(options)
    with own as server:
        found = run(soak(args, server))
    print(f"{found['completed']} completed, {found['disconnected']} disconnected, {found['aborted']} aborted")
    for name in ("output_tokens", "preemptions", "resident_bytes", "itl_ms", "itl_bound"):
        print(f"{name}: {found[name]}")
    return found


async def soak(args: argparse.Namespace, server: ServeProcess) -> dict[str, Any]:
    """Measure the bound, run the sessions, wait for the end, and judge."""
    async with open_session(args.api_key) as session:
        facts = await ask_server(session, server.url, None)
        length = facts.max_model_len or sys.exit("the server does not say its max_model_len")
        options = ServerOptions(ignore_eos=True, request_timeout=args.request_timeout)
        client = Client(session, server.url, facts.model, options)
        info = await _json(session, f"{server.url}/server_info")
        ranks = len(info["ranks"])
        print(f"{facts.model}: {ranks} DP ranks, {length} tokens; measuring the bound", file=sys.stderr)
        budget = await measure_budget(
            client,
            ranks,
            args.max_num_batched_tokens,
            args.prefill_chunk,
            info["max_num_seqs"],
            args.sessions,
            length,
            args.vocab_size,
        )
        mix = Mix(
            args.prompt_tokens, args.output_tokens, length, args.vocab_size, args.disconnect_share, args.abort_share
        )
        admin = Admin(session, server.url, args.admin_api_key) if args.admin_api_key else None
        before = await _metrics(session, server.url)
        watch = asyncio.create_task(_watch_memory(server.pid))
        outcome = await run_sessions(client, mix, args.sessions, args.minutes * 60, args.seed, admin)
        memory = await _stop(watch)
        loads = await _drained(session, server.url)
        after = await _metrics(session, server.url)
    return judge(args, outcome, memory, loads, before, after, budget)


def judge(
    args: argparse.Namespace,
    outcome: Outcome,
    memory: list[int],
    loads: list[dict[str, Any]],
    before: Exposition,
    after: Exposition,
    budget: ChunkBudget,
) -> dict[str, Any]:
    """Everything that was found, and each claim with what was found and expected."""
    grew = {at: int(np.mean(part)) for at, part in _thirds(memory).items()} if memory else {}
    growth = grew["end"] / grew["start"] - 1 if grew else None
    pages = sum(load["used_pages"] for load in loads)
    held = sum(load["running"] + load["waiting"] for load in loads)
    name = "dsjax_compilations_after_warm_up_total"
    compiled = after.total(name) if after.by(name) else None
    itls = np.asarray(outcome.itls or [0.0]) * 1e3
    p99, bound = float(np.percentile(itls, 99)), args.slack * budget.seconds * 1e3
    claims = {
        "no error but those asked for": _claim(sum(outcome.errors.values()) == 0, dict(outcome.errors), {}),
        "requests were completed": _claim(outcome.completed > 0, outcome.completed, "> 0"),
        "pages in use at the end": _claim(pages == 0 and held == 0, pages, 0),
        "resident memory is flat": _claim(
            growth is None or growth <= args.memory_growth, growth, f"<= {args.memory_growth}"
        ),
        "compilations after warm-up": _claim(not compiled, compiled, 0),
        "P99 of ITL within the chunk budget's bound, ms": _claim(p99 <= bound, p99, f"<= {bound:.1f}"),
    }
    return {
        "arguments": {k: v for k, v in vars(args).items() if "key" not in k},
        "completed": outcome.completed,
        "disconnected": outcome.disconnected,
        "aborted": outcome.aborted,
        "output_tokens": outcome.output_tokens,
        "resident_bytes": grew,
        "preemptions": (after.total("vllm:num_preemptions_total") - before.total("vllm:num_preemptions_total")),
        "itl_ms": {"median": float(np.median(itls)), "p99": p99, "max": float(itls.max())},
        "itl_bound": {
            "prompt_launch_ms": budget.prompt_launch * 1e3,
            "decode_launch_ms": budget.decode_launch * 1e3,
            "most_prompt_launches": budget.most_prompt_launches,
            "slack": args.slack,
            "bound_ms": bound,
        },
        "claims": claims,
    }


def _claim(holds: bool, found: Any, expected: Any) -> dict[str, Any]:
    return {"holds": bool(holds), "found": found, "expected": expected}


def _thirds(memory: list[int]) -> dict[str, list[int]]:
    """Samples of the beginning (its first tenth left out, in which buffers are made), the middle and the end."""
    tenth = max(1, len(memory) // 10)
    middle = len(memory) // 2
    return {
        "start": memory[tenth : 2 * tenth] or memory,
        "middle": memory[middle : middle + tenth],
        "end": memory[-tenth:],
    }


async def _watch_memory(pid: int | None) -> list[int]:
    """Resident bytes of a process, every two seconds until cancelled; nothing without a process of this machine."""
    samples: list[int] = []
    with contextlib.suppress(asyncio.CancelledError):
        while pid:
            status = Path(f"/proc/{pid}/status").read_text()
            samples.append(int(status.partition("VmRSS:")[2].split()[0]) * 1024)
            await asyncio.sleep(_SAMPLE_SECONDS)
    return samples


async def _stop(task: "asyncio.Task[list[int]]") -> list[int]:
    task.cancel()
    return await task


async def _drained(session: aiohttp.ClientSession, url: str, seconds: float = 60.0) -> list[dict[str, Any]]:
    """The ranks' loads once nothing runs, or as they are when time is up."""
    deadline = time.monotonic() + seconds
    while True:
        loads = (await _json(session, f"{url}/get_load"))["ranks"]
        if not any(load["running"] or load["waiting"] or load["used_pages"] for load in loads):
            return loads
        if time.monotonic() > deadline:
            return loads
        await asyncio.sleep(0.2)


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        response.raise_for_status()
        return await response.json()


async def _metrics(session: aiohttp.ClientSession, url: str) -> Exposition:
    async with session.get(f"{url}/metrics") as response:
        return Exposition(await response.text() if response.status == 200 else "")


def _show_unchecked(found: dict[str, Any]) -> None:
    if found["claims"]["compilations after warm-up"]["found"] is None:
        print("note: the server has no such metric, so this claim was not checked")
    if not found["resident_bytes"]:
        print("note: without --pid the server's memory was not watched")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = parser.add_argument_group("both kinds")
    both.add_argument(
        "--separated", action="store_true", help="soak a decode engine and a prefill process, not a server"
    )
    both.add_argument("--mesh", help="of the server to start (dp=32), or of the decode engine (dp=2)")
    both.add_argument("--minutes", type=float, default=10.0)
    both.add_argument("--sessions", type=int, help="200, or 12 with --separated")
    both.add_argument("--abort-share", type=float, help="0.05, or 0.15 with --separated")
    both.add_argument("--seed", type=int, default=0)
    both.add_argument("--json", metavar="FILE")
    server = parser.add_argument_group("a server")
    server.add_argument("--url", help="of a running server; default: start one")
    server.add_argument("--pid", type=int, help="of that server, to watch its memory")
    server.add_argument("--api-key")
    server.add_argument("--admin-api-key", help="aborts need it")
    server.add_argument(
        "--serve-option", action="append", default=[], metavar="'--NAME VALUE'", help="more of its options"
    )
    server.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of the server")
    server.add_argument("--prefill-chunk", type=int, default=256, help="of the server")
    server.add_argument("--prompt-tokens", type=_range, default=(16, 2048), metavar="LEAST:MOST")
    server.add_argument("--output-tokens", type=_range, default=(1, 512), metavar="LEAST:MOST")
    server.add_argument("--vocab-size", type=int, default=4096, help="token ids are drawn below this, from 16")
    server.add_argument("--disconnect-share", type=float, default=0.1)
    server.add_argument("--request-timeout", type=float, default=1800.0)
    server.add_argument("--memory-growth", type=float, default=0.05, help="most that counts as flat")
    server.add_argument("--slack", type=float, default=1.25, help="see soaks/bound.py")
    apart = parser.add_argument_group("with --separated")
    of_separated = [
        apart.add_argument("--model", default="demo"),
        apart.add_argument("--prefill-mesh", default="tp=2"),
        apart.add_argument(
            "--requests", type=int, default=160, help="different ones, of which each is asked again and again"
        ),
        apart.add_argument(
            "--abandon-share", type=float, default=0.05, help="prompts computed beside that nobody decodes"
        ),
        apart.add_argument("--kill-seconds", type=float, default=45.0, help="about so long lives a prefill process"),
        apart.add_argument("--growth", type=float, default=0.03, help="of resident memory, most that counts as flat"),
        apart.add_argument("--disaggregation-transfer-backend", default="jax", help="what moves the pages: jax, nixl"),
        apart.add_argument("--more", type=int, default=3, help="threads or open files, most that counts as flat"),
    ]
    args = parser.parse_args()
    for name, value in (_SEPARATED if args.separated else _ALONE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.separated:  # what it was asked, which its JSON has, is of a server
        for action in of_separated:
            delattr(args, action.dest)
    return args


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return int(least), int(most)


if __name__ == "__main__":
    main()
