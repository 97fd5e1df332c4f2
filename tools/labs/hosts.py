"""Take processes away from a serving mesh, and hold every answer to that of an undisturbed run.

    python tools/lab.py hosts                                            # 4 × 8 devices, 200 sessions, ten processes killed
    python tools/lab.py hosts --signal STOP --losses 3                   # they hang instead
    sudo python tools/lab.py hosts --signal CUT                          # the link of one is cut, and its process lives; Linux
    sudo python tools/lab.py hosts --signal CUT --between 1,2            # the link between these two alone
    python tools/lab.py hosts --leaves 5                                 # and five that are told to end, and leave in order
    python tools/lab.py hosts --checkpoint-gb 4 --leaves 5               # with a random checkpoint of so many GB
    python tools/lab.py hosts --at-once 2 --apart 10                     # two, the second while the mesh is being changed
    python tools/lab.py hosts --processes 2 --devices 2 --sessions 12 --losses 2 --leaves 1       # a small one

A tiny model is served. Each request is answered undisturbed first. Then every session sends its own request again and again, streamed,
and at a random moment a random process but the first gets the signal. When the mesh is smaller, the sessions go on; then the process is
started again, as its supervisor would do, and joins (not with `--no-return`). An answer is lost if its stream ends with an error or
without an end, and wrong if its text is another. After the losses come the leaves: a process gets SIGTERM, must be left out of the mesh
with reason `leave`, and must exit with 0; then it is started again too.

`tools/fuzz_server.py --url URL --changing` can send generated requests meanwhile.

The silence is the longest time without a token on any stream, from the signal, or from the start of the process that comes back, until
the first token of the new mesh. Its parts: `noticing` until the change began; `looking` (at links), `releasing`, `loading` and `compiling`
as process 0's log has them; `rest` until the next token. `weight_bytes` says where the bytes of the new mesh's weights came from, in all
processes together (`dsjax_generation_weight_bytes_total`). `--json FILE` writes `{"losses": [{"processes", "signal", "silence", "parts",
"compiled_ahead", "change_seconds", "devices", "weight_bytes", "resident_bytes", "return_silence", "return_parts", "return_change_seconds",
"return_weight_bytes"}], "leaves": [the same and "exit_codes"], "answers", "lost", "wrong", "disorderly", "pages_left",
"resident_bytes": [first, last]}`, anew after each change. What stands behind `--` are more options of `dsjax serve`.

Exits with 1 if an answer was lost or wrong, a page was left, a leave was out of order, or the mesh did not change.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from processes import Group
from worded_checkpoint import write_worded_checkpoint

from tools.labs.crowd import Crowd, add_crowd_options
from tools.labs.namespaces import Namespaces
from tools.labs.servers import group_serving_on, serving, tiny_server

_EXPERTS, _LAYERS, _MATRICES, _WIDTH, _BYTES = 256, 2, 3, 32, 4
"""The experts of a large checkpoint: in each of the layers, of three float32 matrices that are so wide."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    add_crowd_options(parser, tokens=48, patience=600)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8, help="emulated by each process")
    parser.add_argument("--mesh", help="default: dp over all devices")
    parser.add_argument("--leaves", type=int, default=0, help="processes that get SIGTERM after the losses")
    parser.add_argument("--model", type=Path, help="a checkpoint with a tokenizer; default: a tiny random one")
    parser.add_argument("--checkpoint-gb", type=float, default=0, help="GB of experts in the random one, in float32")
    parser.add_argument("--signal", choices=("KILL", "STOP", "CUT"), default="KILL")
    parser.add_argument(
        "--between",
        type=lambda text: [int(number) for number in text.split(",")],
        metavar="I,J",
        help="with --signal CUT: cut only the link between these two; process 0 still hears both",
    )
    parser.add_argument("--apart", type=float, default=0, help="seconds in which those of --at-once are taken")
    parser.add_argument("--ahead", action="store_true", help="wait before each loss until all have compiled ahead")
    parser.add_argument("--no-return", action="store_true", help="do not start processes again")
    parser.add_argument("--heartbeat-timeout", type=int, default=10)


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    if args.model is not None and args.checkpoint_gb:
        raise SystemExit("error: --checkpoint-gb makes a checkpoint, and --model names one; give one of them")
    if args.between and (args.signal != "CUT" or len(set(args.between)) != 2 or 0 in args.between):
        raise SystemExit("error: --between is of two processes other than 0, and goes with --signal CUT")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Namespaces(args.processes)) if args.signal == "CUT" else None
        group, url = stack.enter_context(serving(lambda folder: start(args, folder, network), args.logs))
        found = asyncio.run(Hosts(args, group, url, network=network).run())
    return 1 if any(found[name] for name in ("lost", "wrong", "pages_left", "disorderly")) else 0


def start(args: argparse.Namespace, folder: Path, network: Namespaces | None) -> Group:
    """Start the group of servers."""
    rows = -(-args.sessions // (args.processes * args.devices))
    width = round(args.checkpoint_gb * 1e9 / (_EXPERTS * _LAYERS * _MATRICES * _WIDTH * _BYTES))
    large = {"n_routed_experts": _EXPERTS, "moe_intermediate_size": max(16, width)} if args.checkpoint_gb else {}
    flags = tiny_server(
        args.model or write_worded_checkpoint(folder, **large),
        mesh=args.mesh or f"dp={args.processes * args.devices}",
        max_num_seqs=max(1, rows),
        max_num_batched_tokens=max(16, rows),
        heartbeat_timeout=args.heartbeat_timeout,
    )
    flags += args.serve
    if network is not None:
        return group_serving_on(network, flags)
    own = dict.fromkeys(range(args.processes), flags)
    return Group(["-m", "dsjax.serve"], args.processes, options=own)


@dataclass(kw_only=True)
class Hosts(Crowd):
    """The crowd of a group whose processes are lost and come back.

    Attributes:
        disorderly: leaves that were out of order. resident_bytes: of process 0, before the losses.
    """

    network: Namespaces | None = None
    disorderly: list[str] = field(default_factory=list)
    leaves: list[dict] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)

    def draw_requests(self) -> list[dict]:
        """Draw requests that are greedy, sampled with a seed, with penalties, or held to a grammar."""
        kinds = [
            {"temperature": 0},
            {"temperature": 1, "logprobs": 1},
            {"temperature": 0, "repetition_penalty": 1.3},
            {"temperature": 0.8, "structured_outputs": {"regex": f"[a-z ]{{{self.args.tokens}}}"}},
        ]
        return [self.request(index, (2, 8), kinds) for index in range(self.args.sessions)]

    async def answer_undisturbed(self) -> Sequence[str]:
        """Answer each request before anything is taken away."""
        began = time.monotonic()
        expected = await super().answer_undisturbed()
        self.say(f"{len(expected)} undisturbed answers in {time.monotonic() - began:.1f} s")
        self.resident_bytes.append(self.resident())
        return expected

    async def disturb(self) -> None:
        """Take processes away at random moments; then have some leave in order."""
        for number in range(self.args.losses):
            self.losses.append(await self.lose(self.args.signal))
            self.say_change(f"loss {number + 1}", self.losses[-1])
            if self.args.no_return and self.losses[-1]["devices"] <= self.args.devices:
                break
        for number in range(self.args.leaves):
            self.leaves.append(await self.lose("TERM"))
            self.say_change(f"leave {number + 1}", self.leaves[-1])

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return super().found() | {"leaves": self.leaves, "disorderly": self.disorderly}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no request is under way."""
        return await super().found_at_the_end() | {"resident_bytes": [*self.resident_bytes, self.resident()]}

    async def lose(self, way: str) -> dict:
        """Take processes away at a random moment, and start them again. way: the signal; TERM: they leave in order."""
        if self.args.ahead:
            self.doing = "programs are compiled ahead"
            await self.until(self.has_compiled_ahead)
        self.doing = "nothing is lost"
        await asyncio.sleep(self.rng.uniform(1, 5))
        # With `--no-return` some have ended before.
        victims = self.rng.sample(range(1, self.args.processes), self.args.at_once)
        victims = [index for index in victims if not self.ended(index)]
        between = self.args.between if way == "CUT" else None
        wanted = await self.metric("dsjax_generation_devices_wanted")
        found = {"signal": way, "compiled_ahead": await self.metric("dsjax_compile_ahead_programs_done")}
        said, weights = len(self.processes.output[0]), await self.weight_bytes()
        changes, leaves, began = await self.changes(), await self.changes("leave"), time.monotonic()
        self.doing = f"processes {between or victims} {'leave' if way == 'TERM' else 'are lost'}"
        if between:
            self.network.cut_between(*between)
        for index in () if between else victims:
            if way == "CUT":
                self.network.cut(index)
            else:
                self.processes.processes[index].send_signal(getattr(signal, f"SIG{way}"))
            await asyncio.sleep(self.rng.uniform(0, self.args.apart))
        await self.until(lambda: re.search(r"Generation \d+ begins", self.processes.output[0][said:]) is not None)
        begun = time.monotonic()
        if between:  # one of the two is left out, and ends
            await self.until(lambda: any(map(self.ended, between)))
            victims = [index for index in between if self.ended(index)]
        await self.until(lambda: self.changed_since(changes))
        found |= {"processes": victims, "change_seconds": round(time.monotonic() - began, 2)}
        last, found["silence"] = await self.silence(began)
        found["parts"] = self.parts(said, found["silence"], begun - last)
        found["devices"] = await self.metric("dsjax_generation_devices")
        found["weight_bytes"] = await self.weight_bytes(weights)
        if way == "TERM":
            found["exit_codes"] = await self.exit_codes(victims, leaves)
        if not self.args.no_return:
            await asyncio.sleep(self.rng.uniform(1, 3))
            found |= await self.bring_back(victims, wanted, cut=way == "CUT", between=between)
        return found | {"resident_bytes": self.resident()}

    async def bring_back(self, victims: list[int], wanted: float, *, cut: bool, between: list[int] | None) -> dict:
        """Start processes again, and wait until the mesh has so many devices."""
        began, before = time.monotonic(), await self.metric("dsjax_generation_change_seconds_total")
        said, weights = len(self.processes.output[0]), await self.weight_bytes()
        self.doing = f"processes {victims} come back"
        if between:
            self.network.mend_between(*between)
        for index in victims:
            self.processes.processes[index].kill()  # a supervisor sees that it is not healthy
            if cut and not between:
                self.network.mend(index)
            self.processes.start_again(index)
        await self.until(lambda: self.has_devices(wanted))
        _, silence = await self.silence(began)
        seconds = await self.metric("dsjax_generation_change_seconds_total") - before
        return {
            "return_silence": silence,
            "return_parts": self.parts(said, silence, 0.0),
            "return_change_seconds": round(seconds, 2),
            "return_weight_bytes": await self.weight_bytes(weights),
        }

    async def exit_codes(self, leavers: list[int], before: float) -> list[int | None]:
        """Wait until those that leave have ended; note what was out of order. before: changes with reason `leave` until now."""
        await self.until(lambda: all(map(self.ended, leavers)))
        codes = [self.processes.processes[index].poll() for index in leavers]
        changes = await self.changes("leave") - before
        if any(codes) or changes != 1:
            self.disorderly.append(
                f"processes {leavers} left with exit codes {codes} in {changes:g} changes with reason leave; expected 0 and one"
            )
            self.say(f"OUT OF ORDER: {self.disorderly[-1]}")
        return codes

    async def weight_bytes(self, before: dict[str, float] | None = None) -> dict[str, float]:
        """Bytes of changed meshes' weights by source, since `before`."""
        name = "dsjax_generation_weight_bytes_total"
        now = (await self.scrape(name)).by(name, "source")
        return {source: value - (before or {}).get(source, 0.0) for (source,), value in now.items()}

    async def has_compiled_ahead(self) -> bool:
        """Whether all processes have the programs of the meshes that may come next."""
        wanted = await self.metric("dsjax_compile_ahead_programs_wanted")
        if not 0 < wanted == await self.metric("dsjax_compile_ahead_programs_done"):
            return False
        live = [index for index in range(self.args.processes) if not self.ended(index)]
        if len(live) < 3:
            return True  # a follower alone with process 0 has no smaller mesh to be in
        # A process reads the checkpoint once for each mesh, and then compiles ahead.
        since = [self.processes.output[index].rpartition("of the checkpoint's")[2] for index in live[1:]]
        return all("Compiled the programs of" in text for text in since)

    def parts(self, said: int, silence: float, begun: float) -> dict[str, float]:
        """Divide a silence by process 0's log of its last change.

        said: length of the log before. begun: seconds of the silence until the new mesh epoch began.
        """
        log = self.processes.output[0][said:]
        changes = re.findall(r"Generation \d+ has .* No step computed for [\d.]+ s: (.*)\.", log)
        found = {name: float(part) for name, part in re.findall(r"(\w+) ([\d.]+) s", changes[-1])} if changes else {}
        before = sum(found.get(name, 0.0) for name in ("looking", "releasing"))
        found = {"noticing": round(max(0.0, begun - before), 2), **found}
        return found | {"rest": round(silence - sum(found.values()), 2)}

    async def has_devices(self, count: float) -> bool:
        """Whether the mesh has so many devices."""
        return await self.metric("dsjax_generation_devices") == count

    async def changed_since(self, changes: float) -> bool:
        """Whether the mesh has changed, and is not changing."""
        return await self.changes() > changes and not await self.metric("dsjax_generation_changing")

    async def changes(self, reason: str = "") -> float:
        """How often the mesh changed, for this reason or for any."""
        return await self.metric("dsjax_generation_changes_total", **({"reason": reason} if reason else {}))

    def resident(self) -> int:
        """Resident bytes of process 0."""
        return psutil.Process(self.processes.processes[0].pid).memory_info().rss
