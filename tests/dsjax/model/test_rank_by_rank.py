"""Emulated ranks run each a region of their own, in which a rank without a token leaves its layers out."""

import math
import re

import pytest
from layouts import write_checkpoint
from quick_compilation import FEW_SHAPES

from dsjax import LLM
from dsjax.engine.device.buckets import Rectangle

ATTENTION, EXPERTS = "dsjax_absorbed_attention", "dsjax_experts"


def computations(text: str) -> dict[str, str]:
    """Name and body of each computation of a compiled program."""
    parts = re.split(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def decode_program(kernels, tmp_path):
    def compile_step(mesh, drafts=0):
        """Text of the step's program, or of that which proposes so many drafts, and numbers of elements of a device's cache arrays.

        One MLA form, since a second one is a branch.
        """
        speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}
        directory = write_checkpoint(tmp_path, mtp=drafts > 0)
        options = FEW_SHAPES | {"kernels": "native", "batch_invariant": True} | speculation
        llm = LLM(str(directory), mesh=mesh, **options)
        try:
            programs = llm.executor.programs
            shape = programs.shape(Rectangle(1, 1 + drafts), None)
            lowered = programs.lower_drafts(shape, drafts) if drafts else programs.lower_step(shape)
            cache = [array.addressable_shards[0].data.size for array in llm.executor.state.cache.values()]
            return lowered.compile().as_text(), cache
        finally:
            llm.shutdown()

    return compile_step


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2], ids=["layers", "the MTP module"])
def test_a_rank_without_a_token_leaves_attention_out_but_not_its_experts(decode_program, drafts):
    text, _ = decode_program("dp=4", drafts)
    named = " ".join(re.findall(r"(?:branch|true|false)_computations?=\{?[^}\n]*", text))
    branches = set(re.findall(r"%([\w.\-]+)", named))
    parts = computations(text).items()
    attention, experts = ({name for name, body in parts if kernel in body} for kernel in (ATTENTION, EXPERTS))
    assert attention
    assert attention <= branches
    assert experts, "others' tokens may come to it"
    assert not experts & branches


@pytest.mark.slow
def test_ranks_whose_devices_add_sums_compute_in_step(decode_program):
    text, _ = decode_program("dp=2,tp=2")
    assert ATTENTION in text
    assert "conditional(" not in text


@pytest.mark.slow
def test_passes_that_draft_write_the_cache_in_place(decode_program):
    """The first pass writes several entries and the second one, each by another operation: XLA must not copy the cache between them."""
    text, cache = decode_program("dp=4", drafts=2)
    copied = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)]
    assert copied, "small arrays are"
    assert max(copied) < min(cache)
