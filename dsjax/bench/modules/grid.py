"""The benchmark cases of a run: every requested module at every requested size."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from dsjax.bench.modules.attention import attention_cases
from dsjax.bench.modules.dense import embedding_cases, head_cases, layer_cases, product_cases, quantisation_cases
from dsjax.bench.modules.launch import input_cases, launch_cases
from dsjax.bench.modules.options import MODULES, ModuleGrid
from dsjax.bench.modules.routed import default_experts, exchange_cases, expert_cases
from dsjax.bench.modules.run import ModuleCase
from dsjax.bench.modules.setting import Setting, free_memory
from dsjax.config.layers import kinds_of
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.errors import UserError
from dsjax.model.forms import form_of
from dsjax.model.parameter_counts import expert_parameters
from sharding import MeshSpec

MOST_ROWS = 512
"""Maximum number of requests that decode at once; larger token counts come from prompts."""
LEAST_CHUNK = 16


def cases(setting: Setting, grid: ModuleGrid) -> Iterator[ModuleCase]:
    """Yield the cases of a run, in the order of the tables."""
    tokens = grid.token_counts
    rows = [count for count in tokens if count <= MOST_ROWS] or tokens[:1]
    made = {
        "launch": lambda: launch_cases(setting, rows),
        "inputs": lambda: input_cases(setting, rows),
        "embedding": lambda: embedding_cases(setting, tokens),
        "attention": lambda: _attention(setting, grid, rows, tokens),
        "experts": lambda: expert_cases(setting, rank_experts(setting, grid.experts), tokens),
        "head": lambda: head_cases(setting, rows),
        "fp8": lambda: quantisation_cases(setting, tokens),
        "product": lambda: product_cases(setting, tokens),
        "dispatch": lambda: exchange_cases(setting, MeshSpec.parse(grid.mesh), tokens),
    }
    for name in MODULES:
        if name in grid.modules:
            yield from made[name]() if name in made else layer_cases(setting, name, tokens)


def rank_experts(setting: Setting, asked: int | None) -> int:
    """Return the number of experts on the rank whose product is timed; 0 for a model without experts."""
    config = setting.config
    if not config.is_moe:
        return 0
    size = math.ceil(expert_parameters(config) * WEIGHT_FORMATS[setting.weights].expert_bytes)
    memory = free_memory(setting.step.mesh.devices.flat[0])
    return min(config.n_routed_experts, asked or default_experts(config, memory, size))


def _attention(setting: Setting, grid: ModuleGrid, rows: list[int], tokens: list[int]) -> Iterator[ModuleCase]:
    """Yield attention cases. Decode: rows × contexts, also with drafts to verify. Prefill: one chunk, at the start of a prompt and after
    cached positions.
    """
    contexts = grid.context_lengths
    chunks = [count for count in tokens if count >= LEAST_CHUNK]
    decode = [(count, 1, context) for count in rows for context in contexts]
    verify = [(count, 1 + grid.drafts, context) for count in rows for context in contexts] if grid.drafts else []
    prefill = [(1, chunk, context) for chunk in chunks for context in sorted({0, *contexts})]
    config, step = setting.config, setting.step
    if grid.forms is not None and not config.family.has_forms:
        raise UserError(f"--forms chooses forms of MLA, and {config.model_type} has none; leave it out")
    forms = list(map(form_of, grid.form_names)) if config.family.has_forms else [step.decode_form]
    # With --quick, time the step's own forms only in their own phase; time other forms in both.
    own = {step.decode_form: "decode", step.prefill_form: "prefill"} if grid.quick and len(forms) > 1 else {}
    counts = Counter[str]()
    for kind, count in kinds_of(config.layer_runs):
        counts[kind.attention] += count
    for (kind, count), form in itertools.product(counts.items(), forms):
        if own.get(form) != "prefill":
            yield from attention_cases(setting, kind, count, form, "decode", decode)
            yield from attention_cases(setting, kind, count, form, "verify", verify)
        if own.get(form) != "decode":
            yield from attention_cases(setting, kind, count, form, "prefill", prefill)
