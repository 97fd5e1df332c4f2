"""Plans of DeepSeek-V4: times by kind of layer, window pages in the cache, and what dsjax lacks is not credited."""

import pytest
from plan_words import plan
from step_models import step_model

from dsjax.config import load_config
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import find_engine
from dsjax.plan.layout import layouts, parse_layout
from dsjax.plan.memory import memory
from dsjax.plan.own_cluster import choose_precision
from dsjax.plan.precision import PRECISIONS
from sharding import MeshSpec

V32, FLASH, PRO = map(load_config, ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro"))
MXFP4 = find_engine("dsjax").precision(choose_precision("auto", "auto", FLASH, None))


def step(config, mesh="dp=8", precision=MXFP4):
    return step_model(config, load_cluster("h200-8"), parse_layout(mesh, 0, config), precision, shared={})


def test_a_model_whose_experts_are_packed_is_planned_as_it_is_and_ends_with_a_command_that_serves():
    assert (MXFP4.name, MXFP4.cache, MXFP4.expert_bits) == ("mxfp4", 2.0, 16)
    assert choose_precision("auto", "auto", V32, None) == PRECISIONS["fp8"]
    found = plan("--model", "deepseek-v4-flash", "--cluster", "h200-8", "--max-concurrency", "64", "--mesh", "dp=8")
    assert "--weights mxfp4" in found
    assert "--kv-cache-dtype" not in found


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_times_grow_with_the_context_and_less_than_v32s(config):
    contexts = [1, 127, 128, 129, 2048, 2052, 4096, 32_768, 131_072, 1 << 20]
    decodes = [step(config).decode(16, context) for context in contexts]
    assert decodes == sorted(decodes)
    prompts = [step(config).prefill(2048, prompt=2048, cached=context) for context in contexts]
    assert prompts == sorted(prompts)
    v32 = step(V32, precision=PRECISIONS["fp8"])
    assert decodes[-2] - decodes[0] < 0.3 * (v32.decode(16, 131_072) - v32.decode(16, 1))


def test_each_kind_of_layer_takes_its_own_time():
    model = step(FLASH)
    times = {kind: model.attention(16, 16 * 131_072.0, 131_072.0, True, kind) for kind in ("window", "hca", "csa")}
    assert times["window"] < times["hca"] < times["csa"]
    parts = model.decode_parts(16, 131_072)
    assert parts["attention"] == pytest.approx(2 * times["window"] + 20 * times["hca"] + 21 * times["csa"])
    assert parts["hyper-connections"] > 0


def test_a_request_holds_window_pages_however_short_it_is():
    held = memory(FLASH, parse_layout("dp=8", 0, FLASH), MXFP4, 141_000_000_000, 10e9)
    window = 43 * 128 * 512 * 2 + 4 * (21 * 6 * (512 + 128) + 20 * 3 * 512)
    assert held.request_bytes(0) == 3 * window
    assert held.max_batch(1) <= held.cache / (3 * window)
    # A fifth of the cache keeps window pages for prompts that are sent again.
    assert held.request_bytes(128_000) - held.request_bytes(0) == pytest.approx(128_000 * 6_880 / 0.8)


def test_layouts_divide_the_groups_of_the_output_projection():
    found = {layout.mesh.tp_size for layout in layouts(FLASH, 16, 8, redundant=0, copies=False, **MXFP4.blocks)}
    assert found == {1, 2, 4, 8}, "8 groups; heads would divide over 16"


@pytest.mark.parametrize(
    ("capability", "options"),
    [
        ("balances", {"enable_eplb": True}),
        ("overlaps", {"enable_dbo": True}),
        ("transfers", {"disaggregation_mode": "decode"}),
        ("drafts", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
        ("fp8_cache", {"kv_cache_dtype": "fp8"}),
        ("apart", {"attention_mesh": "dp=2", "expert_mesh": "ep=2"}),
    ],
)
def test_what_a_plan_does_not_credit_is_what_an_engine_refuses(capability, options):
    args = EngineArgs(model="deepseek-v4-flash", page_size=128, **{"mesh": "dp=2"} | options)
    spec = MeshSpec.parse("dp=2")
    try:
        refused = make_step(args, FLASH, spec, spec.build(), mtp=args.speculation is not None).attention is None
    except UserError:
        refused = True
    credited = getattr(find_engine("dsjax").serving(FLASH), capability)
    assert bool(credited) == (not refused)


def test_other_engines_are_credited_with_what_they_publish():
    assert find_engine("published").serving(FLASH) == find_engine("published")
    assert find_engine("dsjax").serving(FLASH).of_models == " of a deepseek_v4 model", "for the note on its kernels"
    assert find_engine("dsjax").serving(V32) == find_engine("dsjax")
