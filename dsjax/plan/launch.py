"""How other engines start what was priced: vLLM, SGLang and TensorRT-LLM, in flags that their own documentation has.

The flags that each engine knows, with where each is documented, are data (`configs/engines`); a flag that is not there is not written.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsjax.hardware import Hardware
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import Precision

LAUNCHED = ("vllm", "sglang", "tensorrt-llm")
"""Engines whose commands a recipe can hold."""
HEAD = "$HEAD"
"""Address of an instance's first host, which a shell fills in."""
ADDRESS = "$ADDRESS"
"""The host's own address, on which an engine listens: no engine of these asks all that reach a host who they are by default."""
KEY = "$API_KEY"
"""The key that clients must show, for engines that know one; it is in the environment and in no file."""
KEY_ENVIRONMENT = {"vllm": "VLLM_API_KEY"}
"""Where an engine reads the key from the environment itself."""
PORTS = {"prefill and decode": 8000, "prefill": 8001, "decode": 8002}


@functools.cache
def documented(engine: str) -> Mapping[str, Any]:
    """`configs/engines/ENGINE.toml`: `name`, `version`, `program`, `sources`, `flags` and `keys` of a configuration file."""
    path = importlib.resources.files("configs") / "engines" / f"{engine}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass
class LaunchCommand:
    """One instance of a service in another engine's words.

    flags: flag → value, the same on all its hosts; a flag without a value is "". each_host: those that differ, one mapping a host.
    environment: variable → value, on all hosts.
    config: the configuration file that TensorRT-LLM reads beside its flags. lacks: what the estimate counts on and the command cannot say.
    """

    engine: str
    model: str
    role: str
    instances: int
    hosts: int
    devices: int
    flags: dict[str, str] = field(default_factory=dict)
    each_host: list[dict[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)

    def put(self, flag: str, value: object = "", host: int | None = None) -> None:
        """One more flag, of one host only if given."""
        if flag not in documented(self.engine)["flags"]:
            raise KeyError(f"{flag} is not a documented flag of {self.engine}")
        (self.flags if host is None else self.each_host[host])[flag] = str(value)

    def put_variable(self, name: str, value: object) -> None:
        """One more environment variable."""
        if name not in documented(self.engine).get("environment", {}):
            raise KeyError(f"{name} is not a documented environment variable of {self.engine}")
        self.environment[name] = str(value)

    def key(self, path: str, value: object) -> None:
        """One more entry of the configuration file: `moe_config.backend`."""
        if path not in documented(self.engine)["keys"]:
            raise KeyError(f"{path} is not a documented key of {self.engine}")
        *above, last = path.split(".")
        inside = self.config
        for name in above:
            inside = inside.setdefault(name, {})
        inside[last] = value

    @property
    def file(self) -> str:
        """Name of the configuration file."""
        return f"{self.role.split()[0]}.yaml"

    def commands(self) -> list[str]:
        """One line for a shell on each host of one instance; `HEAD`, `ADDRESS` and `KEY` are for the shell to fill in."""
        hosts = self.each_host or [{}]
        program = shlex.split(documented(self.engine)["program"])
        target = [] if "--model-path" in self.flags else [self.model]
        lines = []
        for more in hosts:
            words = [*program, *target, *(word for pair in (self.flags | more).items() for word in pair if word)]
            variables = [f"{name}={value}" for name, value in self.environment.items()]
            words = ["env", *variables, *words] if variables else words
            line = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
            lines.append(line if self.engine != "tensorrt-llm" or self.hosts == 1 else self._under_slurm(line))
        return lines

    def _under_slurm(self, line: str) -> str:
        tasks = f"--nodes={self.hosts} --ntasks={self.devices} --ntasks-per-node={self.devices // self.hosts}"
        return f"srun {tasks} --mpi=pmix trtllm-llmapi-launch {line}"

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


def unfit(engine: str, layout: InstanceLayout, host: int, hardware: Hardware, precision: Precision) -> str | None:
    """Why an engine cannot run a layout, as far as its documentation says; None where it can.

    host: devices of one. hardware: the device, on which TensorRT-LLM's expert kernels depend.
    """
    mesh = layout.unit.mesh
    if layout.mesh.pp_size > 1:
        return f"{layout.mesh}: for {engine} no command is written with pipeline stages"
    if "etp" in mesh.axes:
        return f"{layout.mesh}: for {engine} no command is written in which DP ranks share an expert's width"
    hybrid = mesh.splits_expert_width and mesh.ep_size > 1
    if engine == "vllm" and hybrid:
        return f"{layout.mesh}: vLLM spreads experts over all devices of an instance or cuts all of them, not both"
    if engine == "vllm" and mesh.tp_size > host and mesh.dp_size > 1:
        return f"{layout.mesh}: vLLM's documentation has data parallelism beside tensor parallelism of one host only"
    if engine != "tensorrt-llm":
        return None
    if mesh.tp_size > 1 and mesh.dp_size > 1:
        return f"{layout.mesh}: attention is data parallel over all devices of a TensorRT-LLM instance, or over none"
    wide = hardware.links_hosts and precision.expert < 1
    if layout.redundant and not wide:
        return f"{layout}: TensorRT-LLM's guide has redundant experts (WIDEEP with a load balancer) for NVFP4 on GB200 only"
    return None


class Limits:
    """What a step was priced with: requests and tokens of a DP rank, the longest request, memory, and overlaps."""

    def __init__(self, instance: Instance, batch: float, tokens: float, role: str):
        work, memory = instance.workload, instance.memory
        longest = (
            k.input.mean * (1 + 3 * k.input.variation) + k.output.mean * (1 + 3 * k.output.variation)
            for k in work.kinds
        )
        self.length = min(math.ceil(max(longest)) + 1, instance.config.max_position_embeddings)
        self.step_tokens = math.ceil(tokens)
        self.prompt = math.ceil(max(k.input.mean * (1 + 3 * k.input.variation) for k in work.kinds))
        self.seqs = max(1, math.ceil(tokens / work.computed if role == "prefill" else batch))
        self.tokens = 0 if role == "decode" else math.ceil(tokens)
        kept = memory.device - memory.reserve
        self.share = math.floor(kept / memory.device * 100) / 100
        # Of what is free once the weights are there.
        self.free = max(
            0.01, math.floor((kept - memory.weights_total) / (memory.device - memory.weights_total) * 100) / 100
        )
        decodes, prefills = role != "prefill", role != "decode"
        overlaps = (decodes and instance.overlapped(batch)) or (prefills and instance.halved(tokens))
        self.overlaps = not instance.layout.experts and overlaps
        self.cuts = bool(self.tokens) and self.tokens < self.prompt


def front(engine: str, launches: list[LaunchCommand]) -> str | None:
    """The command in front of prefill and decode instances; None where nothing is needed, or the engine has none to offer.

    Addresses are `$PREFILL_0`, `$DECODE_0` and so on, of each instance's first host.
    """
    if len(launches) < 2:
        return None
    urls = {
        one.role: [f"${one.role.upper()}_{number}:{PORTS[one.role]}" for number in range(one.instances)]
        for one in launches
    }
    if engine == "sglang":
        words = [f'--{role} "http://{url}"' for role, all_of in urls.items() for url in all_of]
        return " ".join(
            ["python3 -m sglang_router.launch_router --pd-disaggregation", *words, f'--host "{ADDRESS}" --port 8000']
        )
    if engine == "tensorrt-llm":
        names = {"prefill": "context_servers", "decode": "generation_servers"}
        lines = [f"hostname: {ADDRESS}", "port: 8000", "backend: pytorch"]
        for role, all_of in urls.items():
            lines += [f"{names[role]}:", f"  num_instances: {len(all_of)}", "  urls:"]
            lines += [f'    - "{url}"' for url in all_of]
        body = "\n".join(lines)
        return f"cat > front.yaml <<EOF\n{body}\nEOF\ntrtllm-serve disaggregated -c front.yaml"
    return None


def _key_lines(engine: str, launches: list[LaunchCommand]) -> tuple[str, list[str]]:
    """A comment for the script, and the lines that refuse to start an engine without a key where it can ask for one."""
    variable = KEY_ENVIRONMENT.get(engine)
    if not variable and all(KEY not in one.flags.values() for one in launches):
        return (
            "# This engine asks nobody for a key here: give an ADDRESS that only the cluster's own hosts and your gateway reach.",
            [],
        )
    needed = ': "${API_KEY:?give the key that clients must show, for instance what openssl rand -hex 32 prints}"'
    export = [f'export {variable}="$API_KEY"'] if variable else []
    return "# API_KEY: the key that clients must show.", [needed, *export]


def comment(text: str) -> str:
    """A text as lines of comment in YAML or a shell; what a user has named may have several."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines() or [""])


def script(made: Mapping[str, Any], engine: str, launches: list[LaunchCommand], command: str) -> str:
    """A recipe as one shell script: `sh FILE.sh ROLE [HOST]` starts one host of one instance, `sh FILE.sh front` what joins the sides.

    made: the recipe. command: what it was planned with.
    """
    about, (about_keys, keys) = documented(engine), _key_lines(engine, launches)
    lines = [
        "#!/bin/sh",
        comment(command),
        f"# {about['name']} {about['version']}; flags from:",
        *(f"#   {source}" for source in about["sources"].values()),
        *(comment(f"Note: {note}") for note in made["notes"]),
        "# HEAD: address of an instance's first host. HOST: its number among the instance's hosts, from 0.",
        "# ADDRESS: this host's own address, on which the engine listens; loopback if it is not given.",
        about_keys,
        "set -eu",
        'HEAD="${HEAD:-127.0.0.1}"',
        'ADDRESS="${ADDRESS:-127.0.0.1}"',
        'case "${1:-} ${2:-0}" in',
    ]
    for one in launches:
        lines.append(
            f"# {one.role}: {one.instances} instance{'s' * (one.instances > 1)} of {one.devices} devices on {one.hosts} "
            f"host{'s' * (one.hosts > 1)} each"
        )
        config = json.dumps(one.config, indent=2) if one.config else ""
        for number, line in enumerate(one.commands()):
            lines.append(f"'{one.role.split()[0]} {number}')" if len(launches) > 1 else f"'serve {number}')")
            if config:  # JSON is YAML too
                lines += [f"cat > {one.file} <<'EOF'", config, "EOF"]
            lines += [*keys, f"exec {line}", ";;"]
    joins = front(engine, launches)
    if joins:
        lines += ["'front 0')", joins, ";;"]
    roles = [one.role.split()[0] for one in launches] if len(launches) > 1 else ["serve"]
    usage = " | ".join([*(f"{role} [HOST]" for role in roles), *(["front"] if joins else [])])
    lines += ["*)", f"echo 'usage: sh FILE {usage}' >&2", "exit 2", ";;", "esac"]
    return "\n".join(lines) + "\n"
