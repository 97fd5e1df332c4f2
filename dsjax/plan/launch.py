"""Launch commands of vLLM, SGLang and TensorRT-LLM for a plan.

Each engine's options, with their sources, values and conditions, are data in `configs/engines/ENGINE.toml`. Its expressions use the names
of `facts_of`.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsjax.hardware import Hardware
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import Precision
from dsjax.plan.rules import documented, said, template, written
from dsjax.plan.skew import STEP_INTERVAL
from dsjax.toml_files import bundled_text

LAUNCHED = ("vllm", "sglang", "tensorrt-llm")
"""Engines whose commands a recipe can hold."""
KEY = "$API_KEY"
"""The API key that clients must send, for engines that support one; it is in the environment, never in a file."""
FOR_SHELL = {"head": "$HEAD", "address": "$ADDRESS", "key": KEY}
"""Facts that the shell fills in. An engine listens only at the host's own `$ADDRESS`, because by default no engine asks for a key."""
PORTS = {"prefill and decode": 8000, "prefill": 8001, "decode": 8002}
WINDOW = 1000
"""Steps in the load window of an expert balancer: vLLM's default, and the value of the published recipes for DeepSeek-R1."""


@dataclass
class LaunchCommand:
    """Launch command of one instance of a service in another engine."""

    engine: str
    model: str
    role: str
    instances: int
    hosts: int
    devices: int
    flags: list[dict[str, str]] = field(default_factory=list)  # for each command, flag → value; `""` without one
    environment: dict[str, str] = field(default_factory=dict)  # variable → value
    # the configuration file that TensorRT-LLM reads besides its flags
    config: dict[str, Any] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)  # assumed by the estimate, not expressible in the command

    @property
    def word(self) -> str:
        """The role in one word: prefill or decode."""
        return self.role.split()[0]

    @property
    def file(self) -> str:
        """Name of the configuration file."""
        return f"{self.word}.yaml"

    def commands(self) -> list[str]:
        """Return one shell line for each host of an instance, or one for all hosts; the shell fills in `FOR_SHELL`."""
        engine_file = documented(self.engine)
        lines = []
        variables = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        launcher = engine_file.get("across_hosts") if self.hosts > 1 else None
        for flags in self.flags:
            words = [*(variables if self.environment else []), *shlex.split(engine_file["program"])]
            words += [] if "--model-path" in flags else [self.model]  # SGLang; others take it as an argument
            words += [word for pair in flags.items() for word in pair if word]
            line = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
            lines.append(f"{template(launcher).render(vars(self))} {line}" if launcher else line)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        return {
            "engine": self.engine,
            "instances": self.instances,
            "hosts_each": self.hosts,
            "devices_each": self.devices,
            "commands": self.commands(),
            "config": {self.file: self.config} if self.config else {},
            "not_expressed": self.lacks,
        }


def launch(
    engine: str, model: str, instance: Instance, batch: float, tokens: float, role: str, instances: int
) -> LaunchCommand:
    """Return the command with which an engine starts one service of a plan.

    batch: running requests of a DP rank. tokens: prompt tokens of a DP rank in a step. role: `prefill and decode`, `prefill` or
    `decode`. instances: of the layout; the engine starts each copy of the experts as one of its own.
    """
    layout = instance.layout.unit
    cluster = instance.cluster
    hosts = math.ceil(layout.devices / cluster.devices_per_host)
    command = LaunchCommand(engine, model, role, instances * instance.layout.mesh.expert_copies, hosts, layout.devices)
    facts = facts_of(instance, batch, tokens, role) | FOR_SHELL
    facts |= {"model": model, "hosts": hosts, "devices": command.devices, "file": command.file, "port": PORTS[role]}
    is_whole_ep = facts["ep"] == command.devices > 1
    facts |= {"whole": is_whole_ep, "deepep": is_whole_ep and facts["dp"] > 1}
    for rank in range(1 if "across_hosts" in documented(engine) else hosts):  # rank of a host
        flags = written(engine, "flags", facts | {"rank": rank})
        command.flags.append({flag: str(value) for flag, value in flags.items()})
    command.environment = {name: str(value) for name, value in written(engine, "environment", facts).items()}
    for path, value in written(engine, "keys", facts).items():
        *tables, key = path.split(".")
        table = command.config
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
    reason = unfit(engine, instance.layout, cluster.devices_per_host, cluster.hardware, instance.options.precision)
    command.lacks = [*([reason] if reason else []), *said(engine, "lacks", facts), *said("any", "lacks", facts)]
    return command


def facts_of(instance: Instance, batch: float, step_tokens: float, role: str) -> dict[str, Any]:
    """Return the names that expressions of `configs/engines` may use: the instance's parts, and the inputs of the priced step.

    Requests (`seqs`) and tokens are of a DP rank. share: fraction of a device's memory for weights and caches, as vLLM takes it. free:
    fraction for caches of the memory that weights leave, as TensorRT-LLM takes it.
    """
    work, memory, options = instance.workload, instance.memory, instance.options
    mesh = instance.layout.unit.mesh
    decodes, prefills = role != "prefill", role != "decode"
    lengths = [  # prompt and output of each kind of request, 3 standard deviations above the mean
        (k.input.mean * (1 + 3 * k.input.variation), k.output.mean * (1 + 3 * k.output.variation)) for k in work.kinds
    ]
    prompt = math.ceil(max(one for one, _ in lengths))
    longest = math.ceil(max(map(sum, lengths)))
    seqs = max(1, math.ceil(batch if decodes else step_tokens / work.computed))
    verified = seqs * (1 + options.drafts)  # tokens of a decode step, with the drafts
    tokens = math.ceil(step_tokens) * prefills  # 0 without prefill
    usable = memory.device - memory.reserve
    weights = memory.weights_total
    overlaps = (decodes and instance.overlapped(batch)) or (prefills and instance.halved(step_tokens))
    return {
        "config": instance.config,
        "hardware": instance.cluster.hardware,
        "layout": instance.layout,
        "options": options,
        "engine": options.engine,
        "precision": options.precision,
        "prefix_hit": work.prefix_hit,
        "drafts": options.drafts,
        "window": WINDOW,
        "step_interval": STEP_INTERVAL,
        "dp": mesh.dp_size,
        "tp": mesh.tp_size,
        "ep": mesh.ep_size,
        "host": instance.cluster.devices_per_host,
        "role": role,
        "one_phase": not (decodes and prefills),
        "prompt": prompt,
        "longest": longest,
        "length": min(longest + 1, instance.config.max_position_embeddings),
        "seqs": seqs,
        "verified": verified,
        "step_tokens": math.ceil(step_tokens),
        "tokens": tokens,
        "batched": max(verified, tokens + verified * decodes),
        "share": math.floor(usable / memory.device * 100) / 100,
        "free": max(0.01, math.floor((usable - weights) / (memory.device - weights) * 100) / 100),
        "overlaps": not instance.layout.experts and overlaps,
    }


def unfit(engine: str, layout: InstanceLayout, host: int, hardware: Hardware, precision: Precision) -> str | None:
    """Return why an engine cannot run a layout according to its documentation; None if it can.

    host: devices of one host. hardware: the device, on which TensorRT-LLM's expert kernels depend.
    """
    mesh = layout.unit.mesh
    facts = {
        "engine": engine,
        "layout": layout,
        "mesh": mesh,
        "host": host,
        "hardware": hardware,
        "precision": precision,
    }
    facts |= {"dp": mesh.dp_size, "tp": mesh.tp_size, "ep": mesh.ep_size}
    reasons = said("any", "unfit", facts) + said(engine, "unfit", facts)
    return f"{layout}: {reasons[0]}" if reasons else None


def script(planned: Mapping[str, Any], engine: str, launches: list[LaunchCommand], command: str) -> str:
    """Return a recipe as a shell script. `sh FILE.sh ROLE [HOST]` starts one host of an instance, `sh FILE.sh front` the router.

    planned: the recipe. command: the command that planned it.
    """
    engine_file = documented(engine)
    router = None
    # The shell knows the addresses of the first hosts as $PREFILL_0, $DECODE_0 and so on.
    if len(launches) > 1 and "front" in engine_file:
        urls = {
            launch.role: [f"${launch.role.upper()}_{number}:{PORTS[launch.role]}" for number in range(launch.instances)]
            for launch in launches
        }
        router = template(engine_file["front"]).render(urls=urls)
    roles = [launch.word for launch in launches] if len(launches) > 1 else ["serve"]
    usage = " | ".join([*(f"{role} [HOST]" for role in roles), *(["front"] if router else [])])
    asks_key = "key" in engine_file or any(KEY in flags.values() for launch in launches for flags in launch.flags)
    variables = {"about": engine_file, "launches": launches, "front": router, "usage": usage, "asks": asks_key}
    text = bundled_text("engines", "script.sh")
    return template(text).render(command=command, notes=planned["notes"], **variables)
