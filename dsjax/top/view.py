"""`view`: rates, shares and quantiles between two readings, which `dsjax top --json` writes as JSON."""

import json
import math
from typing import Any

from dsjax.top.reading import HISTOGRAMS, Exposition, NoAnswerError, StatusReading, counter_growth

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MAX_EXPERTS = 8


def view(before: StatusReading, after: StatusReading) -> dict[str, Any]:
    """Return what happened between two readings of one server. All numbers are finite.

    Times are seconds, shares are 0 to 1, and unknown values (such as the mean of nothing) are None. Fields:

    - `model`, `mesh`, `num_devices`: from `/server_info`; `window_seconds`: between the readings.
    - `ranks`: from `/get_load`, each with `tokens_per_second` (generated) added.
    - `tokens_per_second`: `prompt`, `generation`. `requests`: `running`, `waiting` now; `finished` by reason, `rejected`,
      `preempted`, `not_finite` in the window.
    - `cache`: `usage` now; `hit_share` of the prompt tokens in the window; `host` (None without offloading to host memory): `usage`,
      and pages `stored` and `fetched` in the window; `disk` (None without a disk tier): the same, and `failed`; `tiers` (None without
      an offload tier): for `device`, `host` and `disk`, the `hit_share` of the prompt tokens in the window, and the `wait` for hits
      (`count`, `mean`, `p50`, `p90`, `p99`).
    - `latency`: by name `count`, `mean`, `p50`, `p90`, `p99`, in the window.
    - `steps`: `per_second`, `padding_share`, `host_seconds` per step by part, `compilations_after_warm_up` in total.
    - `drafts`: None without speculative decoding; `per_second` (drafted tokens), their `acceptance`, `length` (tokens made by a row
      with drafts), and `per_position`: the share of rows with drafts whose first, second, … draft was accepted.
    - `experts`: None before anything was recorded; `balancedness`, and `hottest`: `expert`, `ep_rank`, `share` of all tokens,
      `times_mean`, in the window, or since recording began if the window has no tokens.
    - `balancing`: None without rebalancing; `balancedness` of the server's last window of loads, `layers_left` of the
      rebalance in progress, and in the window `rebalances`, `experts_moved`, `moved_bytes`, `exchanges` and `exchange_seconds`.
    - `expert_processes`: empty unless experts run in other processes; for each `process` (its place in `--afd-address`): whether it is
      `connected`, `losses` in the window, `last_gap_seconds`, and `sent` and `received` bytes per second.
    - `generation`: None if the mesh cannot change; its `number`, from 0, `devices`, `devices_wanted`, whether it is `changing`, and
      `requests_waiting` for a larger one.

    Raises:
        NoAnswerError: the readings have other fields or labels than those of dsjax serve.
    """
    try:
        fields = _build_view(before, after)
        json.dumps(fields, allow_nan=False)
        return fields
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoAnswerError(
            f"the server's /metrics, /server_info or /get_load is not dsjax serve's of this version ({type(error).__name__}: {error}); "
            "give the address of one as --url"
        ) from error


def _build_view(before: StatusReading, after: StatusReading) -> dict[str, Any]:
    seconds = max(after.time - before.time, 1e-9)
    old, new = before.metrics, after.metrics
    generated = new.growth(old, "vllm:generation_tokens_total", "engine")
    steps = _latency(old, new, HISTOGRAMS["step"])
    return {
        "model": after.info.get("model"),
        "mesh": after.info.get("mesh"),
        "num_devices": after.info.get("num_devices"),
        "window_seconds": seconds,
        "ranks": [
            {**load, "tokens_per_second": generated.get((str(load["rank"]),), 0.0) / seconds} for load in after.loads
        ],
        "tokens_per_second": {
            "prompt": _total_growth(old, new, "vllm:prompt_tokens_total") / seconds,
            "generation": sum(generated.values()) / seconds,
        },
        "requests": {
            "running": sum(load["running"] for load in after.loads),
            "waiting": sum(load["waiting"] for load in after.loads),
            "finished": {
                reason: count
                for (reason,), count in new.growth(old, "vllm:request_success_total", "finished_reason").items()
            },
            "rejected": _total_growth(old, new, "dsjax_requests_rejected_total"),
            "preempted": _total_growth(old, new, "vllm:num_preemptions_total"),
            "not_finite": _total_growth(old, new, "vllm:corrupted_requests_total"),
        },
        "cache": {
            "usage": _share(sum(x["used_pages"] for x in after.loads), sum(x["usable_pages"] for x in after.loads)),
            "hit_share": _share(
                _total_growth(old, new, "vllm:prefix_cache_hits_total"),
                _total_growth(old, new, "vllm:prefix_cache_queries_total"),
            ),
            "host": _offload_tier(old, new, "dsjax_rank_host_pages"),
            "disk": _disk_pages(old, new),
            "tiers": _tiers(old, new),
        },
        "latency": {name: _latency(old, new, metric) for name, metric in HISTOGRAMS.items()},
        "steps": _steps(old, new, seconds, steps["count"]),
        "drafts": _drafts(old, new, seconds),
        "experts": _experts(old, new),
        "balancing": _balancing(old, new),
        "expert_processes": _expert_processes(old, new, seconds),
        "generation": _mesh_epoch(new),
    }


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """Estimate a quantile as PromQL's `histogram_quantile` does: linear within a bucket, and the last finite bound beyond it.

    buckets: upper bound → cumulative count, the last bound infinite. Return None if nothing was counted.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    wanted = share * buckets[bounds[-1]]
    lower = count = 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > count:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - count) / (buckets[bound] - count)
        lower, count = bound, buckets[bound]
    return lower


def _offload_tier(old: Exposition, new: Exposition, name: str) -> dict[str, float | None] | None:
    room, used = new.total(name), new.total(f"{name}_used")
    if not room:
        return None
    stored, fetched = (_total_growth(old, new, f"{name}_{event}_total") for event in ("stored", "fetched"))
    return {"usage": _share(used, room), "stored": stored, "fetched": fetched}


def _disk_pages(old: Exposition, new: Exposition) -> dict[str, float | None] | None:
    pages = _offload_tier(old, new, "dsjax_disk_pages")
    failed = sum(new.growth(old, "dsjax_disk_failures_total", "operation").values())
    return pages and {**pages, "failed": failed}


def _tiers(old: Exposition, new: Exposition) -> dict[str, Any] | None:
    if not new.by("vllm:external_prefix_cache_queries_total", "engine"):
        return None
    hits = new.growth(old, "dsjax_prefix_cache_hits_total", "tier", "engine")
    missed = _total_growth(old, new, "vllm:external_prefix_cache_queries_total")
    hits_by_tier = {
        tier: sum(tokens for (label, _), tokens in hits.items() if label == tier) for tier in ("device", "host", "disk")
    }
    queried = missed + hits_by_tier["device"]
    return {
        tier: {"hit_share": _share(tokens, queried), "wait": _latency(old, new, "dsjax_cache_fetch_seconds", tier=tier)}
        for tier, tokens in hits_by_tier.items()
    }


def _total_growth(old: Exposition, new: Exposition, name: str) -> float:
    """Return how much a counter grew, over all engines and reasons."""
    return sum(new.growth(old, name, "engine", "reason").values())


def _latency(old: Exposition, new: Exposition, name: str, **labels: str) -> dict[str, float | None]:
    before, after = old.buckets(name, **labels), new.buckets(name, **labels)
    if any(count < before.get(bound, 0.0) for bound, count in after.items()):
        before = {}  # the server has restarted
    buckets = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    count = buckets.get(math.inf, 0.0)
    total = counter_growth(old.total(f"{name}_sum", **labels), new.total(f"{name}_sum", **labels))
    quantiles = {label: quantile(buckets, share) for label, share in _QUANTILES.items()}
    return {"count": count, "mean": total / count if count else None, **quantiles}


def _steps(old: Exposition, new: Exposition, seconds: float, count: float) -> dict[str, Any]:
    tokens = {kind: growth for (kind,), growth in new.growth(old, "dsjax_step_tokens_total", "kind").items()}
    host = new.growth(old, "dsjax_host_seconds_total", "part")
    return {
        "per_second": count / seconds,
        "padding_share": _share(tokens.get("padding", 0.0), sum(tokens.values())),
        "host_seconds": {part: growth / count for (part,), growth in host.items()} if count else {},
        "compilations_after_warm_up": new.total("dsjax_compilations_after_warm_up_total"),
    }


def _drafts(old: Exposition, new: Exposition, seconds: float) -> dict[str, Any] | None:
    if not new.by("vllm:spec_decode_num_drafts_total"):
        return None
    rows = _total_growth(old, new, "vllm:spec_decode_num_drafts_total")
    drafted = _total_growth(old, new, "vllm:spec_decode_num_draft_tokens_total")
    accepted = _total_growth(old, new, "vllm:spec_decode_num_accepted_tokens_total")
    growth = new.growth(old, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    by_position = {int(position): tokens for (position,), tokens in growth.items()}
    return {
        "per_second": drafted / seconds,
        "acceptance": _share(accepted, drafted),
        "length": 1 + accepted / rows if rows else None,
        "per_position": [_share(tokens, rows) for _, tokens in sorted(by_position.items())],
    }


def _experts(old: Exposition, new: Exposition) -> dict[str, Any] | None:
    name, labels = "dsjax_expert_tokens_total", ("expert", "ep_rank")
    tokens = new.growth(old, name, *labels)
    if not tokens:
        return None
    if not sum(tokens.values()):
        tokens = new.by(name, *labels)
    total = sum(tokens.values())
    hottest = sorted(tokens.items(), key=lambda item: -item[1])[:_MAX_EXPERTS]
    return {
        "balancedness": _balancedness(new, "dsjax_expert_balancedness"),
        "hottest": [
            {
                "expert": int(expert),
                "ep_rank": int(ep_rank),
                "share": _share(count, total),
                "times_mean": _share(count * len(tokens), total),
            }
            for (expert, ep_rank), count in hottest
        ],
    }


def _balancing(old: Exposition, new: Exposition) -> dict[str, Any] | None:
    if not new.by("dsjax_eplb_layers_left", "model_name"):
        return None
    counters = ("rebalances", "experts_moved", "moved_bytes", "exchanges", "exchange_seconds")
    return {
        "balancedness": _balancedness(new, "dsjax_eplb_balancedness"),
        "layers_left": new.total("dsjax_eplb_layers_left"),
        **{name: _total_growth(old, new, f"dsjax_eplb_{name}_total") for name in counters},
    }


def _balancedness(new: Exposition, name: str) -> dict[str, float]:
    return {aggregation: value for (aggregation,), value in new.by(name, "of").items()}


def _expert_processes(old: Exposition, new: Exposition, seconds: float) -> list[dict[str, Any]]:
    connected = new.by("dsjax_expert_process_connected", "expert_process")
    gaps = new.by("dsjax_expert_process_last_gap_seconds", "expert_process")
    losses = new.growth(old, "dsjax_expert_process_losses_total", "expert_process")
    sent = new.growth(old, "dsjax_expert_process_sent_bytes_total", "expert_process")
    received = new.growth(old, "dsjax_expert_process_received_bytes_total", "expert_process")
    return [
        {
            "process": int(process),
            "connected": bool(is_connected),
            "losses": losses.get((process,), 0.0),
            "last_gap_seconds": gaps.get((process,), 0.0),
            "sent": sent.get((process,), 0.0) / seconds,
            "received": received.get((process,), 0.0) / seconds,
        }
        for (process,), is_connected in sorted(connected.items(), key=lambda item: int(item[0][0]))
    ]


def _mesh_epoch(new: Exposition) -> dict[str, Any] | None:
    if not new.by("dsjax_generation", "model_name"):
        return None
    return {
        "number": int(new.total("dsjax_generation")),
        "devices": int(new.total("dsjax_generation_devices")),
        "devices_wanted": int(new.total("dsjax_generation_devices_wanted")),
        "changing": bool(new.total("dsjax_generation_changing")),
        "requests_waiting": int(new.total("dsjax_requests_waiting_for_mesh")),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
