"""Kill the prefill process under random traffic, and hold every answer to the bits of an engine that nothing disturbs.

    python tools/lab.py prefill --minutes 10

The decode engine runs in this process, on `--mesh` emulated devices with a cache far smaller than what the prompts need, a small tier in
host memory and one on a disk; prompts are computed by another process, which is killed at random moments and started again. Some
requests are aborted at any moment, some prompts are computed that nobody comes for, and now and then every cached page is forgotten.
Tokens and log-probabilities of every answer, greedy or drawn with a seed, are held to those of one
engine that nothing disturbed; an aborted one has to be the beginning of its answer. In the end no page may be in use on either side, and
the decode process may have grown by 3 % and by three threads or open files, of the last third over the middle one (of the threads and
files the fewest: while the prefill process is away). A line every ten seconds says how far it is. Exits with 1 if a claim does not hold.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from dsjax import LLM, SamplingParams
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.transfer.prefill_links import PrefillLinks
from sharding.emulation import emulate_devices
from sharding.mesh import MeshSpec
from tools.labs.servers import SideProcess

_SIZES = {"max_num_seqs": 8, "max_model_len": 512, "prefill_chunk": 64, "max_num_batched_tokens": 128}
_TRANSFER = {"transfer_host": "127.0.0.1", "transfer_timeout": 5, "local_prefill_tokens": 17}
_WORD_SECONDS = 10.0
_MOST_GROWTH, _MOST_MORE = 0.03, 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--mesh", default="dp=2", help="of the decode engine")
    parser.add_argument("--prefill-mesh", default="tp=2")
    parser.add_argument("--disaggregation-transfer-backend", default="jax", help="what moves the pages: jax, nixl")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=12, help="requests under way")
    parser.add_argument("--requests", type=int, default=160, help="different ones, each asked again and again")
    parser.add_argument("--abort-share", type=float, default=0.15)
    parser.add_argument("--abandon-share", type=float, default=0.05, help="prompts computed beside that nobody decodes")
    parser.add_argument("--kill-seconds", type=float, default=45.0, help="about so long lives a prefill process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    options = {"model": args.model, **_SIZES, **_TRANSFER}
    options["disaggregation_transfer_backend"] = args.disaggregation_transfer_backend
    emulate_devices(MeshSpec.parse(args.mesh).num_devices)
    with tempfile.TemporaryDirectory(prefix="lab-prefill-") as folder:
        prefill = SideProcess(mesh=args.prefill_mesh, disaggregation_mode="prefill", **options)
        try:
            lab = Lab(args, prefill, folder, options)
            lab.play()
            found = lab.judge()
        finally:
            prefill.end()
    for name, holds, value in found["claims"]:
        print(f"{'holds' if holds else 'FAILS'}  {name}: {value}")
    print(json.dumps({name: value for name, value in found.items() if name not in ("samples", "claims")}))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(holds for _, holds, _ in found["claims"]) else 1


def draw_requests(count: int, rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """(prompt, parameters); prompts begin with one of a few long beginnings, and differ behind."""
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


class Lab:
    """The decode engine, and what was found of it."""

    def __init__(self, args: argparse.Namespace, prefill: SideProcess, folder: str, options: dict[str, Any]):
        self.args, self.prefill, self.rng, self.began = args, prefill, random.Random(args.seed), time.monotonic()
        self.counts, self.wrong, self.samples = Counter(), [], []
        self.requests = draw_requests(args.requests, self.rng)
        self.say(f"computing the answers of {args.requests} requests with an engine that nothing disturbs")
        alone = LLM(args.model, mesh="dp=1", **_SIZES)
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in self.requests]
        self.expected = [answer(one) for one in alone.generate(prompts, [params for _, params in self.requests])]
        alone.shutdown()
        tiers = {"cache_tokens": 2048, "host_cache_bytes": 2 << 20, "disk_cache": folder, "disk_cache_bytes": 8 << 20}
        self.llm = LLM(mesh=args.mesh, disaggregation_mode="decode", **tiers, **options)
        self.llm.warm_up()
        self.engine, self.links = self.llm.engine, self.llm.engine.core.part(PrefillLinks).source

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:7.1f} s] {what}", flush=True)

    def play(self) -> None:
        """Run the traffic until the time is over and every request has ended."""
        args, rng, now = self.args, self.rng, time.monotonic()
        end, number = now + 60 * args.minutes, 0
        next_kill, next_flush, next_word = now + args.kill_seconds, now + 7, now
        under_way: dict[str, list[int]] = {}  # index of the request, and steps after which it is aborted
        while (now := time.monotonic()) < end or under_way:
            while now < end and len(under_way) < args.sessions:
                number += 1
                index = self.ask(number)
                under_way[f"{number}"] = [index, rng.randrange(60) if rng.random() < args.abort_share else -1]
            if next_kill < now < end:
                self.prefill.kill()
                self.counts["kills"] += 1
                next_kill = now + rng.uniform(0.7, 1.3) * args.kill_seconds
            if now > next_flush:
                self.engine.flush_prefix_cache()
                self.counts["flushes"] += 1
                next_flush = now + rng.uniform(5, 20)
            for name, left in under_way.items():
                if left[1] == 0:
                    self.engine.abort(name)
                left[1] -= 1
            for output in self.engine.step():
                if output.finished:
                    self.compare(under_way.pop(output.request_id)[0], output)
            if not self.samples or now - self.samples[-1][0] > 1:
                own = psutil.Process()
                self.samples.append((now, own.memory_info().rss, threading.active_count(), own.num_fds()))
            if now > next_word:
                next_word = now + _WORD_SECONDS
                self.say(f"{dict(self.counts)}, {len(self.wrong)} wrong, {len(under_way)} under way")

    def ask(self, number: int) -> int:
        """Begin a request; its index."""
        index = self.rng.randrange(len(self.requests))
        tokens, params = self.requests[index]
        said = self.prefill.ask(tokens=tokens)
        self.counts["asked of prefill"] += said is not None
        if self.rng.random() < self.args.abandon_share and self.prefill.ask(tokens=[*tokens, number % 200 + 20]):
            self.counts["abandoned"] += 1  # nobody takes what is computed of this one, as when a decode side dies
        self.engine.add_request(f"{number}", {"prompt_token_ids": tokens}, params, RequestOptions(prefill=said))
        return index

    def compare(self, index: int, output) -> None:
        """Hold an answer to the undisturbed one."""
        made, aborted = answer(output), output.outputs[0].finish_reason == "abort"
        self.counts["aborted" if aborted else "completed"] += 1
        if made != (self.expected[index][: len(made)] if aborted else self.expected[index]):
            self.wrong.append({"request": index, "made": made, "expected": self.expected[index], "aborted": aborted})

    def judge(self) -> dict[str, Any]:
        """What was found, once the prefill side keeps nothing or a minute has passed. Ends the engine."""
        self.prefill.wait()
        deadline, kept = time.monotonic() + 60, None
        while time.monotonic() < deadline and kept != {"jobs": 0, "chunks": 0, "pages": 0}:
            self.engine.step()
            said = self.prefill.ask() or {}
            kept = {name: said.get(name) for name in ("jobs", "chunks", "pages")}
            time.sleep(0.1)
        third = max(1, len(self.samples) // 3)
        middle, last = self.samples[third : 2 * third] or self.samples, self.samples[-third:]
        means = [sum(sample[1] for sample in part) / len(part) for part in (middle, last)]
        more = [min(sample[at] for sample in last) - min(sample[at] for sample in middle) for at in (2, 3)]
        pages = sum(load.used_pages for load in self.engine.core.loads())
        transfers, under_way = self.links.transfer_counts._asdict(), self.links.num_under_way
        self.llm.shutdown()
        claims = [
            ("no answer is wrong", not self.wrong, len(self.wrong)),
            ("requests were answered", self.counts["completed"] > 0, self.counts["completed"]),
            ("the prefill process was killed", self.counts["kills"] > 0, self.counts["kills"]),
            ("pages were transferred", transfers["completed"] > 0, transfers["completed"]),
            ("nothing is in use or under way at decode", pages == under_way == 0, [pages, under_way]),
            ("nothing is kept at prefill", not any(kept.values()), kept),
            ("memory is flat", means[1] <= (1 + _MOST_GROWTH) * means[0], means),
            ("threads and open files are as many", max(more) <= _MOST_MORE, more),
        ]
        found = {"counts": dict(self.counts), "transfers": transfers, "starts": self.prefill.starts}
        return {**found, "wrong": self.wrong[:5], "samples": self.samples, "claims": claims}
