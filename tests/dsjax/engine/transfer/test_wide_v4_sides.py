"""Pages of a DeepSeek-V4 with a quantised cache go from a prefill side of two processes to a decode side of two."""

import pytest
from side_process import run
from test_wide_sides import OF_SIDES, Side
from v4_engine import BLOCKS, DRAFTS, PROMPTS, QUANTISED, SIZES, G, write

from dsjax import LLM

pytestmark = pytest.mark.slow


def test_the_tokens_are_those_of_one_device(tmp_path):
    patient = OF_SIDES | {"transfer_timeout": 600}
    options = {"model": str(write(tmp_path, **BLOCKS)), "dtype": "float32", **SIZES, **QUANTISED}
    with LLM(mesh="dp=1", **options) as llm:
        expected = run(llm, [(str(index), tokens, None) for index, tokens in enumerate(PROMPTS)])
    # Each prefill process has half of the heads; each decode process pulls pages of its own requests.
    sides = {"prefill": "tp=2", "decode": "dp=2"}
    prefill, decode = (
        Side(
            2,
            mesh=mesh,
            disaggregation_mode=mode,
            disaggregation_transfer_backend="jax",
            **patient,
            **options,
            **DRAFTS,
        )
        for mode, mesh in sides.items()
    )
    try:
        for side in (prefill, decode):
            side.wait()
        said = [(str(index), tokens, prefill.ask(tokens=tokens)) for index, tokens in enumerate(PROMPTS)]
        assert decode.ask(requests=said)["token_ids"] == expected
        counts = decode.ask()
        assert (counts["asked"], counts["given_up"]) == (counts["completed"], 0)
        assert counts["completed"] == sum(len(tokens) > G for tokens in PROMPTS)
    finally:
        prefill.end()
        decode.end()
