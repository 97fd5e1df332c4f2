"""Hold every layout × dispatch × pair of MLA forms to the answer of one device: (15 × 5 + 2) × 6 runs of a tiny model.

Runs whose products are native (``ModelStep.is_exact``) must equal one device's to the bit: logits, tokens, log-probabilities. What
plain forms compute (``--kernels plain``) keeps a bound of float32's rounding, and the same
tokens; and one device with native kernels keeps it against one with the plain forms. Without a C++ compiler all is plain.

    python tools/check_layouts.py
    python tools/check_layouts.py dp=32 tp=8,ep=1      # these layouts only
    python tools/check_layouts.py dp=4+ep=4 --eplb     # attention on four devices, experts on four others
    python tools/check_layouts.py --serving-compilation    # with programs as `dsjax serve` compiles them
    python tools/check_layouts.py dp=32 --dispatch hierarchical --forms CC/A_CC_ME CD/CD      # and these dispatches and pairs of forms only
    python tools/check_layouts.py --speculative --no-async-scheduling      # each run four times: with and without each of the two
    python tools/check_layouts.py --eplb dp=8 dp=4,tp=2 dp=32 dp=32,ep=8    # each run twice, once with experts that move beneath it
    python tools/check_layouts.py --shared-experts-fusion                 # each run twice, once with the shared expert as a routed one
    python tools/check_layouts.py --by-data tp=8 dp=4,tp=8 # each run twice, once with --moe-dense-tp-size 1 --enable-dp-lm-head
    python tools/check_layouts.py --eplb --ep-dispatch-algorithm static     # the same, with tokens that go to the nearest copies
    python tools/check_layouts.py --eplb --skip-plain dp=8                # only the runs beneath which experts move
    python tools/check_layouts.py --eplb --skip-plain pp=3,dp=2 pp=2,tp=4 pp=2,dp=4,ep=2      # the same, at every stage
    python tools/check_layouts.py --weights nvfp4-bf16 --eplb               # with experts in FP4, held to one device with them
    python tools/check_layouts.py --kv-cache-dtype fp8 dp=8 dp=2,tp=4       # with an FP8 cache, held to one device with such a cache
    python tools/check_layouts.py --model v3.2 dp=8 tp=8   # a model with sparse attention, of which only form CD is left out
    python tools/check_layouts.py --kernels native     # with native kernels, held to one device with them, and that to plain forms
    python tools/check_layouts.py --weights fp8 --activation-scheme dynamic dp=1 dp=2,tp=2   # with FP8 activations, on one device too
    python tools/check_layouts.py --slice HEAD/77     # each 77th run, from the one on that the commit's hash chooses: what CI does
    python tools/check_layouts.py --all-options --slice 0/467   # each 467th of layouts × dispatches × forms × these options

With ``--speculative`` the MTP module drafts two tokens a row, with ``--no-async-scheduling`` each step waits for the one before, with
``--enable-dbo`` every step of two tokens or more is computed in two halves, with
``--eplb`` experts are placed anew every four steps, at least three times, on as many redundant slots as the EP group has ranks (meshes
whose devices hold all experts are left out): none of them may change a token. Layouts with attention and experts
apart have dispatch ``auto`` alone, and no ``--shared-experts-fusion``. With ``--weights fp8`` or FP4 the
model is as wide as the largest ``tp`` of these layouts asks for, and it has a layer for each stage; with ``--kv-cache-dtype fp8`` pairs of
forms that cannot read such a cache are left out, and with ``--activation-scheme dynamic`` those with ``AM_CC_ME``, which multiplies two
products ahead that others quantise between. The tests run a covering part of this; a run takes 15 to 40 s on 2 busy
cores. Exits 1 if any run differs.

Programs of tiny models are compiled without LLVM's optimisations and with another generator for fusions, which nobody serves with.
``--serving-compilation`` leaves XLA as it is for serving: 55 minutes on 2 busy cores (2026-11-23); CI runs a part with it (``.ci/run``).
"""

import argparse
import functools
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from quick_compilation import QUICK_COMPILATION, SERVING_FLAG, keep_programs

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))

from sharding.emulation import emulate_devices
from sharding.mesh import MeshSpec
from tools.sweep_slice import add_slice


class Variant(NamedTuple):
    """What each run is made with, too: how its line names it, the engine's options, and the help of the flag that asks for it."""

    name: str
    options: dict[str, Any]
    help: str


VARIANTS = {
    "--speculative": Variant(
        "speculative",
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        "speculative decoding",
    ),
    "--no-async-scheduling": Variant(
        "synchronous",
        {"async_scheduling": False},
        "steps that wait for the one before, instead of asynchronous scheduling",
    ),
    "--eplb": Variant("balanced", {"enable_eplb": True}, "experts that follow the load"),
    "--shared-experts-fusion": Variant(
        "fused", {"enable_shared_experts_fusion": True}, "the shared expert as a routed one"
    ),
    "--by-data": Variant(
        "dense and head by data",
        {"moe_dense_tp_size": 1, "enable_dp_lm_head": True},
        "--moe-dense-tp-size 1 and --enable-dp-lm-head",
    ),
    "--enable-dbo": Variant(
        "halves",
        {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2},
        "steps in two halves, from two tokens on",
    ),
    "--host-embedding": Variant(
        "embedding on the host", {"embedding_location": "host"}, "the embedding in the host's memory"
    ),
}


def main() -> int:
    """Run the sweep and print what each run found."""
    emulate_devices(32)
    keep_programs("check-layouts-")
    import numpy as np
    from layouts import (
        APART,
        DISPATCHES,
        FORMS,
        LAYOUTS,
        MODELS,
        TINY,
        References,
        answer,
        judge,
        meshes_of,
        takes,
        widths,
        write_checkpoint,
    )

    from dsjax.model.forms import reads
    from sharding.fp8 import E4M3

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"meshes; default: {' '.join(LAYOUTS + APART)}")
    parser.add_argument("--model", choices=MODELS, default="v3", help="of which tiny model; v3.2 has sparse attention")
    parser.add_argument(SERVING_FLAG, action="store_true", help="compile as dsjax serve does, instead of quickly")
    for flag, variant in VARIANTS.items():
        parser.add_argument(flag, action="store_true", help=f"each run with {variant.help} too")
    parser.add_argument(
        "--all-options", action="store_true", help=f"all of {', '.join(VARIANTS)}: 128 times as many runs"
    )
    parser.add_argument(
        "--skip-plain",
        action="store_true",
        help="of these only the runs that have all that was asked for: not the plain ones, which another sweep holds",
    )
    add_slice(parser, "runs; an N that none of 2, 3, 5 divides meets all layouts, dispatches, forms and options alike")
    parser.add_argument("--ep-dispatch-algorithm", default="dynamic", help="of the runs beneath which experts move")
    parser.add_argument("--weights", default="auto", help="as of dsjax serve, of one device too")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of dsjax serve, of one device too")
    parser.add_argument(
        "--activation-scheme", default="auto", help="as of dsjax serve, of one device too; with --weights fp8"
    )
    parser.add_argument("--kernels", default="auto", help="as of dsjax serve; one device is held to the plain forms")
    pairs = {"/".join(pair): pair for pair in FORMS}
    ways = ("auto", *DISPATCHES)  # auto: between emulated devices no method that has a name to ask for
    parser.add_argument("--dispatch", nargs="+", choices=ways, default=ways, help="these dispatches only")
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=pairs,
        default=list(pairs),
        help="these pairs of forms only: of prefill and of decode",
    )
    args = parser.parse_args()
    chosen = args.layouts or LAYOUTS + APART
    meshes = {layout: meshes_of(layout) for layout in chosen}
    specs = {layout: MeshSpec.parse(own.get("mesh") or own["attention_mesh"]) for layout, own in meshes.items()}
    apart = {
        layout: int(own["expert_mesh"].removeprefix("ep=")) for layout, own in meshes.items() if "expert_mesh" in own
    }
    ep_sizes = {layout: spec.ep_size for layout, spec in specs.items()} | apart
    with tempfile.TemporaryDirectory() as folder:
        widest = max(max(spec.tp_size, spec.etp_size) for spec in specs.values())
        layers = max(TINY["num_hidden_layers"], *(spec.pp_size for spec in specs.values()))
        fields = MODELS[args.model] | widths(args.weights, widest) | {"num_hidden_layers": layers}
        directory = write_checkpoint(Path(folder), mtp=True, **fields)
        kept = {name: getattr(args, name) for name in ("weights", "kv_cache_dtype", "activation_scheme")}
        one_device = functools.partial(answer, directory, "dp=1", "auto")
        references = References(one_device, kept, args.kernels)
        asked = [row for flag, row in VARIANTS.items() if args.all_options or getattr(args, flag[2:].replace("-", "_"))]
        variants = [
            list(itertools.compress(asked, with_it)) for with_it in itertools.product((False, True), repeat=len(asked))
        ]
        if args.skip_plain:
            variants = variants[-1:]  # with all that was asked for
        cache = E4M3 if args.kv_cache_dtype == "fp8" else np.dtype(np.float32)
        layouts = [
            (layout, dispatch, *pairs[forms])
            for layout in chosen
            for dispatch in (["auto"] if layout in apart else args.dispatch)
            for forms in args.forms
            if takes(args.model, pairs[forms])
            and all(reads(form, cache) for form in pairs[forms])
            and not (args.activation_scheme == "dynamic" and "AM_CC_ME" in pairs[forms])
        ]
        balance, fused = VARIANTS["--eplb"], VARIANTS["--shared-experts-fusion"]
        runs = [
            (run, variant)
            for run in layouts
            for variant in variants
            if not (balance in variant and ep_sizes[run[0]] == 1) and not (fused in variant and run[0] in apart)
        ]
        of, runs = len(runs), args.slice.of(runs)
        print(f"{args.slice}: {len(runs)} of {of} runs", flush=True)
        equal, exact = 0, 0
        for number, (run, variant) in enumerate(runs, 1):
            start = time.monotonic()
            name = ", ".join([" ".join(run), *(row.name for row in variant)])
            options = {option: value for row in variant for option, value in row.options.items()}
            if balance in variant:
                eplb = {"num_redundant_experts": ep_sizes[run[0]], "window_size": 4, "step_interval": 4}
                options |= {"eplb_config": eplb | {"payback": 0}}
                if run[0] not in apart:
                    options["ep_dispatch_algorithm"] = args.ep_dispatch_algorithm
            found = answer(directory, *run, kernels=args.kernels, **options, **kept)
            exact += found.exact
            reference = references.of(found, *run[2:], options)
            text = judge(found, reference, rebalances=3 if balance in variant else 0)
            equal += text == "equal"
            text += " to the bit" if found.exact and text == "equal" else ""
            print(f"{number}/{len(runs)} {name}: {text} ({time.monotonic() - start:.1f} s)", flush=True)
    print(
        f"{equal} of {len(runs)} equal to one device ({args.slice}, of {of}); {exact} of the {len(runs)} were held to its bits"
    )
    return 0 if equal == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
