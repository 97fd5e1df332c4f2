"""Commands and a recipe file that run the winner."""

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsjax.engine.setup.args import PREFILL_CHUNK, EngineArgs
from dsjax.engine.setup.side_options import PrefillConfig
from dsjax.errors import UserError
from dsjax.options import flag_of
from dsjax.plan.calibration import calibrated
from dsjax.plan.candidate import Candidate
from dsjax.plan.cold_start import cold_start, files_precision, host_bytes, reading, recovery
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED, LaunchCommand, facts_of, launch, script
from dsjax.plan.memory import expert_side_bytes
from dsjax.plan.moves import processes_of
from dsjax.plan.question import Question
from dsjax.plan.rules import documented, refuse, said, written

REPOSITORIES: Mapping[str, str] = documented("any")["repositories"]
"""Bundled configuration → repository of its weights, for services that load weights."""
_MOST = 0.98
"""Largest share of a device's memory for an engine: the CUDA context and communication buffers take about 2 %."""
_EXPERTS_AT = "EXPERTS"
"""Placeholder in a recipe for the host of an expert process, followed by a number if there are several."""
_BESIDE_DECODES = PREFILL_CHUNK
"""Prompt tokens that a decode worker's step has room for: the end of a prompt (at most a page), or a chunk if the prefill is lost. The
temporaries of a larger step would take memory from the cache, and were not priced."""

_ONE_PROCESS, _FRONT_END, _MOST_FRONT_ENDS = 15_000.0, 15_750.0, 66_600.0
"""Events per second of `dsjax serve`: of a single process; of each front end of an engine process (two: 31,500); and of the engine process
behind any number of front ends. Calculated from CPU times: docs/measurements/2026-11-22-epyc-2-cores.csv."""


def front_ends(rate: float) -> int:
    """Return the number of HTTP processes that a server needs for `rate` output tokens per second; 1: the engine's own process."""
    return 1 if rate <= _ONE_PROCESS else math.ceil(min(rate, _MOST_FRONT_ENDS) / _FRONT_END)


def serve_options(
    model: str, instance: Instance, batch: float, prefill_tokens: float, prefill_only: bool = False
) -> dict[str, str]:
    """Return the `dsjax serve` options of one instance, with steps as large as the priced ones.

    prefill_only: the instance generates only first tokens, for as many prompts at once as fill its step.
    """
    work, layout = instance.workload, instance.layout
    facts = facts_of(instance, batch, prefill_tokens, "prefill" if prefill_only else "prefill and decode")
    seqs, verified = facts["seqs"], facts["verified"]
    room = facts["step_tokens"] + (0 if prefill_only else seqs)
    decodes, prompts = instance.halved_from(seqs), instance.halved(prefill_tokens)
    facts |= {
        "args": EngineArgs,
        "stages": layout.mesh.pp_size,
        "room": room,
        "memory_share": memory_share(instance, seqs, facts["longest"]),
        "absorbs": instance.step_models()[0].absorbs(work.computed, work.cached, work.cached + (work.computed + 1) / 2),
        "halves": prompts or (decodes is not None and not prefill_only),
        "halved_from": decodes,
        "halves_prompts": prompts,
        "never": max(verified, room) + 1,
        "balances": instance.places_by_load,
    }
    options = {"--model": model, **_meshes(instance), **written("dsjax", "flags", facts)}
    return {flag: str(value) for flag, value in options.items()}


def _meshes(instance: Instance) -> dict[str, str]:
    """Return the mesh options of an instance and, if AFD needs separate processes, the role of the attention process."""
    layout, cluster = instance.layout, instance.cluster
    if not layout.experts:
        return {"--mesh": str(layout.mesh)}
    named = {"--attention-mesh": str(layout.mesh), "--expert-mesh": f"ep={layout.experts}"}
    if layout.devices <= cluster.devices_per_host:
        return named
    parts = processes_of(cluster, layout.experts)
    addresses = ",".join(f"{_EXPERTS_AT}{rank}:7000" if parts > 1 else f"{_EXPERTS_AT}:7000" for rank in range(parts))
    return named | {"--afd-role": "attention", "--afd-address": addresses}


def memory_share(instance: Instance, requests: float, tokens: float) -> float:
    """Return the share of a device's memory for weights, the cache of requests of `tokens` tokens, and a step's temporaries, rounded up.

    The share is at most 0.98: the rest of the reserve belongs to the runtime."""
    memory = instance.memory
    temporaries = max(0.0, memory.reserve - (1 - _MOST) * memory.device)
    needed = memory.weights_total + requests * memory.request_bytes(tokens) + temporaries
    return min(_MOST, math.ceil(needed / memory.device * 100) / 100)


def command(options: dict[str, str]) -> str:
    """Return a shell command line; an option without a value is a flag. Sides of a disaggregated service are NVIDIA Dynamo workers."""
    program = "dynamo" if "--disaggregation-mode" in options else "serve"
    return shlex.join(["dsjax", program, *(word for pair in options.items() for word in pair if word)])


def notes(candidate: Candidate) -> list[str]:
    """Return notes on what the estimate assumes but the commands do not enable."""
    facts = {
        "options": candidate.decode.options,
        "one_phase": candidate.mode == "separated",
        "hardware": candidate.decode.cluster.hardware,
        "prefill_hardware": candidate.prefill.cluster.hardware,
        "two_kinds": candidate.decode.cluster.prefill is not None,
        "rate": candidate.throughput.high / candidate.count,
        "most_front_ends": _MOST_FRONT_ENDS,
    }
    return said("dsjax", "lacks", facts)


def launches(engine: str, model: str, candidate: Candidate) -> list[LaunchCommand]:
    """Return another engine's launch commands for the services of a plan, prefill first."""
    return [launch(engine, REPOSITORIES.get(model, model), *service) for service in _roles(candidate)]


def _roles(candidate: Candidate) -> list[tuple[Instance, float, float, str, int]]:
    """Return (instance, batch, prompt tokens of a step, role, number of instances) of each service."""
    is_separated = candidate.mode == "separated"
    role = "decode" if is_separated else "prefill and decode"
    roles = [(candidate.decode, candidate.batch, candidate.prefill_tokens, role, candidate.count)]
    if is_separated:
        roles.insert(0, (candidate.prefill, 1, candidate.prefill_tokens, "prefill", candidate.prefill_count))
    return roles


def recipe(model: str, question: Question, candidate: Candidate) -> dict[str, Any]:
    """Return everything needed to run and recheck the winner: the question, the services, the expected figures.

    Commands are those of dsjax or of the planned engine; with `published`, each service also has the commands of all engines.

    - `services`: `role`, `instances`, `command` and `options` of each; `weight_bytes_per_host`, `cold_start_s` (without compiling) and
      `recovery` (`Recovery`, null if the loss of a host ends the instance); for other engines `launches`
    - `one_process`: a `dsjax serve` that runs a disaggregated winner on one host, or null
    - `expected`: `Candidate.to_json`; `calibrated`: as `calibration.calibrated`
    - `notes`: what the commands cannot express
    """
    engine = question.options.engine.name
    work, objective = question.workload, question.objective
    services = [_service(model, *service) for service in _roles(candidate)]
    if services[-1]["options"].get("--afd-role"):
        services += _expert_services(services[-1], candidate.decode)
    _exchange_alike(services)
    needed = front_ends(candidate.throughput.high / candidate.count)
    if candidate.mode == "aggregated" and needed > 1:
        services[0]["options"]["--api-server-count"] = str(needed)
        services[0]["command"] = command(services[0]["options"])
    remarks = notes(candidate)
    together = None if engine in LAUNCHED else one_process(services, candidate)
    engines = LAUNCHED if engine == "published" else (engine,)
    for name in (one for one in LAUNCHED if one in engines):
        every = launches(name, model, candidate)
        for service, one in zip(services, every, strict=True):
            service.setdefault("launches", {})[name] = one.to_json()
            if name == engine:
                service |= {"command": one.commands()[0], "options": one.flags[0]}
                service |= {"instances": one.instances, "devices_each": one.devices}
        if name == engine:
            remarks = list(dict.fromkeys(text for one in every for text in one.lacks))
    return {
        "model": model,
        "cluster": question.cluster.name,
        "workload": {
            "input_tokens": work.input.mean,
            "output_tokens": work.output.mean,
            "concurrency": work.concurrency,
            "requests_per_s": work.rate,
            "prefix_hit": work.prefix_hit,
            "classes": [
                {"name": k.name, "share": k.share, "input_tokens": k.input.mean, "output_tokens": k.output.mean}
                for k in work.classes
            ],
        },
        "objective": {"ttft_s": objective.ttft, "tpot_s": objective.tpot, "output_tokens_per_s": objective.throughput},
        "services": services,
        "one_process": together,
        "expected": candidate.to_json(),
        "calibrated": calibrated(candidate),
        "notes": remarks,
    }


def write_json_recipe(file: Path, model: str, question: Question, candidate: Candidate, command: str = "") -> None:
    """Write the winner's recipe as JSON. `command` is ignored: the format has no place for it."""
    text = json.dumps(recipe(model, question, candidate), indent=2, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")


def read_recipe(file: Path) -> dict[str, Any]:
    """Read a recipe that `write_json_recipe` wrote. Raises `UserError` if the file cannot be read or is not a recipe."""
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a recipe: {error}; expected what dsjax plan recipe wrote") from error
    if not isinstance(made, dict) or not {"services", "expected", "calibrated", "workload"} <= made.keys():
        raise UserError(f"{file} is no recipe; expected what dsjax plan recipe wrote")
    return made


def _service(model: str, instance: Instance, batch: float, tokens: float, role: str, count: int) -> dict[str, Any]:
    tokens = min(tokens, _BESIDE_DECODES) if role == "decode" else tokens
    options = serve_options(model, instance, batch, tokens, role == "prefill")
    options |= {"--disaggregation-mode": role} if role in ("prefill", "decode") else {}
    devices = instance.layout.mesh.num_devices if "--afd-role" in options else instance.layout.devices
    lost = recovery(instance)
    start = {"weight_bytes_per_host": host_bytes(instance), "cold_start_s": cold_start(instance).to_json()}
    return _started(role, count, devices, options) | start | {"recovery": lost and lost.to_json()}


def _started(role: str, instances: int, devices: int, options: dict[str, str]) -> dict[str, Any]:
    return {
        "role": role,
        "instances": instances,
        "devices_each": devices,
        "command": command(options),
        "options": options,
    }


def _expert_services(attention: Mapping[str, Any], instance: Instance) -> list[dict[str, Any]]:
    """Return the expert processes that an attention process calls: same options, other role, and a rank if there are several."""
    layout, cluster = instance.layout, instance.cluster
    parts = attention["options"]["--afd-address"].count(",") + 1
    size = expert_side_bytes(instance.config, layout, files_precision(instance), instance.options.drafts > 0)
    size *= layout.experts // parts
    start = {"weight_bytes_per_host": size, "cold_start_s": reading(cluster, size).to_json(), "recovery": None}
    ranks = [{"--afd-server-rank": str(rank)} for rank in range(parts)] if parts > 1 else [{}]
    every = [attention["options"] | {"--afd-role": "expert"} | rank for rank in ranks]
    return [_started("experts", attention["instances"], layout.experts // parts, options) | start for options in every]


def _exchange_alike(services: list[dict[str, Any]]) -> None:
    """Give all services the same `--dispatch-wire`, even one that dispatches nothing: otherwise they reject each other's KV pages."""
    flag = "--dispatch-wire"
    value = next((one["options"][flag] for one in services if flag in one["options"]), None)
    for service in services if value else ():
        service["options"].setdefault(flag, value)
        service["command"] = command(service["options"])


def one_process(services: Sequence[Mapping[str, Any]], candidate: Candidate) -> dict[str, Any] | None:
    """Return both sides of a disaggregated plan as one `dsjax serve` process on a host. None if the plan is aggregated, has more than one
    engine of a kind or needs more devices than a host has, or if the sides differ in an option that applies to the whole process.
    """
    cluster = candidate.decode.cluster
    sides = (candidate.prefill, candidate.decode)
    if candidate.mode != "separated" or cluster.prefill is not None or candidate.devices > cluster.devices_per_host:
        return None
    if (candidate.prefill_count, candidate.count) != (1, 1):  # each engine is then a process, behind Dynamo's frontend
        return None
    prefill, decode = (dict(service["options"]) for service in services)
    together = {"--model": decode["--model"]}
    together |= {"--prefill-mesh": prefill.pop("--mesh"), "--decode-mesh": decode.pop("--mesh")}
    copies = [side.layout.redundant for side in sides]
    if "--enable-eplb" in prefill | decode:  # then both sides rebalance experts by load, even without redundant ones
        together["--enable-eplb"] = ""
    if copies[1]:
        together["--redundant-experts"] = str(copies[1])
    for options in (prefill, decode):
        for flag in ("--disaggregation-mode", "--enable-eplb", "--eplb-config", "--redundant-experts"):
            options.pop(flag, None)
    own = {"redundant_experts": copies[0]} if copies[0] != copies[1] else {}
    for field in dataclasses.fields(PrefillConfig):
        flag = flag_of(field)
        if prefill.get(flag) != decode.get(flag):
            own[field.name] = int(prefill[flag])
            prefill[flag] = decode[flag]
    if own:
        together["--prefill-config"] = json.dumps(own)
    share = "--gpu-memory-utilization"  # JAX takes the same share of every device of a process
    shares = [options[share] for options in (prefill, decode) if share in options]
    if shares:
        prefill[share] = decode[share] = max(shares, key=float)
    if prefill != decode:
        return None
    start = {"weight_bytes_per_host": sum(map(host_bytes, sides)), "cold_start_s": cold_start(*sides).to_json()}
    return _started("prefill and decode", 1, candidate.devices, together | decode) | start


def check_recipe(file: Path, engine: str) -> None:
    """Check that a recipe of this file type can be written for an engine. Raises `UserError` if it cannot."""
    refuse("recipe", file=file, suffix=file.suffix, engine=engine, launched=LAUNCHED)


def write_script(file: Path, model: str, question: Question, candidate: Candidate, command: str) -> None:
    """Write the winner as a shell script for the planned engine. command: the command that made the plan."""
    engine = question.options.engine.name
    planned, services = recipe(model, question, candidate), launches(engine, model, candidate)
    file.write_text(script(planned, engine, services, command), encoding="utf-8")
