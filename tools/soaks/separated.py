"""A decode engine with tiers, and a prefill process that is killed and started again, under random traffic: was anything lost or wrong?

    python tools/soak.py --separated --minutes 10

The decode engine runs in this process, on `--mesh` emulated devices with a cache far smaller than what the prompts need, a small tier in
host memory and one on a disk; prompts are computed by another process, which is killed at random moments and started again. Some
requests are aborted, at any moment, some prompts are computed that nobody comes for, and now and then every cached page is forgotten.
Both sides have `--batch-invariant`. Holds, or exits with 1: the tokens and log-probabilities of every answer, greedy or drawn with a seed,
are to the bit those of one engine, which nothing disturbed, and what an aborted one had said by then its beginning; in the end no page is
in use on either side, nothing is under way, and the decode process has neither grown
nor more threads or open files than in the middle (of each third the fewest count: while the prefill process is away). A line every ten
seconds says how far it is.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from dsjax.engine.transfer.prefill_links import PrefillLinks

ROOT, BEGAN = Path(__file__).parents[2], time.monotonic()
sys.path.insert(0, str(ROOT))
SIZES = {
    "max_num_seqs": 8,
    "max_model_len": 512,
    "prefill_chunk": 64,
    "max_num_batched_tokens": 128,
    "batch_invariant": True,
}
WORD_SECONDS = 10.0  # between two lines that say how far it is
TRANSFER = {"transfer_host": "127.0.0.1", "transfer_timeout": 5, "local_prefill_tokens": 17}


class PrefillProcess:
    """A prefill engine in a process of its own, which is started again after it was killed. Only `wait` and `end` wait for a start.

    Attributes:
        starts: times that it was ready. ready_since: when it last was; None while it is not there.
    """

    def __init__(self, options: dict):
        self._options, self._lock = options, threading.Lock()
        self._process: subprocess.Popen | None = None
        self.starts, self.ready_since = 0, None
        self._start()

    def _start(self) -> None:
        command = [sys.executable, __file__, json.dumps(self._options)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, **pipes)
        threading.Thread(target=self._await_ready, args=(self._process,), daemon=True).start()

    def _await_ready(self, process: subprocess.Popen) -> None:
        ready = process.stdout.readline()
        with self._lock:
            if ready and process is self._process:
                self.starts, self.ready_since = self.starts + 1, time.monotonic()

    def wait(self) -> None:
        """Until it is ready.

        Raises:
            SystemExit: it has ended instead.
        """
        while self.ready_since is None:
            if self._process.poll() is not None:
                raise SystemExit(f"the prefill process ended with {self._process.returncode} before it was ready")
            time.sleep(0.1)

    def ask(self, **request) -> dict | None:
        """The answer; None where it is not there."""
        with self._lock:
            if self.ready_since is None:
                return None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline() or "null")
            except (OSError, ValueError):
                return None

    def kill(self) -> None:
        """Kill it, and start another."""
        self.end()
        self._start()

    def end(self) -> None:
        """Leave nothing behind."""
        with self._lock:
            self.ready_since = None
            self._process.kill()
            self._process.wait()


def serve_prefill(options: dict) -> None:
    """Run the prefill side, in a process of its own.

    It reads a prompt a line, and says what the decode engine has to be told; an empty line asks what is kept.
    """
    from dsjax.engine.elastic.joining import join_group
    from dsjax.engine.setup.args import EngineArgs

    args = EngineArgs.from_options(**options)
    join_group(args, None)
    from dsjax.engine.disaggregated import load_prefill

    server = load_prefill(args)
    server.warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        tokens, engine = json.loads(line).get("tokens"), server.engine
        pages = sum(rank.pool.num_used for rank in engine.core.scheduler.ranks)
        kept = {"jobs": engine.num_jobs, "chunks": engine.buffers.num_kept, "pages": pages}
        print(json.dumps(server.prefill(tokens) if tokens else kept), flush=True)


def draw_requests(count: int, rng: random.Random) -> list[tuple[list[int], object]]:
    """(prompt, parameters); prompts begin with one of a few long beginnings, and differ behind."""
    from dsjax import SamplingParams

    heads = [[rng.randrange(16, 250) for _ in range(rng.randrange(40, 240))] for _ in range(max(2, count // 6))]
    found = []
    for index in range(count):
        tokens = [*rng.choice(heads), *(rng.randrange(16, 250) for _ in range(rng.randrange(1, 120)))]
        drawn = {"temperature": 0.8, "seed": index} if index % 3 == 0 else {"temperature": 0}
        found.append((tokens, SamplingParams(**drawn, max_tokens=rng.randrange(4, 40), ignore_eos=True, logprobs=0)))
    return found


def answer(output) -> list[tuple[int, float]]:
    """Tokens of a request, and the log-probability of each."""
    (made,) = output.outputs
    return [(token, entry[token].logprob) for token, entry in zip(made.token_ids, made.logprobs, strict=True)]


def say(what: str) -> None:
    """How far it is, with the seconds since the command began."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {what}", flush=True)


def resident_bytes() -> int:
    """How much memory this process has resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def soak(args: argparse.Namespace, llm, prefill: PrefillProcess, requests, expected) -> dict:
    """Run the traffic; give what was found."""
    from dsjax.engine.schedule.request import RequestOptions

    rng, core = random.Random(args.seed), llm.engine.core
    began = time.monotonic()
    end, next_flush, life = began + 60 * args.minutes, began + 7.0, args.kill_seconds
    under_way: dict[str, tuple[int, int]] = {}  # index of the request, and steps after which it is aborted
    counts, wrong, samples, number, next_word = Counter(), [], [], 0, began
    while time.monotonic() < end or under_way:
        now = time.monotonic()
        while now < end and len(under_way) < args.sessions:
            index, number = rng.randrange(len(requests)), number + 1
            tokens, params = requests[index]
            said = prefill.ask(tokens=tokens)
            counts["asked of prefill"] += said is not None
            if rng.random() < args.abandon_share and prefill.ask(tokens=[*tokens, number % 200 + 20]) is not None:
                counts["abandoned"] += 1  # nobody takes what is computed of this one, as when a decode side dies
            llm.engine.add_request(f"{number}", {"prompt_token_ids": tokens}, params, RequestOptions(prefill=said))
            under_way[f"{number}"] = index, rng.randrange(0, 60) if rng.random() < args.abort_share else -1
        if prefill.ready_since is not None and now > max(began, prefill.ready_since) + life and now < end:
            prefill.kill()
            counts["kills"] += 1
            life = rng.uniform(0.7, 1.3) * args.kill_seconds
        if now > next_flush:
            llm.engine.flush_prefix_cache()
            counts["flushes"] += 1
            next_flush = now + rng.uniform(5, 20)
        for name, (index, left) in list(under_way.items()):
            if left == 0:
                llm.engine.abort(name)
            under_way[name] = index, left - 1
        for output in llm.engine.step():
            if not output.finished:
                continue
            index, _ = under_way.pop(output.request_id)
            made, aborted = answer(output), output.outputs[0].finish_reason == "abort"
            counts["aborted" if aborted else "completed"] += 1
            if made != (expected[index][: len(made)] if aborted else expected[index]):
                wrong.append({"request": index, "made": made, "expected": expected[index], "aborted": aborted})
        if not samples or now - samples[-1][0] > 1:
            samples.append((now, resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
        if now > next_word:
            next_word = now + WORD_SECONDS
            seen = ", ".join(f"{count} {what}" for what, count in counts.items())
            under = f"{len(under_way)} requests and {core.part(PrefillLinks).source.num_under_way} transfers under way"
            say(
                f"{seen}; {len(wrong)} wrong; {under}; {samples[-1][1] / 1e6:.0f} MB, {samples[-1][2]} threads, {samples[-1][3]} files"
            )
    say("the traffic has ended; waiting until the prefill side keeps nothing")
    prefill.wait()
    deadline = time.monotonic() + 60
    kept = None
    while time.monotonic() < deadline and kept != {"jobs": 0, "chunks": 0, "pages": 0}:
        llm.engine.step()
        kept = prefill.ask()
        time.sleep(0.1)
    third = max(1, len(samples) // 3)
    middle, last = samples[third : 2 * third] or samples, samples[-third:]
    growth = sum(s[1] for s in last) / len(last) / (sum(s[1] for s in middle) / len(middle)) - 1
    loads = core.loads()
    incoming = core.part(PrefillLinks).source
    claims = {
        "wrong answers": (len(wrong), 0, not wrong),
        "answers": (counts["completed"], "> 0", counts["completed"] > 0),
        "kills": (counts["kills"], "> 0", counts["kills"] > 0),
        "transfers completed": (done := incoming.transfer_counts.completed, "> 0", done > 0),
        "pages in use on the decode side": (pages := sum(load.used_pages for load in loads), 0, pages == 0),
        "transfers under way": (incoming.num_under_way, 0, incoming.num_under_way == 0),
        "kept on the prefill side": (kept, "nothing", kept == {"jobs": 0, "chunks": 0, "pages": 0}),
        "growth of memory, last third over middle": (round(growth, 4), f"<= {args.growth}", growth <= args.growth),
        **{
            f"growth of the fewest {what}, last third over middle": (
                more := min(s[place] for s in last) - min(s[place] for s in middle),
                f"<= {args.more}",
                more <= args.more,
            )
            for place, what in ((2, "threads"), (3, "open files"))
        },
    }
    return {
        "counts": dict(counts),
        "transfers": incoming.transfer_counts._asdict(),
        "hits": [load.hits for load in loads],
        "prefill starts": prefill.starts,
        "samples of seconds, resident bytes, threads, open files": [(round(s[0] - began, 1), *s[1:]) for s in samples],
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "wrong": wrong[:5],
        "wrong by request": dict(Counter(one["request"] for one in wrong)),
        "claims": {
            name: dict(zip(("found", "expected", "holds"), claim, strict=True)) for name, claim in claims.items()
        },
    }


def soak_separated(args: argparse.Namespace) -> dict:
    """Start the prefill process, run the traffic, and end the process."""
    own = {"model": args.model, "mesh": args.prefill_mesh, "disaggregation_mode": "prefill"}
    prefill = PrefillProcess({**own, **SIZES, **transfer_options(args)})
    try:
        with tempfile.TemporaryDirectory(prefix="dsjax-soak-") as folder:
            return run(args, folder, prefill)
    finally:
        prefill.end()


def transfer_options(args: argparse.Namespace) -> dict:
    """Give the options of a transfer, which both sides have alike."""
    return {**TRANSFER, "disaggregation_transfer_backend": args.disaggregation_transfer_backend}


def run(args: argparse.Namespace, folder: str, prefill: PrefillProcess) -> dict:
    """Compute what is expected while the prefill process starts, then soak."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    emulate_devices(MeshSpec.parse(args.mesh).num_devices)
    from dsjax import LLM

    requests = draw_requests(args.requests, random.Random(args.seed))
    say(f"computing the answers of {args.requests} requests with an engine that nothing disturbs")
    prompts, params = [{"prompt_token_ids": tokens} for tokens, _ in requests], [params for _, params in requests]
    alone = LLM(args.model, mesh="dp=1", **SIZES)
    expected = [answer(output) for output in alone.generate(prompts, params)]
    alone.shutdown()
    tiers = {"cache_tokens": 2048, "host_cache_bytes": 2 << 20, "disk_cache": folder, "disk_cache_bytes": 8 << 20}
    say("loading the decode engine and compiling its programs")
    llm = LLM(args.model, mesh=args.mesh, disaggregation_mode="decode", **tiers, **SIZES, **transfer_options(args))
    try:
        llm.warm_up()
        say("waiting for the prefill process")
        prefill.wait()
        say(f"traffic for {args.minutes:g} minutes")
        return soak(args, llm, prefill, requests, expected)
    finally:
        llm.shutdown()


if __name__ == "__main__":  # the prefill process
    serve_prefill(json.loads(sys.argv[1]))
