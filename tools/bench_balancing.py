"""Serve text whose kind changes on the demo model, with experts that stay and experts that follow the load, in one process.

    python tools/bench_balancing.py --json docs/measurements/balancing.json --plot docs/balancing.png
    python tools/bench_balancing.py --mesh dp=8 --redundant 16 --concurrency 32 --phase-steps 90 --interval 30 --window 15     # a minute

Code (the files of the running Python's library), prose (this project's pages) and chat (short questions in the model's chat format) come by
turns, `--phase-steps` steps each, at a constant number of running requests. The same requests are served with balancing off and on, in
turns, by one engine; before each run its experts are put back to where they were at the start. Then each bound of `--bounds` in an engine
of its own has shorter turns, with an exchange as often as there can be one: what a bound on bytes does to the longest step.

What comes out is a table of what was asked for: throughput, the inter-token latency's P99, the variation of load between ranks, how
often experts move and how long that takes, the longest step in which they do beside the median one for each bound, what was compiled
after the warm-up, and what memory is held before and after. The whole takes about ten minutes of two idle cores.

For each window of loads: the balancedness that was measured (the mean rank's tokens over the busiest rank's, as ratio of sums over
layers), and the one that the policy reaches for that very window, had it known it. Times are of the whole process on emulated devices: an
exchange is a copy in the memory of one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import random
import resource
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[1]
KINDS = ("code", "prose", "chat")
PROMPT_TOKENS = 48


def texts(tokenizer, rng: random.Random) -> dict[str, list[list[int]]]:
    """Make some hundred prompts of each kind, as tokens."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "\n".join(path.read_text(encoding="utf-8", errors="replace")[:20_000] for path in library[:60])
    prose = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    pieces = {
        name: tokenizer.encode(text, add_special_tokens=False) for name, text in (("code", code), ("prose", prose))
    }
    found = {}
    for name, tokens in pieces.items():
        starts = [rng.randrange(len(tokens) - PROMPT_TOKENS) for _ in range(300)]
        found[name] = [tokens[start : start + PROMPT_TOKENS] for start in starts]
    questions = [line.strip() for line in prose.splitlines() if 20 < len(line) < 120 and line[0].isalpha()]
    render = tokenizer.chat_template.render if tokenizer.chat_template else None
    found["chat"] = []
    for _ in range(300):
        question = f"What is meant by “{rng.choice(questions)}”?"
        text = render([{"role": "user", "content": question}], add_generation_prompt=True) if render else question
        found["chat"].append(tokenizer.encode(text, add_special_tokens=False)[:PROMPT_TOKENS])
    return found


@dataclasses.dataclass
class Run:
    """What one run measured: of every step its seconds and those of the exchange in it, of every window its loads."""

    name: str
    bound: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    exchanges: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    windows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: int = 0
    stats: dict[str, float] = dataclasses.field(default_factory=dict)
    compiled: int = 0
    memory: dict[str, int] = dataclasses.field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Figures for people; seconds, shares, bytes."""
        # An exchange is told of when the step behind it is entered, which is the one after it was launched in.
        moving, still = (
            [
                seconds
                for seconds, spent in zip(self.seconds, self.exchanges[1:], strict=False)
                if bool(spent) == exchanging
            ]
            for exchanging in (True, False)
        )
        rebalances = max(self.stats["rebalances"], 1)
        return {
            "name": self.name,
            "max_bytes_per_step": self.bound,
            "steps": len(self.seconds),
            "tokens_per_second": self.tokens / sum(self.seconds),
            "itl_p99_ms": 1e3 * quantile(self.gaps, 0.99),
            "step_median_ms": 1e3 * statistics.median(self.seconds),
            "step_with_an_exchange_median_ms": 1e3 * statistics.median(moving) if moving else None,
            "longest_step_with_an_exchange_ms": 1e3 * max(moving) if moving else None,
            "longest_step_without_one_ms": 1e3 * max(still),
            "longest_exchange_ms": 1e3 * max(self.exchanges),
            "balancedness": statistics.mean(one["balancedness"] for one in self.windows),
            "best_balancedness": statistics.mean(one["best"] for one in self.windows),
            "rank_variation": statistics.mean(one["variation"] for one in self.windows),
            "rebalances": self.stats["rebalances"],
            "rebalances_per_1000_steps": 1e3 * self.stats["rebalances"] / len(self.seconds),
            "exchange_ms_of_a_rebalance": 1e3 * self.stats["exchange_seconds"] / rebalances,
            "rebalance_ms": 1e3 * self.stats["rebalance_seconds"] / rebalances,
            "experts_moved": self.stats["experts_moved"],
            "bytes_moved": self.stats["bytes_moved"],
            "compiled_after_warm_up": self.compiled,
            "memory": self.memory,
        }


def quantile(values: list[float], share: float) -> float:
    """Give the value below which this share of the values lies, by the nearest rank."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Bench:
    """One engine, and runs on it."""

    def __init__(self, options: argparse.Namespace, bound: int):
        from dsjax import LLM, SamplingParams

        self.options, self.bound = options, bound
        self.config = {
            "num_redundant_experts": options.redundant,
            "max_bytes_per_step": bound,
            "payback": options.payback,
        }
        self.llm = LLM(
            "demo",
            mesh=options.mesh,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=max(8, -(-options.concurrency // int(options.mesh.split(",")[0].split("=")[1]))),
            prefill_chunk=64,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            enable_eplb=True,
            eplb_config=self.config,
        )
        self.llm.warm_up()
        # What a step leaves behind, its results above all, is there before the first run as after it.
        self.llm.generate([{"prompt_token_ids": list(range(5, 70))}], SamplingParams(temperature=0, max_tokens=3))
        from dsjax.engine.experts.eplb import ExpertMover

        self.start = self.llm.executor.extension(ExpertMover).slots.physical_to_logical

    def run(self, name: str, on: bool, phase_steps: int, interval: int) -> Run:
        """Serve all phases of so many steps, with a decision every ``interval`` steps."""
        from dsjax import SamplingParams
        from dsjax.engine.experts.eplb import EplbConfig
        from dsjax.engine.experts.expert_balancer import ExpertBalancer

        self.put_back()
        options, engine, core = self.options, self.llm.engine, self.llm.engine.core
        window = min(options.window, interval)
        config = self.config | {"step_interval": interval if on else 10**9, "window_size": window}
        balancer = ExpertBalancer(EplbConfig.parse(config))
        balancer.start(self.llm.executor, core.scheduler.config)
        core.attachments = [part for part in core.attachments if not isinstance(part, ExpertBalancer)] + [balancer]
        run, rng = Run(name, self.bound), random.Random(7)
        prompts = texts(self.llm.tokenizer, rng)
        live, last, number = set(), {}, 0
        params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True, detokenize=False)
        phases = [kind for _ in range(options.turns) for kind in KINDS]
        compiled, memory = len(self.llm.executor.programs.compiled), device_bytes()
        windows = 0
        for step in range(phase_steps * len(phases)):
            kind = phases[step // phase_steps]
            while len(live) < options.concurrency:
                id_ = f"{name}-{number}"
                engine.add_request(id_, {"prompt_token_ids": rng.choice(prompts[kind])}, params)
                live.add(id_)
                number += 1
            spent, began = balancer.statistics().exchange_seconds, time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            run.seconds.append(now - began)
            run.exchanges.append(balancer.statistics().exchange_seconds - spent)
            stats = core.stats()
            run.tokens += stats.num_decode_tokens + stats.num_prompt_tokens if stats else 0
            for output in outputs:
                made = len(output.outputs[0].token_ids)
                if made and output.request_id in last:
                    run.gaps.append(now - last[output.request_id])
                last[output.request_id] = now
                if output.finished:
                    live.discard(output.request_id)
            if balancer.statistics().windows > windows:
                windows = balancer.statistics().windows
                run.windows.append(self.window(balancer, kind, step))
        engine_aborts(engine, live)
        while balancer.busy:
            engine.step()
        run.stats = dataclasses.asdict(balancer.statistics())
        run.compiled = len(self.llm.executor.programs.compiled) - compiled
        run.memory = {"before": memory, "after": device_bytes(), "resident": resident_bytes()}
        return run

    def window(self, balancer, kind: str, step: int) -> dict[str, Any]:
        """What a window's loads were, and what the policy could have made of them."""
        import numpy as np

        from dsjax.engine.experts.eplb import ExpertMover
        from sharding.balancing import balancedness, rebalance

        slots, latest = self.llm.executor.extension(ExpertMover).slots, balancer.latest
        best = rebalance(
            latest.logical, n_physical=self.start.shape[1], ranks=slots.ranks, groups=slots.groups, hosts=slots.hosts
        )
        ranks = latest.by_rank
        return {
            "step": step,
            "kind": kind,
            "balancedness": balancer.statistics().balancedness,
            "best": balancedness(latest.logical, best, slots.ranks).of_sums,
            "variation": float(np.mean(ranks.std(axis=1) / np.maximum(ranks.mean(axis=1), 1))),
        }

    def put_back(self) -> None:
        """Every expert where it was at the start."""
        import numpy as np

        from dsjax.engine.experts.eplb import ExpertMover
        from dsjax.engine.experts.expert_balancer import LayerChange
        from sharding.layer_placement import exchange_rounds

        executor = self.llm.executor
        slots = executor.extension(ExpertMover).slots
        for layer, (now, start) in enumerate(zip(slots.physical_to_logical, self.start, strict=True)):
            if (now != start).any():
                rounds = list(exchange_rounds(now, start, ranks=slots.ranks, experts=slots.per_exchange))
                for command in LayerChange(layer, np.asarray(start), rounds, 0, 0, 0).commands():
                    executor.collect(executor.launch(command))

    def close(self) -> None:
        """Free the devices."""
        self.llm.shutdown()


def engine_aborts(engine, live: set[str]) -> None:
    """End what still runs."""
    for id_ in live:
        engine.abort(id_)
    while engine.core.scheduler.num_unfinished:
        engine.step()


def device_bytes() -> int:
    """Bytes of all arrays on all devices."""
    import jax

    gc.collect()
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize * len(array.sharding.device_set)
        for array in jax.live_arrays()
    )


def resident_bytes() -> int:
    """The most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


ROWS = {
    "tokens a second": ("tokens_per_second", ".1f"),
    "P99 of the inter-token latency, ms": ("itl_p99_ms", ".0f"),
    "balancedness": ("balancedness", ".3f"),
    "the best for each window, known beforehand": ("best_balancedness", ".3f"),
    "standard deviation ÷ mean of the ranks' tokens": ("rank_variation", ".3f"),
    "rebalances": ("rebalances", ".0f"),
    "rebalances in 1,000 steps": ("rebalances_per_1000_steps", ".1f"),
    "experts moved": ("experts_moved", ".0f"),
    "exchanges of a rebalance, all together, ms": ("exchange_ms_of_a_rebalance", ".0f"),
    "longest exchange, ms": ("longest_exchange_ms", ".0f"),
    "median step, ms": ("step_median_ms", ".0f"),
    "median step with an exchange, ms": ("step_with_an_exchange_median_ms", ".0f"),
    "longest step with an exchange, ms": ("longest_step_with_an_exchange_ms", ".0f"),
    "longest step without one, ms": ("longest_step_without_one_ms", ".0f"),
    "programs compiled after warm-up": ("compiled_after_warm_up", "d"),
}


def table(runs: list[Run]) -> str:
    """All runs side by side, in Markdown: how experts follow the load or stay, and what each bound on bytes does."""
    found = [run.summary() for run in runs]
    lines = [
        ["", *(f"{one['name']} ({one['max_bytes_per_step'] / 1e6:.1f} MB, {one['steps']} steps)" for one in found)]
    ]
    lines.append(["---"] * len(lines[0]))
    for label, (key, form) in ROWS.items():
        lines.append([label, *("–" if one[key] is None else format(one[key], form) for one in found)])
    held = (f"{one['memory']['before'] / 1e6:.1f}, {one['memory']['after'] / 1e6:.1f}" for one in found)
    lines.append(["bytes on the devices before and after, MB", *held])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: Path, runs: list[Run], options: argparse.Namespace) -> None:
    """Balancedness over steps: off, on, and the best for each window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    phases = [kind for _ in range(options.turns) for kind in KINDS]
    for place, kind in enumerate(phases):
        first = place * options.phase_steps
        axes.axvspan(first, first + options.phase_steps, color=("#f2f2f2", "#ffffff")[place % 2], lw=0)
        axes.text(first + options.phase_steps / 2, 1.015, kind, ha="center", va="bottom", fontsize=8, color="#555555")
    styles = {"off": ("#b0413e", "experts stay"), "on": ("#2b6ca3", "experts follow the load")}
    shown = [next(run for run in runs if run.name.startswith(name)) for name in styles]
    for run, (colour, label) in zip(shown, styles.values(), strict=True):
        steps = [one["step"] for one in run.windows]
        axes.plot(steps, [one["balancedness"] for one in run.windows], color=colour, label=label)
    best = shown[1]
    axes.plot(
        [one["step"] for one in best.windows],
        [one["best"] for one in best.windows],
        color="#666666",
        ls=":",
        label="best for each window, known beforehand",
    )
    axes.set(
        xlabel="step",
        ylabel="balancedness (mean ÷ busiest rank)",
        ylim=(0, 1.1),
        xlim=(0, len(phases) * options.phase_steps),
    )
    axes.set_title(
        f"demo, 64 + {options.redundant} experts on {options.mesh}, windows of {options.window} steps", pad=14
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=32")
    parser.add_argument("--redundant", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--phase-steps", type=int, default=1000, help="steps before the kind of text changes")
    parser.add_argument("--turns", type=int, default=1, help="how often all kinds come")
    parser.add_argument("--window", type=int, default=50, help="steps of a window of loads")
    parser.add_argument("--interval", type=int, default=350, help="steps from one decision to the next")
    parser.add_argument(
        "--bound-steps",
        type=int,
        default=80,
        help="steps of a kind of text for each bound, a decision every quarter of them",
    )
    parser.add_argument(
        "--payback",
        type=float,
        default=0.0,
        help="of the engine's options; 0 moves experts although emulated devices, which share cores, gain nothing by balance",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs off and on, by turns, with the first bound")
    parser.add_argument(
        "--bounds",
        default="",
        help="max_bytes_per_step of each engine, separated by commas; default: 3 experts (all of a rank of 32), 2 and 1",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(options.mesh)
    emulate_devices(spec.num_devices)
    one = 3 * 256 * 32 * 2 * (spec.ep_size - 1)  # what a device receives where each rank sends one expert of the demo
    bounds = [int(bound) for bound in options.bounds.split(",")] if options.bounds else [3 * one, 2 * one, one]
    runs: list[Run] = []
    for place, bound in enumerate(bounds):
        bench = Bench(options, bound)
        long = (options.phase_steps, options.interval)
        planned = [(f"{'on' if on else 'off'}-{i}", on, *long) for i in range(options.repeats) for on in (False, True)]
        short = (f"bound-{bound // one}", True, options.bound_steps, max(options.bound_steps // 4, 1))
        for given in (*(planned if place == 0 else ()), short):
            runs.append(bench.run(*given))
            print(json.dumps(runs[-1].summary()), flush=True)
        bench.close()
    print(table(runs))
    if options.json:
        found = {
            "command": " ".join(["python", "tools/bench_balancing.py", *sys.argv[1:]]),
            "runs": [run.summary() | {"windows": run.windows} for run in runs],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(options.plot, runs, options)


if __name__ == "__main__":
    main()
