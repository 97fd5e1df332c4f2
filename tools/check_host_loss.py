"""Take processes away from a serving group, and hold every answer to that of an undisturbed run.

    python tools/check_host_loss.py                                            # 4 × 8 devices, 200 sessions, ten processes killed
    python tools/check_host_loss.py --signal STOP --losses 3                   # they hang instead
    sudo python tools/check_host_loss.py --signal CUT                          # the link of one is cut, and its process lives; Linux
    sudo python tools/check_host_loss.py --signal CUT --between 1,2            # the link between these two alone
    python tools/check_host_loss.py --leaves 5                                 # and five that are told to end, and leave in order
    python tools/check_host_loss.py --checkpoint-gb 4 --leaves 5               # with a random checkpoint of so many GB
    python tools/check_host_loss.py --at-once 2                                # two of the four at the same moment
    python tools/check_host_loss.py --at-once 2 --apart 10                     # the second while the mesh is being changed
    python tools/check_host_loss.py --fuzz 500                                 # with generated requests, valid and not, beside the sessions
    python tools/check_host_loss.py --processes 2 --devices 2 --sessions 8 --losses 2       # a small one

A tiny model is served. First each request is answered undisturbed. Then every session sends its own request again and again, streamed,
and at a random moment a random process but the first gets the signal. When the mesh is smaller, the sessions go on; then the process is
started again, as its supervisor would do, and joins (not with `--no-return`). An answer is lost where its stream ends with an error or
without an end, and wrong where its text is another.

After the losses come the orderly leaves of `--leaves`: the process gets SIGTERM, must be left out of the mesh with reason `leave`, and must
exit with 0 when that is done; then it is started again too.

With `--fuzz N`, two of `tools/fuzz_server.py --changing` send N requests each that schemathesis makes, and N others after them, until the
last loss: each answer must be what is documented, and no 5xx but for the 503 of a mesh that is being changed.

What is lost or wrong is printed at once, with the reason. Every `--progress` seconds a line says how far it is.

The silence is the longest time without a token on any stream, from the signal, or from the start of the process that comes back, until
the group has changed: so the seconds until the first token after the loss. Its parts: `noticing` until the change began; `looking` (at
links), `releasing`, `loading` and `compiling` as process 0's log has them; `rest` until the next token. `weight_bytes` says of each change
where the bytes of the new mesh's weights came from, in all processes together, `read` from the checkpoint among them
(`dsjax_generation_weight_bytes_total`; empty where the server does not count them). `--json FILE` writes `{"losses": [{"processes",
"signal", "silence", "parts", "compiled_ahead", "change_seconds", "devices", "weight_bytes", "return_silence", "return_parts",
"return_change_seconds", "return_weight_bytes", "resident_bytes"}], "leaves": [the same and "exit_codes"], "answers", "lost", "wrong",
"disorderly", "pages_left", "resident_bytes": [first, last], "fuzz": {"cases", "statuses", "changing", "slowest_seconds", "wrong"}}`, anew
after each change. What stands behind `--` are more options of `dsjax serve`.
Exits 1 where an answer was lost or wrong, also one to a generated request, a page was left, a leave was out of order, or a group did not
change.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from loss_check import ROOT, LossCheck, exit_on_sigterm, flags_of, loss_parser, run_check
from network_namespaces import CannotBeError, Namespaces
from processes import Group
from worded_checkpoint import write_worded_checkpoint


def main() -> int:
    """Run what was asked for."""
    parser = loss_parser(__doc__, tokens=48, patience=600)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8, help="emulated by each process")
    parser.add_argument("--mesh", help="default: dp over all devices")
    parser.add_argument("--leaves", type=int, default=0, help="after them, processes that are told to end (SIGTERM)")
    parser.add_argument("--model", type=Path, help="a checkpoint with a tokenizer; default: a tiny random one")
    parser.add_argument(
        "--checkpoint-gb", type=float, default=0, help="let the random one have about so many GB of experts, in float32"
    )
    parser.add_argument("--signal", choices=("KILL", "STOP", "CUT"), default="KILL")
    parser.add_argument(
        "--between",
        type=lambda text: [int(number) for number in text.split(",")],
        metavar="I,J",
        help="with --signal CUT: cut the link between these two alone, which process 0 hears both of",
    )
    parser.add_argument(
        "--apart",
        type=float,
        default=0,
        help="seconds within which the processes of --at-once are taken, so that the change is hit too",
    )
    parser.add_argument(
        "--ahead", action="store_true", help="take none before every process has compiled ahead (--compile-ahead)"
    )
    parser.add_argument("--no-return", action="store_true", help="start none again")
    parser.add_argument(
        "--fuzz", type=int, default=0, metavar="N", help="send generated requests too, N in a round (schemathesis)"
    )
    parser.add_argument("--fuzzers", type=int, default=2, help="processes that send them, each one at a time")
    parser.add_argument("--heartbeat-timeout", type=int, default=10)
    args = parser.parse_args()
    if args.model is not None and args.checkpoint_gb:
        parser.error("--checkpoint-gb makes a checkpoint, and --model names one; give one of them")
    if args.between and (args.signal != "CUT" or len(set(args.between)) != 2 or 0 in args.between):
        parser.error("--between is of two processes other than 0, and goes with --signal CUT")
    exit_on_sigterm()  # namespaces are gone then too
    args.mesh = args.mesh or f"dp={args.processes * args.devices}"
    with links(args) as network:
        found = run_check(
            lambda folder: start(args, folder, network),
            lambda group: Check(
                patience=args.patience, progress=args.progress, args=args, processes=group, network=network
            ),
            args.logs,
        )
    return (
        1 if any(found[name] for name in ("lost", "wrong", "pages_left", "disorderly")) or found["fuzz"]["wrong"] else 0
    )


@contextlib.contextmanager
def links(args: argparse.Namespace):
    """The network whose links can be cut, where that is asked for; else None: all processes are on one host."""
    if args.signal != "CUT":
        yield None
        return
    os.environ.setdefault("DSJAX_CLUSTER_KEY", secrets.token_hex(32))  # hosts, and what runs on them, share it
    try:
        network = Namespaces(args.processes)
    except CannotBeError as error:
        sys.exit(f"error: {error}")
    try:
        yield network
    finally:
        network.close()


def start(args: argparse.Namespace, folder: Path, network: Namespaces | None) -> Group:
    """A group of servers."""
    rows = -(-args.sessions // (args.processes * args.devices))
    sizes = {
        "max-num-seqs": max(1, rows),
        "max-num-batched-tokens": max(16, rows),
        "prefill-chunk": 16,
        "page-size": 4,
        "max-model-len": 96,
        "heartbeat-timeout": args.heartbeat_timeout,
        "start-timeout": 600,
    }
    flags = flags_of(sizes)
    checkpoint = args.model or write_worded_checkpoint(folder, **large(args.checkpoint_gb))
    model = flags_of({"model": checkpoint, "served-model-name": "tiny"})
    command = ["-m", "dsjax.serve", *model, "--port", "0", "--mesh", args.mesh, "--batch-invariant", *args.serve]
    options = dict.fromkeys(range(args.processes), flags)
    if network is None:
        return Group(command, args.processes, options=options, stuck=600)
    options[0] = [*flags, "--host", network.address(0)]
    return Group(command, args.processes, options=options, stuck=600, address=network.address(0), before=network.inside)


def large(gigabytes: float) -> dict[str, int]:
    """Fields with which the tiny model's experts have so many bytes: 256 of them, in two layers, each of three matrices 32 wide."""
    if not gigabytes:
        return {}
    return {"n_routed_experts": 256, "moe_intermediate_size": max(16, round(gigabytes * 1e9 / (256 * 2 * 3 * 32 * 4)))}


@dataclass(kw_only=True)
class Check(LossCheck):
    """The sessions, and what is done to the group under them."""

    network: Namespaces | None = None
    disorderly: list[str] = field(default_factory=list)
    leaves: list[dict] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    fuzzed: dict = field(
        default_factory=lambda: {"cases": 0, "statuses": {}, "changing": 0, "slowest_seconds": 0.0, "wrong": []}
    )

    def draw_requests(self) -> list[dict]:
        """Draw requests that are greedy, drawn with a seed, with penalties, or held to a grammar."""
        kinds = [
            {"temperature": 0},
            {"temperature": 1, "logprobs": 1},
            {"temperature": 0, "repetition_penalty": 1.3},
            {"temperature": 0.8, "structured_outputs": {"regex": f"[a-z ]{{{self.args.tokens}}}"}},
        ]
        requests = [self.request(index, (2, 8), kinds) for index in range(self.args.sessions)]
        return [one | ({"seed": index} if one["temperature"] else {}) for index, one in enumerate(requests)]

    async def answer_undisturbed(self) -> Sequence[str]:
        """Have each request answered before anything is done."""
        began = time.monotonic()
        expected = await super().answer_undisturbed()
        self.say(f"{len(expected)} undisturbed answers in {time.monotonic() - began:.1f} s")
        self.resident_bytes.append(self.resident())
        return expected

    def beside(self) -> list[asyncio.Task]:
        """Start those that send generated requests."""
        return [asyncio.create_task(self.fuzz(number)) for number in range(self.args.fuzzers)] if self.args.fuzz else []

    async def disturb(self) -> None:
        """Take processes away at random moments, and then have some leave in order."""
        for number in range(self.args.losses):
            self.losses.append(await self.lose() | {"resident_bytes": self.resident()})
            self.say(f"{number + 1}: {json.dumps(self.losses[-1])}; {self.standing}")
            self.write(self.found())
            if self.args.no_return and self.losses[-1]["devices"] <= self.args.devices:
                break
        for number in range(self.args.leaves):
            self.leaves.append(await self.lose("TERM") | {"resident_bytes": self.resident()})
            self.say(f"leave {number + 1}: {json.dumps(self.leaves[-1])}; {self.standing}")
            self.write(self.found())

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return super().found() | {"leaves": self.leaves, "disorderly": self.disorderly, "fuzz": self.fuzzed}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no session has a request under way."""
        return await super().found_at_the_end() | {"resident_bytes": [*self.resident_bytes, self.resident()]}

    @property
    def standing(self) -> str:
        """What came of the requests so far."""
        if not self.args.fuzz:
            return super().standing
        wrong = len(self.fuzzed["wrong"])
        return f"{super().standing}; {self.fuzzed['cases']} generated requests, {wrong} answered wrongly"

    async def fuzz(self, first: int) -> None:
        """Have generated requests sent by a process of their own, round after round, each from another seed."""
        for number in itertools.count(first, self.args.fuzzers):
            if not self.going:
                return
            tool = [str(ROOT / "tools" / "fuzz_server.py"), "--url", self.url, "--cases", str(self.args.fuzz)]
            tool += ["--seed", str(1000 * self.args.seed + number), "--timeout", str(self.args.patience), "--changing"]
            pipe = asyncio.subprocess.PIPE
            with tempfile.NamedTemporaryFile(prefix="check-host-loss-", suffix=".json") as file:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *tool, "--json", file.name, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
                )
                try:
                    _, errors = await process.communicate()
                finally:
                    if process.returncode is None:
                        process.kill()
                written = Path(file.name).read_text()
            if not written:
                text = f"tools/fuzz_server.py has ended with {process.returncode}: {errors.decode()[-2000:]}"
                self.fuzzed["wrong"].append(text)
                self.say(f"FUZZ: {text}")
                return
            body = json.loads(written)
            for name, count in body["statuses"].items():
                self.fuzzed["statuses"][name] = self.fuzzed["statuses"].get(name, 0) + count
            self.fuzzed["cases"] += body["cases"]
            self.fuzzed["changing"] += body["changing"]
            self.fuzzed["slowest_seconds"] = max(self.fuzzed["slowest_seconds"], body["slowest_seconds"])
            self.fuzzed["wrong"] += body["wrong"]
            for line in body["wrong"]:
                self.say(f"FUZZ: {line}")

    async def lose(self, way: str | None = None) -> dict:
        """Take processes away at a random moment, and start them again. way: the signal; TERM: they leave in order."""
        way = way or self.args.signal
        if self.args.ahead:
            self.doing = "programs are compiled ahead"
            await self.until(self.has_compiled_ahead)
        self.doing = "nothing is lost"
        await asyncio.sleep(self.rng.uniform(1, 5))
        victims = self.rng.sample(range(1, self.args.processes), self.args.at_once)
        wanted = await self.metric("dsjax_generation_devices_wanted")
        # With `--no-return` some have gone before; a signal to those is none.
        victims = [index for index in victims if self.processes.processes[index].poll() is None]
        compiled = await self.metric("dsjax_compile_ahead_programs_done")
        said = len(self.processes.output[0])
        changes, leaves, began = await self.changes(), await self.changes("leave"), time.monotonic()
        weights = await self.weight_bytes()
        self.doing = f"processes {victims} {'leave' if way == 'TERM' else 'are lost'}"
        if self.args.between and way != "TERM":
            victims = []
            self.network.cut_between(*self.args.between)
        for index in victims:
            if way == "CUT":
                self.network.cut(index)
            else:
                self.processes.processes[index].send_signal(getattr(signal, f"SIG{way}"))
            await asyncio.sleep(self.rng.uniform(0, self.args.apart))
        await self.until(lambda: self.has_begun(said))
        begun = time.monotonic()
        if self.args.between and way != "TERM":
            victims = await self.left_out()
        await self.until(lambda: self.changed_since(changes))
        seconds = round(time.monotonic() - began, 2)
        last, silence = await self.silence(began)
        found = {"processes": victims, "signal": way, "silence": silence}
        found["parts"] = self.parts(said, silence, begun - last)
        found["compiled_ahead"] = compiled
        found |= {"change_seconds": seconds, "devices": await self.metric("dsjax_generation_devices")}
        found["weight_bytes"] = await self.weight_bytes(weights)
        if way == "TERM":
            found["exit_codes"] = await self.exit_codes(victims, await self.changes("leave") - leaves)
        if not self.args.no_return:
            await asyncio.sleep(self.rng.uniform(1, 3))
            began, before = time.monotonic(), await self.metric("dsjax_generation_change_seconds_total")
            weights = await self.weight_bytes()
            said, self.doing = len(self.processes.output[0]), f"processes {victims} come back"
            for index in victims:
                self.processes.processes[index].kill()  # that it is not healthy a supervisor would see too
                if self.args.between and way != "TERM":
                    self.network.mend_between(*self.args.between)
                elif way == "CUT":
                    self.network.mend(index)
                self.processes.start_again(index)
            await self.until(lambda: self.has_devices(wanted))
            _, found["return_silence"] = await self.silence(began)
            found["return_parts"] = self.parts(said, found["return_silence"], 0.0)
            found["return_change_seconds"] = round(
                await self.metric("dsjax_generation_change_seconds_total") - before, 2
            )
            found["return_weight_bytes"] = await self.weight_bytes(weights)
        return found

    async def exit_codes(self, leavers: list[int], changes: float) -> list[int | None]:
        """Wait until those that leave have ended; note what was not in order. changes: that were made because of them."""
        await self.until(lambda: self.have_ended(leavers))
        codes = [self.processes.processes[index].poll() for index in leavers]
        if any(codes):
            self.disorderly.append(f"processes {leavers} ended with {codes}, expected 0")
        if changes != 1:
            self.disorderly.append(
                f"{changes:g} changes had the reason leave when processes {leavers} left, expected one"
            )
        for text in self.disorderly:
            self.say(f"OUT OF ORDER: {text}")
        return codes

    async def have_ended(self, indices: list[int]) -> bool:
        """Whether these processes have ended."""
        return all(self.processes.processes[index].poll() is not None for index in indices)

    async def weight_bytes(self, before: dict[str, float] | None = None) -> dict[str, float]:
        """Bytes of changed meshes' weights, by where they came from, since `before`; empty where the server does not count them."""
        samples = await self.samples("dsjax_generation_weight_bytes_total")
        now = {re.search('source="(\\w+)"', labels).group(1): value for labels, value in samples}
        return {source: value - (before or {}).get(source, 0.0) for source, value in now.items()}

    async def has_compiled_ahead(self) -> bool:
        """Whether all processes have the programs of the meshes that may come next; one that has just come back begins with none."""
        wanted = await self.metric("dsjax_compile_ahead_programs_wanted")
        if not 0 < wanted == await self.metric("dsjax_compile_ahead_programs_done"):
            return False
        live = [index for index, process in enumerate(self.processes.processes) if process.poll() is None]
        if len(live) < 3:
            return True  # a follower that is alone with process 0 has no smaller mesh to be in
        # A process reads the checkpoint once for each mesh, and then compiles ahead.
        since = [self.processes.output[index].rpartition("of the checkpoint's")[2] for index in live[1:]]
        return all("are there, after" in text for text in since)

    async def left_out(self) -> list[int]:
        """Wait for one of the two to end, between which the link is cut: it was left out."""
        found: list[int] = []

        async def has_ended() -> bool:
            found[:] = [index for index in self.args.between if self.processes.processes[index].poll() is not None]
            return bool(found)

        await self.until(has_ended)
        return found

    async def has_begun(self, said: int) -> bool:
        """Whether process 0 has said since then that it gives up its mesh."""
        return re.search(r"Generation \d+ begins", self.processes.output[0][said:]) is not None

    def parts(self, said: int, silence: float, begun: float) -> dict[str, float]:
        """Divide a silence by what process 0 has said of its last change since then.

        begun: seconds of it until the new generation began.
        """
        changes = re.findall(
            r"Generation \d+ has .* No step computed for [\d.]+ s: (.*)\.", self.processes.output[0][said:]
        )
        found = {name: float(part) for name, part in re.findall(r"(\w+) ([\d.]+) s", changes[-1])} if changes else {}
        before = sum(found.get(name, 0.0) for name in ("looking", "releasing"))
        found = {"noticing": round(max(0.0, begun - before), 2), **found}
        return found | {"rest": round(silence - sum(found.values()), 2)}

    async def has_devices(self, count: float) -> bool:
        """Whether the mesh has so many."""
        return await self.metric("dsjax_generation_devices") == count

    async def changed_since(self, changes: float) -> bool:
        """Whether the mesh has changed."""
        return await self.changes() > changes and not await self.metric("dsjax_generation_changing")

    async def changes(self, reason: str = "") -> float:
        """How often it did, for this reason or for any."""
        samples = await self.samples("dsjax_generation_changes_total")
        return sum(value for labels, value in samples if not reason or f'reason="{reason}"' in labels)

    def resident(self) -> int:
        """Bytes of process 0 that are in memory."""
        status = Path(f"/proc/{self.processes.processes[0].pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024


if __name__ == "__main__":
    sys.exit(main())
