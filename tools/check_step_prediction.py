"""Does the planner, given module times of this machine, predict the engine's steps on it?

    python tools/check_step_prediction.py
    python tools/check_step_prediction.py --rounds 20 --json check.json --decode 1:200,8:900,16:400 --prefill 256:0
    python tools/check_step_prediction.py --drafts 2        # decode steps that verify two drafts and make two

Times the demo model's modules (as `dsjax bench modules` does) and its engine's own steps (`MeshExecutor.launch` and `collect` on real text,
behind a cache that was filled with real text) in one run, in turns, because a machine's speed drifts; then asks the planner
(`dsjax plan --measured`) for each step. Decode steps are rows:context, prefill launches tokens:cached. Nothing is fitted to the
steps; most of them lie between the sizes at which modules are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.engine.contract.commands import (
    TOKEN_MADE,
    Admission,
    PageChange,
    PrefillRow,
    RankStep,
    Sampling,
    Step,
    int32s,
)
from sharding.emulation import emulate_devices

PAGE = 16
ROOM = 64
"""Tokens that a decode may move on by while it is timed: less than what makes attention read another block."""
NOT_IN_A_STEP = ("fp8", "product", "dispatch")  # of one device


@dataclass
class EngineStep:
    """A step of the engine that can be run again and again, and the one that first gives slots to its requests.

    A decode's rows move on in each run, by a token or by its accepted drafts too, at most by `ROOM` from where they were admitted.
    """

    rows: int
    chunk: int
    cached: int
    drafts: int
    admission: Step
    step: Step
    samples: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name the step in the table."""
        if self.chunk == 1:
            drafted = f", {self.drafts} drafts" if self.drafts else ""
            return f"decode {self.rows} rows, {self.cached} cached{drafted}"
        return f"prefill {self.chunk} tokens, {self.cached} cached"

    def sample(self, executor, least: float = 0.03) -> None:
        """Mean seconds over as many executions as take `least`, after one that is not timed."""
        run(executor, self.admission)
        started, count = time.perf_counter(), 0
        while count == 0 or (time.perf_counter() - started < least and count < ROOM // (1 + self.drafts) - 1):
            run(executor, self.step)
            count += 1
        self.samples.append((time.perf_counter() - started) / count)


def run(executor, step: Step) -> None:
    """Execute a step, and wait for it."""
    executor.collect(executor.launch(step))


def text_tokens(llm, count: int) -> list[int]:
    """Tokens of this project's own Python source."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[1].glob("dsjax/**/*.py")))
    found = llm.tokenizer.encode(text)
    return (found * (count // len(found) + 1))[:count]


def engine_step(llm, rows: int, chunk: int, cached: int, drafts: int) -> EngineStep:
    """Requests with `cached` positions of real text in the cache, and a step for the next `chunk` tokens of each."""
    executor, length = llm.executor, cached + chunk
    pages = -(-(length + ROOM) // PAGE)
    text = text_tokens(llm, rows * length)
    tokens = [text[row * length : (row + 1) * length] for row in range(rows)]
    admissions = [Admission(slot, cached, own[cached], Sampling(length, 0)) for slot, own in enumerate(tokens)]
    tables = [PageChange(slot, 0, list(range(1 + slot * pages, 1 + (slot + 1) * pages))) for slot in range(rows)]

    def prefill(slot: int, start: int, end: int) -> PrefillRow:
        following = tokens[slot][end] if end < length else TOKEN_MADE
        return PrefillRow(slot, start, int32s(tokens[slot][start:end]), following, pages * PAGE)

    given = (admissions, tables)
    for start in range(0, cached, executor.limits.max_chunk):
        for slot in range(rows):
            part = prefill(slot, start, min(start + executor.limits.max_chunk, cached))
            run(executor, Step([RankStep(*given, b"", [part], [])]))
            given = ([], [])
    decodes = int32s(value for slot in range(rows) for value in (slot, pages * PAGE)) if chunk == 1 else b""
    prefills = [] if chunk == 1 else [prefill(slot, cached, length) for slot in range(rows)]
    drafts = drafts if chunk == 1 else 0
    first, again = (
        Step([RankStep(*own, decodes, prefills, [])], drafts, drafts) for own in ((admissions, tables), ([], []))
    )
    return EngineStep(rows, chunk, cached, drafts, first, again)


def prepare_modules(llm, args):
    """The setting and its cases, compiled and warm."""
    from dsjax.bench.modules.grid import cases
    from dsjax.bench.modules.options import MODULES, ModelOptions, ModuleGrid
    from dsjax.bench.modules.setting import make_setting

    setting = make_setting(ModelOptions(model=args.model, max_model_len=llm.executor.limits.max_model_len))
    grid = ModuleGrid(
        only=",".join(name for name in MODULES if name not in NOT_IN_A_STEP),
        tokens=args.tokens,
        contexts=args.contexts,
        forms="CC,A_CC_ME",
        drafts=args.drafts,
    )
    chosen = [case for case in cases(setting, grid) if is_needed(case)]
    prepared = []
    for number, case in enumerate(chosen, 1):
        print(f"\rpreparing {number}/{len(chosen)} {case.title:60}", end="", file=sys.stderr, flush=True)
        made = case.build()
        made.warm_up()
        prepared.append((case, made))
    print("\r" + " " * 80, end="\r", file=sys.stderr)
    return setting, prepared


def is_needed(case) -> bool:
    """The engine's own forms in their own phase, and its embedding."""
    if case.module == "attention":
        return case.variant in ("A_CC_ME decode", "A_CC_ME verify", "CC prefill") and (
            case.sizes["chunk"] in (1, 64, 256) or "verify" in case.variant
        )
    return case.module != "embedding" or case.variant == "device"


def predictions(setting, rows, device, ceilings, steps, args):
    """The planner's figure for each step, and the file that it was given."""
    from dsjax.bench.modules.report import to_json
    from dsjax.bench.modules.run import ModuleResults
    from dsjax.plan.figure import spread
    from dsjax.plan.layout import parse_layout
    from dsjax.plan.measured import Measured
    from dsjax.plan.measured_step import MeasuredStep
    from dsjax.plan.own_cluster import choose_precision, find_cluster

    command = shlex.join(["python", *sys.argv])
    body = to_json(ModuleResults(rows), setting, args.model, ceilings, device, command)
    measured = Measured("this run", body)
    cluster = find_cluster("this-machine", measured)
    layout = parse_layout("dp=1", 0, setting.config)
    model = MeasuredStep(setting.config, cluster, layout, choose_precision("auto", "auto", measured), measured=measured)
    found = []
    for step in steps:

        def compute(step=step):
            fresh = dataclasses.replace(model, shared={})
            if step.chunk == 1:
                return [fresh.decode(step.rows, step.cached, drafts=step.drafts)]
            return [fresh.prefill(step.rows * step.chunk, prompt=step.chunk, cached=step.cached)]

        if step.chunk == 1:
            parts = model.decode_parts(step.rows, step.cached, drafts=step.drafts)
        else:
            parts, _ = model.prefill_parts(step.rows * step.chunk, prompt=step.chunk, cached=step.cached)
        found.append((spread(compute)[0], parts))
    return found, body


def main() -> int:
    """Measure, predict, print; 1 where a prediction is off by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--decode", default="1:200,8:900,16:400,64:300,128:150", help="rows:context, …")
    parser.add_argument("--prefill", default="256:0,256:512", help="tokens:cached, …")
    parser.add_argument("--drafts", type=int, default=0, help="that each decode row verifies, and makes")
    parser.add_argument("--tokens", default="1,4,32,128,256", help="at which modules are timed")
    parser.add_argument("--contexts", default="0,128,1024", help="at which attention is timed")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bound", type=float, default=0.15)
    parser.add_argument("--json", help="write predictions, samples and the modules' file here")
    parser.add_argument("--parts", action="store_true", help="print each prediction's parts")
    args = parser.parse_args()
    emulate_devices(1)

    from dsjax import LLM
    from dsjax.bench.modules.ceilings import Device, find_ceilings
    from dsjax.bench.modules.run import ModuleRow
    from dsjax.bench.modules.timing import DROWNED, Budget

    wanted = [(*map(int, pair.split(":")), True) for pair in args.decode.split(",")]
    wanted += [(*map(int, pair.split(":")), False) for pair in args.prefill.split(",")]
    shapes = [(first, 1, second) if decode else (1, first, second) for first, second, decode in wanted]
    most = max(rows for rows, _, _ in shapes)
    tokens = max(rows * (-(-(chunk + cached + ROOM) // PAGE) + 1) * PAGE for rows, chunk, cached in shapes)
    speculation = {"method": "mtp", "num_speculative_tokens": args.drafts} if args.drafts else None
    llm = LLM(
        args.model,
        max_num_seqs=most,
        cache_tokens=tokens,
        max_num_batched_tokens=max(2048, most),
        speculative_config=speculation,
    )
    setting, prepared = prepare_modules(llm, args)
    device = Device.of(setting.step.mesh.devices.flat[0])
    ceilings = find_ceilings(setting, device, None, Budget())
    steps = [engine_step(llm, *shape, args.drafts) for shape in shapes]
    for step in steps:
        # The steps share the cache's pages; a row may attend to another step's text, which takes as long.
        for _ in range(2):
            run(llm.executor, step.admission)
    for turn in range(args.rounds):
        print(f"\rround {turn + 1}/{args.rounds}", end="", file=sys.stderr, flush=True)
        for index, (_, made) in enumerate(prepared):
            made.sample()
            # Steps are spread over the round, so that both see the same minutes.
            if index % max(1, len(prepared) // len(steps)) == 0 and index // max(1, len(prepared) // len(steps)) < len(
                steps
            ):
                steps[index // max(1, len(prepared) // len(steps))].sample(llm.executor)
    print("\r" + " " * 40, end="\r", file=sys.stderr)
    rows = []
    for case, made in prepared:
        times = made.times()
        if times.stand_out:
            rows.append(ModuleRow(case, times, made.in_device_loop))
        else:
            print(f"left out: {case.title}: {DROWNED}", file=sys.stderr)
    figures, body = predictions(setting, rows, device, ceilings, steps, args)
    return show(steps, figures, body, args)


def show(steps, figures, body, args) -> int:
    """The table; the JSON; 1 where the bound is missed."""
    print(
        f"{body['device']['name']}; {body['date']}; JAX {body['versions']['jax']}; {args.model}, {body['weights']} weights"
    )
    print(
        f"modules at tokens {args.tokens}, contexts {args.contexts}; {args.rounds} rounds; {args.decode}; {args.prefill}"
    )
    print(f"{'step':34} {'measured ms':>22} {'predicted ms':>26} {'error':>8}")
    errors = []
    for step, (figure, parts) in zip(steps, figures, strict=True):
        median, low, high = statistics.median(step.samples), min(step.samples), max(step.samples)
        errors.append(figure / median - 1)
        measured = f"{median * 1e3:.2f} [{low * 1e3:.2f}–{high * 1e3:.2f}]"
        predicted = f"{figure * 1e3:.2f} [{figure.low * 1e3:.2f}–{figure.high * 1e3:.2f}]"
        print(f"{step.name:34} {measured:>22} {predicted:>26} {errors[-1]:>+8.1%}")
        for name, seconds in parts.items() if args.parts else ():
            print(f"      {name:30} {seconds * 1e3:8.3f}")
    mean = statistics.mean(map(abs, errors))
    worst = max(map(abs, errors))
    print(
        f"mean absolute error {mean:.1%}, largest {worst:.1%}; bound {args.bound:.0%}: {'held' if worst <= args.bound else 'missed'}"
    )
    if args.json:
        found = [
            {"step": s.name, "samples_s": s.samples, "predicted_s": f[0].to_json(), "error": e}
            for s, f, e in zip(steps, figures, errors, strict=True)
        ]
        Path(args.json).write_text(json.dumps({"steps": found, "modules": body}, indent=1) + "\n", encoding="utf-8")
    return int(worst > args.bound)


if __name__ == "__main__":
    sys.exit(main())
