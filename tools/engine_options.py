"""Writes `configs/engines/options/ENGINE.json`: every option that today's vLLM or SGLang accepts, read from its own source.

    pip download --no-deps vllm && unzip -q vllm-*.whl -d FOLDER
    python tools/engine_options.py vllm FOLDER VERSION

Nothing of the engine is imported or run: its argument parser is read as syntax. `tests/dsjax/plan/test_engine_options.py` holds every
option that `dsjax plan` writes for an engine against these files. TensorRT-LLM's wheel is not on PyPI; its file was written from
the files of its repository that are named here, and this tool writes it again from a checkout. Variables of NCCL, which TensorRT-LLM's
processes read too, are from a checkout of NCCL in its folder `nccl`; `environment_from` says which commits were read.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "engines" / "options"
_TENSORRT_OBJECTS = {
    "cuda_graph_config": ("CudaGraphConfig",),
    "kv_cache_config": ("KvCacheConfig",),
    "moe_config": ("MoeConfig",),
    "moe_config.load_balancer": ("MoeLoadBalancerConfig",),
    "speculative_config": ("DecodingBaseConfig", "MTPDecodingConfig"),
    "cache_transceiver_config": ("CacheTransceiverConfig",),
    "attention_dp_config": ("AttentionDpConfig",),
}
"""Part of the configuration file to the classes whose fields it may have."""
_TENSORRT_READS = (
    "cpp/tensorrt_llm/common/envUtils.cpp",
    "tensorrt_llm/logger.py",
    "tensorrt_llm/_torch/modules/fused_moe/communication/communication_factory.py",
)
"""Where TensorRT-LLM reads its environment: its C++ runtime, the level of its log, and the choice of an exchange for experts."""


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def fields(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The annotated fields of a class, in its order, but for private ones and pydantic's `model_config`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for line in node.body:
                match line:
                    case ast.AnnAssign(target=ast.Name(id=field)) if field[0] != "_" and field != "model_config":
                        yield field, line


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def flags_of(call: ast.Call) -> list[str]:
    return [a.value for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]


def literals(trees: list[ast.Module]) -> dict[str, list[str]]:
    """`Name = Literal["a", "b"]` and `NAME = ["a", "b"]`: the name's values."""
    found = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                if isinstance(value, ast.Subscript) and getattr(value.value, "id", "") == "Literal":
                    found[node.targets[0].id] = strings(value.slice)
                elif isinstance(value, ast.List) and all(isinstance(e, ast.Constant) for e in value.elts):
                    found[node.targets[0].id] = strings(value)
    return found


def choices_of(node: ast.AST | None, known: dict[str, list[str]]) -> list[str]:
    """The values that an annotation allows: of a literal, or of a name that stands for one."""
    if node is None:
        return []
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and getattr(part.value, "id", "") == "Literal":
            return strings(part.slice)
        if isinstance(part, ast.Name) and part.id in known:
            return known[part.id]
    return []


def vllm(source: Path) -> dict:
    arguments, front = source / "vllm/engine/arg_utils.py", source / "vllm/entrypoints/common/cli_args.py"
    parallel, variables = source / "vllm/config/parallel.py", source / "vllm/envs.py"
    trees = {path: read(path) for path in (arguments, front, parallel, variables)}
    configs = {path: read(path) for path in sorted((source / "vllm/config").glob("*.py"))}
    known = literals(list(configs.values()))
    options = {
        flag: []
        for path in (arguments, front)
        for call in calls(trees[path], "add_argument")
        for flag in flags_of(call)
    }
    options |= {
        dashed(name): [] for kind in ("BaseFrontendArgs", "FrontendArgs") for name, _ in fields(trees[front], kind)
    }
    for tree in configs.values():  # a configuration's field is an option of the same name
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name, line in fields(tree, node.name):
                    if dashed(name) in options and not options[dashed(name)]:
                        options[dashed(name)] = choices_of(line.annotation, known)
    objects = {}
    for flag, kind in (("--eplb-config", "EPLBConfig"), ("--compilation-config", "CompilationConfig"),
                       ("--kv-transfer-config", "KVTransferConfig"), ("--speculative-config", "SpeculativeConfig")):  # fmt: skip
        objects[flag] = sorted({name for tree in configs.values() for name, _ in fields(tree, kind)})
    names = {key for key in strings(trees[variables]) if re.fullmatch(r"VLLM_[A-Z0-9_]+", key)}
    return {"options": options, "objects": objects, "environment": sorted(names)}


def sglang(source: Path) -> dict:
    groups = source / "sglang/srt/arg_groups"
    trees = [read(path) for path in sorted((groups / "fields").glob("*.py"))]
    known = literals([read(groups / "choices.py"), *trees])
    options: dict[str, list[str]] = {}
    for tree in trees:
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for name, line in fields(tree, kind.name):
                about = [n for n in ast.walk(line.annotation) if isinstance(n, ast.Call)]
                named = {getattr(n.func, "id", "") for n in about}
                words = {k.arg: k.value for n in about if getattr(n.func, "id", "") == "Arg" for k in n.keywords}
                if "Derived" in named or (isinstance(words.get("no_cli"), ast.Constant) and words["no_cli"].value):
                    continue
                given = words.get("choices")
                values = choices_of(given, known) or (strings(given) if isinstance(given, ast.List) else [])
                values = values or choices_of(line.annotation, {})
                first = strings(words["cli_name"])[0] if "cli_name" in words else dashed(name)
                others = strings(words["aliases"]) if "aliases" in words else []
                options |= dict.fromkeys([first, *(o for o in others if o.startswith("--"))], values)
    server = read(source / "sglang/srt/server_args.py")
    options |= {flag: [] for call in calls(server, "add_argument") for flag in flags_of(call) if flag not in options}
    deprecated = {flag: instead for call in calls(server, "add_argument") for flag in flags_of(call)
                  if (instead := " ".join(s for k in call.keywords if k.arg == "new_flag" for s in strings(k.value)))}  # fmt: skip
    variables = read(source / "sglang/srt/environ.py")
    names = {t.id for node in ast.walk(variables) if isinstance(node, ast.Assign) for t in node.targets
             if isinstance(t, ast.Name) and re.fullmatch(r"SGLANG_[A-Z0-9_]+", t.id)}  # fmt: skip
    return {"options": options, "objects": {}, "environment": sorted(names), "deprecated": deprecated}


def tensorrt_llm(source: Path) -> dict:
    serve, arguments = read(source / "tensorrt_llm/commands/serve.py"), read(source / "tensorrt_llm/llmapi/llm_args.py")
    command = next(n for n in ast.walk(serve) if isinstance(n, ast.FunctionDef) and n.name == "serve")
    options = {flag: [] for one in command.decorator_list for call in calls(one, "option") for flag in flags_of(call)}
    objects = {
        key: [name for kind in kinds for name, _ in fields(arguments, kind)] for key, kinds in _TENSORRT_OBJECTS.items()
    }
    objects[""] = sorted({name for kind in ("BaseLlmArgs", "TorchLlmArgs") for name, _ in fields(arguments, kind)})
    names = {name for path in _TENSORRT_READS for name in variables_read((source / path).read_text(encoding="utf-8"))}
    return {"options": options, "objects": objects, "environment": sorted(names | nccl(source / "nccl"))}


def variables_read(text: str) -> list[str]:
    """The variables that a file in C++ or Python asks the environment for, by functions whose name ends in `env`, or `environ.get`."""
    return re.findall(r"(?:[eE]nv|environ\.get)\(\s*[\"']([A-Z0-9_]+)[\"']", text)


def nccl(source: Path) -> set[str]:
    """The variables that NCCL reads."""
    found = set()
    for path in sorted((source / "src").rglob("*.cc")) + sorted((source / "src").rglob("*.h")):
        one = path.read_text(encoding="utf-8")
        found |= {f"NCCL_{name}" for name in re.findall(r'NCCL_PARAM\(\w+,\s*"([A-Z0-9_]+)"', one)}
        found |= set(re.findall(r'(?:[eE]nv\w*|Level)\([^"();]*"(NCCL_[A-Z0-9_]+)"', one))
    return found


READERS = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}


def text(engine: str, version: str, found: dict) -> str:
    """JSON with one option, object or variable a line."""
    command = f"python tools/engine_options.py {engine} FOLDER {version}"
    about = {"engine": engine, "version": version, "made_by": command}
    blocks = [f'"{name}": {json.dumps(value)}' for name, value in about.items()]
    for name in ("options", "objects"):
        rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(found[name][key])}" for key in sorted(found[name]))
        blocks.append(f'"{name}": {{\n{rows}\n  }}')
    blocks.append(f'"deprecated": {json.dumps(found.get("deprecated", {}))}')
    if found.get("environment_from"):
        blocks.append(f'"environment_from": {json.dumps(found["environment_from"])}')
    blocks.append(f'"environment": {json.dumps(found["environment"])}')
    return "{\n  " + ",\n  ".join(blocks) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=READERS)
    parser.add_argument("folder", type=Path, help="what holds the engine's package")
    parser.add_argument("version", help="of the engine, to be written beside its options")
    parser.add_argument("--environment-from", nargs="*", help="commits of the files with variables")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    found = READERS[given.engine](given.folder) | {"environment_from": given.environment_from}
    made = text(given.engine, given.version, found)
    (FOLDER / f"{given.engine}.json").write_text(made, encoding="utf-8")
