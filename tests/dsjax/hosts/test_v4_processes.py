"""A DeepSeek-V4 over two processes of two devices each makes the tokens of one device, with drafts and with pages from host memory."""

import json

import pytest
from llm_process import generate, generate_alone, sample
from processes import outputs_of
from quick_compilation import FEW_SHAPES
from v4_models import write_v4_checkpoint

pytestmark = pytest.mark.slow

OPTIONS = {
    "mesh": "dp=2,tp=2",
    "dispatch": "ragged",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "cache_tokens": 32,
    "host_cache_bytes": 400_000,
}


def test_two_processes_make_the_tokens_of_one_device(tmp_path):
    # Both kinds of compressed entries, and the MTP module's window alone; rates of which a page of `FEW_SHAPES` holds whole windows.
    sizes = {"rates": (2, 4), "sliding_window": 4, "num_nextn_predict_layers": 1}
    model = str(write_v4_checkpoint(tmp_path, "ch", hashed=1, **sizes))
    outputs = outputs_of({"model": model, **FEW_SHAPES, **OPTIONS}, "go", "others", "go", "sampled")
    first, _, again, drawn = (json.loads(line) for line in outputs[0].splitlines() if line.startswith("{"))
    greedy, sampled = generate_alone(model, lambda llm: (generate(llm), sample(llm)), **FEW_SHAPES)
    assert [one["tokens"] for one in (first, again, drawn)] == [greedy, greedy, sampled]
    assert again["fetched"] > first["fetched"], "pages that others pushed out came back"
