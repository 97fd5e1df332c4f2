"""Write the Grafana dashboard from the table of panels below.

    python tools/make_dashboard.py

A dashboard is a thousand lines of JSON of which ten lines a panel differ; those stand here.
"""

import argparse
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "configs" / "observability" / "grafana-dashboard.json"

OF_MODEL = 'model_name="$model_name"'
RATE = "[$__rate_interval]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 7

Query = tuple[str, str]
"""(PromQL, legend)."""


def rate(metric: str, by: str = "", more: str = "") -> str:
    """The rate of a counter, summed, or summed by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{{OF_MODEL}{more}}}{RATE}))"


def quantiles(metric: str) -> list[Query]:
    """P50, P90, P99 and the mean of a histogram."""
    buckets = rate(f"{metric}_bucket", "le")
    found = [(f"histogram_quantile({share}, {buckets})", name) for name, share in QUANTILES.items()]
    return [*found, (f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}", "mean")]


QUANTILES = {"P50": 0.5, "P90": 0.9, "P99": 0.99}


def gauge(metric: str, function: str = "sum", more: str = "") -> str:
    """A gauge over all ranks."""
    return f"{function} ({metric}{{{OF_MODEL}{more}}})"


def by_rank(metric: str) -> list[Query]:
    """A gauge of each rank."""
    return [(f"{metric}{{{OF_MODEL}}}", "rank {{engine}}")]


LOST = "rate(dsjax_link_segments_retransmitted_total[1h]) / (rate(dsjax_link_segments_total[1h]) > 0)"
"""Share of a link's packets that were lost; an hour of probes has some thousand."""


# Row title to panels: (title, what it means, unit, queries).
ROWS: dict[str, list[tuple[str, str, str, list[Query]]]] = {
    "Work": [
        (
            "Requests",
            "In slots of the ranks, and in their queues.",
            "short",
            [(gauge("vllm:num_requests_running"), "running"), (gauge("vllm:num_requests_waiting"), "waiting")],
        ),
        (
            "Tokens a second",
            "Made, and of prompts whose first token was made.",
            "short",
            [(rate("vllm:generation_tokens_total"), "made"), (rate("vllm:prompt_tokens_total"), "of prompts")],
        ),
        (
            "Ends a second",
            "Completions that ended, by reason, and those that ended with an error by its kind; abort: the client went away.",
            "short",
            [
                (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
                (rate("dsjax_requests_failed_total", "error"), "{{error}}"),
            ],
        ),
        (
            "Turned away a second",
            "Before the engine saw them.",
            "short",
            [(rate("dsjax_requests_rejected_total", "reason"), "{{reason}}")],
        ),
        (
            "Answers a second",
            "By class of status.",
            "short",
            [(f"sum by (status) (rate(http_requests_total{RATE}))", "{{status}}")],
        ),
        (
            "Troubles",
            "All but preemptions, which do work twice, must stay 0; a failure of background work cost that work alone.",
            "short",
            [
                (gauge("dsjax_compilations_after_warm_up_total"), "compiled after warm-up"),
                (gauge("vllm:corrupted_requests_total"), "not finite"),
                (gauge("vllm:num_preemptions_total"), "preemptions"),
                (gauge("dsjax_background_failures_total"), "background work failed"),
            ],
        ),
    ],
    "Latency": [
        ("Time to first token", "From arrival.", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Between two tokens", "Of one completion.", "s", quantiles("vllm:inter_token_latency_seconds")),
        (
            "Time per output token",
            "A completion's mean after its first token.",
            "s",
            quantiles("vllm:request_time_per_output_token_seconds"),
        ),
        ("End to end", "From arrival to the end.", "s", quantiles("vllm:e2e_request_latency_seconds")),
        (
            "Where the time goes",
            "Mean of queue, prefill and decode: together the end-to-end time.",
            "s",
            [
                (
                    f"{rate(f'vllm:request_{part}_time_seconds_sum')} / {rate(f'vllm:request_{part}_time_seconds_count')}",
                    part,
                )
                for part in ("queue", "prefill", "decode")
            ],
        ),
        (
            "First token by rank",
            "P90; a rank that stands out has too much to do.",
            "s",
            [
                (
                    f"histogram_quantile(0.9, {rate('vllm:time_to_first_token_seconds_bucket', 'le, engine')})",
                    "rank {{engine}}",
                )
            ],
        ),
    ],
    "Ranks and cache": [
        (
            "Running by rank",
            "Every rank waits for the slowest in each step.",
            "short",
            by_rank("vllm:num_requests_running"),
        ),
        ("Waiting by rank", "In its queue.", "short", by_rank("vllm:num_requests_waiting")),
        (
            "Cache held by rank",
            "Share of the pages that requests hold.",
            "percentunit",
            by_rank("vllm:kv_cache_usage_perc"),
        ),
        (
            "Pages",
            "Over all ranks; cached pages are given up when room is needed.",
            "short",
            [
                (gauge("dsjax_rank_pages"), "all"),
                (gauge("dsjax_rank_pages_used"), "held"),
                (gauge("dsjax_rank_pages_cached"), "cached"),
            ],
        ),
        (
            "Memory of the devices",
            "Share in use; on a CPU of the host's, by this process.",
            "percentunit",
            [
                (
                    f"dsjax_device_memory_used_bytes{{{OF_MODEL}}} / dsjax_device_memory_limit_bytes{{{OF_MODEL}}}",
                    "{{device}}",
                )
            ],
        ),
        (
            "Prefix hits",
            "Share of prompt tokens found in the prefix cache.",
            "percentunit",
            [(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "hits")],
        ),
        (
            "Host memory's pages",
            "Share in use of the room that --host-cache-bytes gives.",
            "percentunit",
            [(f"{gauge('dsjax_rank_host_pages_used')} / {gauge('dsjax_rank_host_pages')}", "used")],
        ),
        (
            "Pages to and from host memory",
            "A second, with --host-cache-bytes: of the latent cache, stored when their room was needed, and fetched again.",
            "short",
            [(rate(f"dsjax_rank_host_pages_{what}_total"), what) for what in ("stored", "fetched", "evicted")],
        ),
        (
            "Prefix hits by tier",
            "Of the prompt tokens that were looked for in the cache, those that the devices, host memory and the disk had.",
            "percentunit",
            [
                (
                    rate("dsjax_prefix_cache_hits_total", more=f',tier="{tier}"')
                    + f" / {rate('vllm:prefix_cache_queries_total')}",
                    tier,
                )
                for tier in ("device", "host", "disk")
            ],
        ),
        (
            "Bytes by tier",
            "Of pages that hold tokens; dashed: room.",
            "bytes",
            [
                (f"sum by (tier) (dsjax_cache_tier_bytes{{{OF_MODEL}}})", "{{tier}}"),
                (f"sum by (tier) (dsjax_cache_tier_limit_bytes{{{OF_MODEL}}})", "{{tier}}, room"),
            ],
        ),
        (
            "Waiting for pages",
            "Of requests, for pages of host memory, the disk and prefill engines.",
            "s",
            [
                (
                    f"histogram_quantile({share}, {rate('dsjax_cache_fetch_seconds_bucket', 'le, tier')})",
                    "{{tier}}, " + name,
                )
                for name, share in QUANTILES.items()
            ],
        ),
        (
            "Pages to and from the disk",
            "A second, with --disk-cache; what was not written was lost because the disk was too slow.",
            "short",
            [
                *(
                    (rate(f"dsjax_disk_pages_{what}_total"), what.replace("_", " "))
                    for what in ("stored", "fetched", "evicted", "not_written")
                ),
                (gauge("dsjax_disk_pages_writing"), "on their way"),
            ],
        ),
        (
            "The disk",
            "Share in use of the room that --disk-cache-bytes gives; failures a second.",
            "short",
            [
                (f"{gauge('dsjax_disk_pages_used')} / {gauge('dsjax_disk_pages')}", "used"),
                (rate("dsjax_disk_failures_total", by="operation"), "{{operation}}"),
            ],
        ),
        (
            "Prompts computed elsewhere",
            "With prefill apart from decode: pages that came from prefill engines, a second; prompts of which all came, and of which "
            "decode computed the rest.",
            "short",
            [
                (rate("dsjax_transfer_pages_total"), "pages"),
                (rate("dsjax_transfers_total", by="outcome"), "{{outcome}}"),
                (gauge("dsjax_transfers_under_way"), "under way"),
                (f"{gauge('dsjax_transfer_landed_bytes')} / 1e6", "MB landed"),
            ],
        ),
        (
            "External prefix hits",
            "Share of the prompt tokens that the devices did not have and a tier below had; vLLM's names.",
            "percentunit",
            [
                (
                    f"{rate('vllm:external_prefix_cache_hits_total')} / {rate('vllm:external_prefix_cache_queries_total')}",
                    "hits",
                )
            ],
        ),
        (
            "Cost by rank",
            "In tokens; a new request goes where it is lowest.",
            "short",
            [*by_rank("dsjax_rank_cost"), (gauge("dsjax_rank_waiting_tokens"), "tokens waiting, all")],
        ),
    ],
    "Steps": [
        ("Step", "From planning to entering results.", "s", quantiles("dsjax_step_seconds")),
        (
            "Engine thread",
            "Seconds a second in each part of a step; device is waiting for results.",
            "s",
            [(rate("dsjax_host_seconds_total", "part"), "{{part}}")],
        ),
        (
            "Time in exchanges",
            "Share of the devices' time in operations that collectives took, waiting for the last device included: of the last "
            "profile, by POST /start_profile and /stop_profile. No value before the first.",
            "percentunit",
            [(f"dsjax_exchange_time_share{{{OF_MODEL}}}", "share")],
        ),
        (
            "Tokens in steps",
            "Rows computed a second; padding is computed for nothing.",
            "short",
            [(rate("dsjax_step_tokens_total", "kind"), "{{kind}}")],
        ),
        ("Tokens of a step", "Over all ranks, padding not counted.", "short", quantiles("vllm:iteration_tokens_total")),
        (
            "Prompt length",
            "Tokens; and those that the prefix cache did not hold.",
            "short",
            [
                *quantiles("vllm:request_prompt_tokens")[:2],
                (
                    f"histogram_quantile(0.5, {rate('vllm:request_prefill_kv_computed_tokens_bucket', 'le')})",
                    "computed, P50",
                ),
            ],
        ),
        (
            "Output length",
            "Tokens made; and the most that could have been.",
            "short",
            [
                *quantiles("vllm:request_generation_tokens")[:2],
                (f"histogram_quantile(0.5, {rate('vllm:request_params_max_tokens_bucket', 'le')})", "max_tokens, P50"),
            ],
        ),
    ],
    "Speculative decoding (where the server drafts)": [
        (
            "Acceptance",
            "Share of the drafted tokens that were accepted.",
            "percentunit",
            [
                (
                    f"{rate('vllm:spec_decode_num_accepted_tokens_total')} / {rate('vllm:spec_decode_num_draft_tokens_total')}",
                    "accepted",
                )
            ],
        ),
        (
            "Acceptance by position",
            "Of the rows that had drafts, the share whose draft at this place was accepted; 0 is the first.",
            "percentunit",
            [
                (
                    f"{rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position')} / "
                    f"scalar({rate('vllm:spec_decode_num_drafts_total')})",
                    "position {{position}}",
                )
            ],
        ),
        (
            "Tokens of a row",
            "Tokens that a row with drafts made, the one behind the accepted drafts included; and tokens drafted a second.",
            "short",
            [
                (
                    f"1 + {rate('vllm:spec_decode_num_accepted_tokens_total')} / {rate('vllm:spec_decode_num_drafts_total')}",
                    "tokens a row",
                ),
                (rate("vllm:spec_decode_num_draft_tokens_total"), "drafted a second"),
            ],
        ),
    ],
    "Experts (while recording)": [
        (
            "Balancedness",
            "Mean over max of the EP ranks' tokens since recording began: ratio of sums over layers, and mean of the layers' ratios. "
            "1 is perfect.",
            "percentunit",
            [(f"dsjax_expert_balancedness{{{OF_MODEL}}}", "{{of}}")],
        ),
        (
            "Tokens by device",
            "Share of all expert tokens.",
            "percentunit",
            [
                (
                    f"{rate('dsjax_expert_tokens_total', 'ep_rank')} / scalar({rate('dsjax_expert_tokens_total')})",
                    "ep rank {{ep_rank}}",
                )
            ],
        ),
        (
            "Hottest experts",
            "Times the mean of all physical experts.",
            "short",
            [
                (
                    f"topk(8, {rate('dsjax_expert_tokens_total', 'expert')}) / "
                    f"scalar(avg ({rate('dsjax_expert_tokens_total', 'expert')}))",
                    "expert {{expert}}",
                )
            ],
        ),
        ("Dispatch", "Sent by all devices.", "Bps", [(rate("dsjax_dispatch_bytes_total"), "bytes a second")]),
        (
            "Rows sent by device",
            "A second; a device far above the others holds them up.",
            "short",
            [(rate("dsjax_dispatch_rows_total", "device"), "device {{device}}")],
        ),
        (
            "Padding of dispatch, rounds",
            "Share of the exchanged rows without a token; rounds a second, of the layer with most.",
            "short",
            [
                (f"dsjax_dispatch_padding_share{{{OF_MODEL}}}", "padding share"),
                (rate("dsjax_dispatch_rounds_total"), "rounds"),
            ],
        ),
    ],
    "Experts that follow the load (with --enable-eplb)": [
        (
            "Balancedness",
            "Mean over max of the EP ranks' tokens in the last window: ratio of sums over layers, and mean of the layers' ratios.",
            "percentunit",
            [(f"dsjax_eplb_balancedness{{{OF_MODEL}}}", "{{of}}")],
        ),
        (
            "Tokens by rank",
            "Times the mean rank, in the last window.",
            "short",
            [
                (
                    f"dsjax_eplb_rank_tokens{{{OF_MODEL}}} / scalar(avg(dsjax_eplb_rank_tokens{{{OF_MODEL}}}))",
                    "ep rank {{ep_rank}}",
                )
            ],
        ),
        (
            "Rebalances",
            "A minute, and those that were given up; layers that the one under way has still to change.",
            "short",
            [
                (f"60 * {rate('dsjax_eplb_rebalances_total')}", "rebalances a minute"),
                (f"60 * {rate('dsjax_eplb_failures_total')}", "given up a minute"),
                (f"60 * {rate('dsjax_eplb_windows_total')}", "windows a minute"),
                (f"60 * {rate('dsjax_eplb_layers_changed_total')}", "layers changed a minute"),
                (f"60 * {rate('dsjax_eplb_experts_moved_total')}", "experts moved a minute"),
                (f"60 * {rate('dsjax_eplb_exchanges_total')}", "exchanges a minute"),
                (f"dsjax_eplb_layers_left{{{OF_MODEL}}}", "layers left"),
            ],
        ),
        (
            "Moved",
            "Bytes of experts that were written to another slot, over the devices of an EP group.",
            "Bps",
            [(rate("dsjax_eplb_moved_bytes_total"), "bytes a second")],
        ),
        (
            "Time in exchanges",
            "Share of the time in which experts were moved and no step computed.",
            "percentunit",
            [
                (rate("dsjax_eplb_exchange_seconds_total"), "in exchanges"),
                (rate("dsjax_eplb_rebalance_seconds_total"), "from decisions to the last layer"),
            ],
        ),
    ],
    "The mesh, where it can change": [
        (
            "Devices and processes",
            "Of the mesh; fewer than were wanted after a loss.",
            "short",
            [
                (f"dsjax_generation_devices{{{OF_MODEL}}}", "devices"),
                (f"dsjax_generation_devices_wanted{{{OF_MODEL}}}", "devices wanted"),
                (f"dsjax_generation_processes{{{OF_MODEL}}}", "processes"),
            ],
        ),
        (
            "Changes",
            "Number of the mesh, from 0; changes so far by reason; 1 while no step computes, as the mesh is changed.",
            "short",
            [
                (f"dsjax_generation{{{OF_MODEL}}}", "number"),
                (f"sum by (reason) (dsjax_generation_changes_total{{{OF_MODEL}}})", "{{reason}}"),
                (f"dsjax_generation_changing{{{OF_MODEL}}}", "changing"),
            ],
        ),
        (
            "Time in changes",
            "Share of the time, in which no step computed.",
            "percentunit",
            [(rate("dsjax_generation_change_seconds_total"), "changing")],
        ),
        (
            "Requests that wait for a larger mesh",
            "That the mesh cannot hold; and of those that have waited, a minute, what came of it.",
            "short",
            [
                (gauge("dsjax_requests_waiting_for_mesh"), "waiting"),
                (f"60 * {rate('dsjax_requests_waited_for_mesh_total', 'outcome')}", "{{outcome}} a minute"),
            ],
        ),
        (
            "Weights of changed meshes",
            "Where they came from.",
            "Bps",
            [(rate("dsjax_generation_weight_bytes_total", "source"), "{{source}}")],
        ),
        (
            "Programs compiled ahead",
            "For the meshes that may come next, by process 0.",
            "short",
            [
                (f"dsjax_compile_ahead_programs_done{{{OF_MODEL}}}", "done"),
                (f"dsjax_compile_ahead_programs_wanted{{{OF_MODEL}}}", "wanted"),
            ],
        ),
    ],
    "Processes with experts (with --afd-address)": [
        (
            "Connected",
            "1 for each process that the attention side is connected to; steps wait while one is not.",
            "short",
            [(f"dsjax_expert_process_connected{{{OF_MODEL}}}", "{{instance}} to process {{expert_process}}")],
        ),
        (
            "Losses",
            "Connections that ended under a call, in an hour.",
            "short",
            [
                (
                    f"increase(dsjax_expert_process_losses_total{{{OF_MODEL}}}[1h])",
                    "{{instance}} to process {{expert_process}}",
                )
            ],
        ),
        (
            "Last gap",
            "From the last end of a connection to the answer of the call that met it: no step ended meanwhile.",
            "s",
            [(f"dsjax_expert_process_last_gap_seconds{{{OF_MODEL}}}", "{{instance}} to process {{expert_process}}")],
        ),
        (
            "Rows and answers",
            "That go to the processes and come from them.",
            "Bps",
            [
                (rate("dsjax_expert_process_sent_bytes_total", "expert_process"), "to process {{expert_process}}"),
                (
                    rate("dsjax_expert_process_received_bytes_total", "expert_process"),
                    "from process {{expert_process}}",
                ),
            ],
        ),
        (
            "Calls",
            "For the experts of a layer, answered a second, as the attention side and as the process counts them.",
            "short",
            [
                (rate("dsjax_expert_process_calls_total", "expert_process"), "of process {{expert_process}}"),
                (
                    f"sum by (expert_process) (rate(dsjax_experts_calls_total{RATE}))",
                    "process {{expert_process}} itself",
                ),
            ],
        ),
        (
            "In the processes",
            "1 for each that answers; connections of attention sides and of other processes; rows of tokens a second.",
            "short",
            [
                ("dsjax_experts_ready", "process {{expert_process}} ready"),
                ("dsjax_experts_connections", "process {{expert_process}}, connections"),
                (f"sum by (expert_process) (rate(dsjax_experts_rows_total{RATE}))", "process {{expert_process}}, rows"),
            ],
        ),
    ],
    "Links between the processes of a mesh": [
        (
            "Round trip",
            "Between a packet to another process and its acknowledgement, smoothed by the kernel; and until the process answers.",
            "s",
            [
                ("dsjax_link_round_trip_seconds", "{{instance}} to process {{peer}}"),
                ("dsjax_link_answer_seconds", "{{instance}} to process {{peer}}, answered"),
            ],
        ),
        (
            "Lost",
            "Share of the segments that were sent again in an hour; looks without an answer, a minute.",
            "percentunit",
            [
                (LOST, "{{instance}} to process {{peer}}"),
                (f"60 * rate(dsjax_link_probes_unanswered_total{RATE})", "{{instance}} to process {{peer}}, no answer"),
                (f"60 * rate(dsjax_link_probes_total{RATE})", "{{instance}} to process {{peer}}, looks"),
            ],
        ),
        (
            "Use of network cards",
            "Bytes a second ÷ what the card can.",
            "percentunit",
            [
                (
                    f"rate(dsjax_network_bytes_total{RATE})"
                    " / on (instance, interface) group_left () dsjax_network_speed_bytes_per_second",
                    "{{instance}} {{interface}} {{direction}}",
                )
            ],
        ),
    ],
}


def panel(id_: int, x: int, y: int, title: str, description: str, unit: str, queries: list[Query]) -> dict[str, Any]:
    """One chart over time."""
    targets = [
        {
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "range": True,
            "refId": chr(ord("A") + index),
        }
        for index, (expression, legend) in enumerate(queries)
    ]
    return {
        "id": id_,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """All of it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}
        )
        y += 1
        for index, each in enumerate(row):
            x = WIDTH * (index % 3)
            panels.append(panel(len(panels) + 1, x, y + HEIGHT * (index // 3), *each))
        y += HEIGHT * -(-len(row) // 3)
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "model_name",
            "label": "model",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(vllm:num_requests_running, model_name)", "refId": "models"},
            "refresh": 2,
            "hide": 0,
        },
    ]
    return {
        "uid": "dsjax",
        "title": "dsjax",
        "tags": ["dsjax", "vllm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "templating": {"list": variables},
        "panels": panels,
    }


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main()
