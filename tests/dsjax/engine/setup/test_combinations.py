"""Which options exclude or need others: every row of the tables of `setup/combinations.py` is refused. docs/option-conflicts.csv has them:

python tests/dsjax/engine/setup/test_combinations.py > docs/option-conflicts.csv
"""

import csv
import sys
from pathlib import Path

import pytest

from dsjax.engine.setup import combinations
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.combinations import EXCLUSIONS, FAMILIES, NEEDS, Choice, check_against, check_combinations
from dsjax.errors import UserError
from sharding.dispatch import Method

APART = {"attention_mesh": "dp=8", "expert_mesh": "ep=8"}
DISK = {"disk_cache": "pages", "disk_cache_bytes": 1 << 30}
MADE = {
    "stages (--mesh pp=…)": {"mesh": "pp=2"},
    "--num-processes and --coordinator-address": {"num_processes": 2},
    "the MLA form CD": {"mla_prefill": "CD"},
    "--no-enable-prefix-caching": {"enable_prefix_caching": False},
    "--expert-mesh without --afd-role attention": APART,
    "--enable-eplb with stages (--mesh pp=…)": {"enable_eplb": True, "mesh": "pp=2,dp=2"},
    "--disaggregation-mode prefill": {"disaggregation_mode": "prefill"},
    "--afd-role expert": {"afd_role": "expert"},
    "--prefill-mesh": {"prefill_mesh": "dp=2", "decode_mesh": "dp=2"},
    "--expert-mesh": APART,
    "--disk-cache": DISK,
    "--kv-events-config": {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/events"}},
    "a class given as dispatch or MLA form": {"dispatch": Method},
    "router": {"router": Method},
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--tokenizer-mode with an encoder": {"tokenizer_mode": "deepseek_v4"},
}
"""Options of each choice that takes more than its own option with a value of `VALUES`."""
VALUES = {
    "attention_mesh": "dp=8", "expert_mesh": "ep=8", "prefill_mesh": "dp=2", "decode_mesh": "dp=2", "mesh": "dp=3",
    "afd_address": "127.0.0.1:7000", "afd_server_rank": 0, "afd_role": "attention", "num_afd_stages": 3,
    "disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl", "prefill_config": {"max_num_seqs": 2},
    "disk_cache": "pages", "disk_cache_bytes": 1 << 30, "eplb_config": {"window_size": 10}, "batch_invariant": True,
    "ep_dispatch_algorithm": "static", "dispatch": "padded", "enable_shared_experts_fusion": True, "mla_prefill": "A_CC",
    "mla_decode": "A_CC", "index_scores": "fp8", "compile_ahead": 2,
}  # fmt: skip


def making(choice: Choice, made=MADE) -> dict:
    """Return the options that make a choice. made: options of choices that take more than their own."""
    if choice.text in made:
        return made[choice.text]
    name = choice.text.removeprefix("--").replace("-", "_")
    number = isinstance(getattr(EngineArgs, name), int) or name in ("moe_chunk_tokens", "devices_per_host")
    return {name: VALUES.get(name, 2 if number else "some")}


@pytest.mark.parametrize("pair", EXCLUSIONS, ids=lambda pair: f"{pair.one} and {pair.other}")
def test_choices_that_exclude_each_other_are_refused_with_the_reason(pair, monkeypatch):
    monkeypatch.setattr(combinations, "EXCLUSIONS", (pair,))  # options for one pair may break another row too
    family = next((name for name, choice in FAMILIES.items() if choice is pair.other), "deepseek_v3")
    options = (making(pair.other) if family == "deepseek_v3" else {}) | making(pair.one)
    if pair.one is combinations.LOCAL_EXPERTS:
        options |= {"afd_role": "both"}
    with pytest.raises(UserError) as refused:
        check_against(EngineArgs(**options), FAMILIES.get(family))
    assert str(refused.value).startswith(f"{pair.one} does not go with {pair.other}: {pair.reason}; ")


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.one} and {need.other}")
def test_choices_without_what_they_need_are_refused(need, monkeypatch):
    monkeypatch.setattr(combinations, "NEEDS", (need,))
    alone = {text: options for text, options in MADE.items() if text.removeprefix("--").replace("-", "_") not in VALUES}
    with pytest.raises(UserError, match=rf"^{need.one} is given without ") as refused:
        EngineArgs(**making(need.one, alone))
    assert f"without {need.other}; " in str(refused.value)


def test_what_neither_table_names_goes_together():
    check_combinations(EngineArgs(**DISK, host_cache_bytes=1000, compile_ahead=0))
    EngineArgs(**APART, afd_role="attention", afd_address="127.0.0.1:7000", num_processes=2)
    for side in ("prefill", "decode"):
        assert EngineArgs(disaggregation_mode=side, enable_eplb=True).eplb is not None
    EngineArgs(disaggregation_mode="decode", host_cache_bytes=1)
    stages = EngineArgs(mesh="pp=2,dp=2", pp_layer_partition="3,2", num_processes=2, host_cache_bytes=1000)
    assert stages.num_devices == 4
    assert EngineArgs(**stages.executor_options | {"num_processes": 2}) == stages


def conflicts() -> list[list[str]]:
    """The rows of docs/option-conflicts.csv: options, how they relate to another one, why, and what to do instead."""
    rows = [["option", "rule", "other", "why", "instead"]]
    rows += [[str(one), "excludes", str(other), why, instead] for one, other, why, instead in EXCLUSIONS]
    return rows + [[str(need.one), "needs", str(need.other), "", ""] for need in NEEDS]


def test_the_table_in_the_docs_has_every_row():
    with (Path(__file__).parents[4] / "docs" / "option-conflicts.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == conflicts(), __doc__


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows(conflicts())
