"""What host memory and a disk below the device's cache are worth: the same requests with and without them, and with a large cache.

    python tools/bench_tiers.py
    python tools/bench_tiers.py --beginnings 64 --requests 256 --mesh dp=2 --folder /nvme/bench

Requests begin with one of `--beginnings` prompts of `--prompt-tokens` random tokens, drawn at random, which together are `--excess` times
what the small cache holds; one token more makes each its own. They come one after another, while another request decodes all the
time: its time from token to token (ITL) tells whether steps wait for pages that move. Given are the tokens found cached, by the tier that
had them, the time to the first token, that time between tokens, and the pages that moved. `little host` has room for 5 % of the
beginnings. The row after a restart is a new engine on the folder that the one before it left, which is asked at once. What the
operating system keeps of the files in memory is read from there: a disk's own speed is seen only where the files are larger than
that. All must make the same tokens.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))


RESTARTED = "disk, after a restart"


class Load:
    """One engine's run."""

    def __init__(self, llm, beginnings, order, fill=True):
        self.llm, self.engine = llm, llm.engine
        self.ttft: list[float] = []
        self.between: list[float] = []
        self.cached = self.asked = 0
        self.tokens: list[tuple[int, ...]] = []
        self._watched, self._decoding = 0, False
        for number, beginning in enumerate(beginnings if fill else ()):  # fill whatever there is room in
            self._ask(f"fill-{number}", [*beginning, 5], measured=False)
        before = self._hits()
        for number, index in enumerate(order):
            self._ask(f"ask-{number}", [*beginnings[index], 10 + number % 500], measured=True)
        self.hits = [after - earlier for after, earlier in zip(self._hits(), before, strict=True)]

    def _hits(self) -> list[int]:
        """Tokens found on the devices, in host memory and on the disk, since the start."""
        loads = self.engine.core.loads()
        return [sum(load.hits.get(tier, 0) for load in loads) for tier in ("device", "host", "disk")]

    def _ask(self, name: str, tokens: list[int], *, measured: bool) -> None:
        from dsjax import SamplingParams
        from dsjax.engine.contract.sampling_params import OutputKind

        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        watched = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, greedy)
        last = None
        while True:
            if not self._decoding:
                self._decoding = True
                self._watched += 1
                self.engine.add_request(f"watched-{self._watched}", {"prompt_token_ids": [7, 8, 9]}, watched)
                last = None
            for output in self.engine.step():
                if output.request_id.startswith("watched"):
                    self._decoding = not output.finished
                    now = time.monotonic()
                    if last is not None and measured:
                        self.between.append(now - last)
                    last = now
                elif output.finished:
                    if measured:
                        self.ttft.append(output.metrics.first_token_time - output.metrics.arrival_time)
                        self.cached += output.num_cached_tokens
                        self.asked += len(tokens)
                        self.tokens.append(tuple(output.outputs[0].token_ids))
                    return

    @property
    def moved(self) -> tuple[int, int]:
        """Pages that went to host memory and the disk, and that came back."""
        counts = [load.tiers["host"] for load in self.engine.core.loads() if "host" in load.tiers]
        counts += [counted for name, counted in self.engine.core.statistics().items() if name == "disk"]
        return sum(one.stored for one in counts), sum(one.fetched for one in counts)


def main() -> int:
    """Run them all, print the table; 1 where tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--mesh", default="dp=1")
    parser.add_argument("--beginnings", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--excess", type=int, default=4)
    parser.add_argument(
        "--folder",
        help="where a folder for the disk's pages is made, and removed in the end; default: where temporary files are",
    )
    args = parser.parse_args()

    from dsjax import LLM
    from sharding import MeshSpec
    from sharding.emulation import emulate_devices

    spec = MeshSpec.parse(args.mesh)
    emulate_devices(spec.num_devices)
    choose = random.Random(1)
    beginnings = [[choose.randrange(10, 4000) for _ in range(args.prompt_tokens)] for _ in range(args.beginnings)]
    order = [choose.randrange(args.beginnings) for _ in range(args.requests)]
    whole = -(-args.beginnings * args.prompt_tokens // (16 * spec.dp_size)) * 16
    small = max(-(-whole // (16 * args.excess)) * 16, 512)
    most = 1 << 30
    page_bytes = 0  # known when an engine has been made
    systems = {
        "small": lambda folder: {},
        "host": lambda folder: {"host_cache_bytes": most},
        "disk": lambda folder: {"disk_cache": f"{folder}/alone", "disk_cache_bytes": most},
        "little host, disk": lambda folder: {
            "host_cache_bytes": max(whole // 16 // 20, 1) * page_bytes * spec.dp_size,
            "disk_cache": f"{folder}/below",
            "disk_cache_bytes": most,
        },
        RESTARTED: lambda folder: {"disk_cache": f"{folder}/below", "disk_cache_bytes": most},
        "large": lambda folder: {"cache_tokens": 2 * whole + 1024},
    }
    table = Table(
        title=f"{args.requests} requests, {len(beginnings)} beginnings of {args.prompt_tokens} tokens, {spec}"
    )
    for title in ("", "cached", "device", "host", "disk", "TTFT ms", "P90", "ITL ms", "P99", "stored", "fetched"):
        table.add_column(title, justify="left" if not title else "right")
    answers = []
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, options in systems.items():
            sizes = {"cache_tokens": small, "max_model_len": 512, "max_num_seqs": 4} | options(folder)
            llm = LLM(args.model, mesh=args.mesh, **sizes)
            page_bytes = llm.facts.page_bytes
            llm.executor.warm_up()
            load = Load(llm, beginnings, order, fill=name != RESTARTED)
            answers.append(load.tokens)
            table.add_row(
                name,
                f"{load.cached / load.asked:.1%}",
                *(f"{tokens / load.asked:.1%}" for tokens in load.hits),
                f"{statistics.median(load.ttft) * 1e3:.2f}",
                f"{statistics.quantiles(load.ttft, n=10)[-1] * 1e3:.2f}",
                f"{statistics.median(load.between) * 1e3:.2f}",
                f"{statistics.quantiles(load.between, n=100)[-1] * 1e3:.2f}",
                *(str(count) for count in load.moved),
            )
            llm.shutdown()
    Console(width=130).print(table)
    same = all(answer == answers[0] for answer in answers)
    print("the same tokens from all" if same else "TOKENS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
